"""Ports of the process: what the gRPC ones take, and who has them."""

from __future__ import annotations

import grpc

from extproc.errors import KvgateError

_MAX_STREAMS = 1_000_000


class PortTaken(KvgateError):
    """A port of ours belongs to somebody else."""


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """gRPC options of a port that takes messages up to this size."""
    return [
        # Envoy holds one stream a request, queued ones included.
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        # Streams of a burst wait for the event loop; by default, from 1,000 on gRPC drops some.
        ("grpc.server.max_pending_requests", _MAX_STREAMS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_STREAMS),
        # A buffered body comes in one message.
        ("grpc.max_receive_message_length", max_message_bytes + 1024 * 1024),
        ("grpc.so_reuseport", 0),
    ]


def bind(server: grpc.aio.Server, host: str, port: int) -> None:
    """Open a port.

    Raises:
        PortTaken: names it.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if not bound:
        raise PortTaken(f"port {port} on {host} is already in use")
