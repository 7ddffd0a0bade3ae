"""``Settings`` of the agent, from its command line.

Everything about the pool (keys, digest size, pace) comes from the schedulers; only what
the agent cannot learn from anybody is a flag. A secret comes by environment variable.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from extproc.fleet.worker import ROLE_LABEL, Role
from extproc.policy import normal_address
from extproc.telemetry.logs import LOG_FORMATS, LogFormat
from workers.agent.engine_state import DEFAULT_FROZEN_AFTER_S

API_KEY_VARIABLE = "KVGATE_ENGINE_API_KEY"
MAX_RANKS = 256
MAX_LABEL_CHARS = 256

_PORT = re.compile(r"tcp://.+:[1-9]\d{0,4}")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent is told at start."""

    engine: str
    """Base URL of the vLLM server."""
    address: str
    """ip:port that Envoy reaches it at."""
    schedulers: tuple[str, ...]
    """host:port of each scheduler's control port."""
    kv_events: str = ""
    """ZMQ endpoint of the engine's KV events; without it digests stay empty."""
    kv_replay: str = ""
    """ZMQ endpoint that replays them; without it a lost event empties the digest."""
    data_parallel_size: int = 1
    """Engines behind the server; each has event ports of its own, one above the other."""
    socket: str = ""
    """Path of the Unix socket that the engine's middleware writes to; without it, only
    numbers of requests are known."""
    max_running: int = 0
    """Sequences that the engine runs at once (--max-num-seqs); 0 = unknown."""
    frozen_after_s: float = DEFAULT_FROZEN_AFTER_S
    """Requests run and no counter moves for so long: frozen. Longer than any prefill step."""
    drain_s: float = 120.0
    """After SIGTERM, how long running requests may take."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the operator says of the worker: zone, node, role (prefill, decode or both)."""
    gpus: tuple[int, ...] = ()
    """NVML's numbers of the engine's GPUs; empty = all that are visible."""
    api_key: str = field(default="", repr=False)
    """The engine's --api-key, which /v1/models asks for."""

    def event_endpoints(self) -> list[tuple[str, str]]:
        """Endpoints of events and of their replay, of each rank."""
        if not self.kv_events:
            return []
        return [
            (_of_rank(self.kv_events, rank), _of_rank(self.kv_replay, rank))
            for rank in range(self.data_parallel_size)
        ]


def parse_settings(arguments: Sequence[str]) -> tuple[Settings, LogFormat]:
    """Command line to settings and log format; ends the process with 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        "python -m workers.agent",
        description="Report one vLLM worker's load and cache to kvgate's schedulers.",
        epilog=f"{API_KEY_VARIABLE} in the environment is the engine's --api-key.",
    )
    add = parser.add_argument
    add("--engine", required=True, metavar="URL", help="vLLM server, http://ip:port")
    add("--address", metavar="IP:PORT", help="what Envoy uses (default: from --engine)")
    add("--kv-events", default="", metavar="ENDPOINT", help="ZMQ, tcp://ip:port or ipc://path")
    add("--kv-replay", default="", metavar="ENDPOINT", help="ZMQ replay endpoint")
    add(
        "--scheduler",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="control port of a scheduler; once for each",
    )
    add(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="engine's --data-parallel-size: N event ports, counting up (default: 1)",
    )
    add("--socket", default="", metavar="PATH", help="Unix socket for the engine's middleware")
    add("--max-running", type=int, default=0, metavar="N", help="engine's --max-num-seqs")
    add(
        "--frozen-after-s",
        type=float,
        default=DEFAULT_FROZEN_AFTER_S,
        metavar="S",
        help="frozen when requests run and no counter moves for so long (default: 30)",
    )
    add(
        "--drain-s",
        type=float,
        default=120.0,
        metavar="S",
        help="after SIGTERM, how long running requests may take (default: 120)",
    )
    add(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="zone=a, node=n1, role=prefill|decode|both; once for each",
    )
    add("--gpus", default="", metavar="I,J", help="NVML numbers of its GPUs (default: all)")
    add("--log-format", choices=LOG_FORMATS, default="text")
    options = parser.parse_args(arguments)
    try:
        settings = _settings_of(options)
    except ValueError as error:
        parser.error(str(error))
    return settings, options.log_format


def _settings_of(options: argparse.Namespace) -> Settings:
    url = urlsplit(options.engine)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ValueError(f"--engine {options.engine!r} is not http://ip:port")
    for endpoint in (options.kv_events, options.kv_replay):
        if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
            raise ValueError(f"{endpoint!r} is not tcp://ip:port or ipc://path")
    if options.kv_replay and not options.kv_events:
        raise ValueError("--kv-replay needs --kv-events")
    if not 0 <= options.max_running < 2**32:
        raise ValueError(f"--max-running {options.max_running} is out of range")
    if not 1 <= options.data_parallel_size <= MAX_RANKS:
        raise ValueError(f"--data-parallel-size {options.data_parallel_size} is out of range")
    if options.data_parallel_size > 1:
        _check_ports(options.kv_events, options.kv_replay)
    if not 0 < options.frozen_after_s < math.inf:
        raise ValueError(f"--frozen-after-s {options.frozen_after_s} is no positive time")
    if not 0 <= options.drain_s < math.inf:
        raise ValueError(f"--drain-s {options.drain_s} is no time")
    try:
        address = normal_address(options.address or url.netloc)
    except ValueError as error:
        raise ValueError(f"--address: {error}") from None
    return Settings(
        engine=options.engine,
        address=address,
        schedulers=tuple(dict.fromkeys(options.scheduler)),
        kv_events=options.kv_events,
        kv_replay=options.kv_replay,
        data_parallel_size=options.data_parallel_size,
        socket=options.socket,
        max_running=options.max_running,
        frozen_after_s=options.frozen_after_s,
        drain_s=options.drain_s,
        labels=_labels(options.label),
        gpus=_gpu_numbers(options.gpus),
        api_key=os.environ.get(API_KEY_VARIABLE, ""),
    )


def _labels(texts: Sequence[str]) -> dict[str, str]:
    labels = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or len(text) > MAX_LABEL_CHARS:
            raise ValueError(f"--label {text[:MAX_LABEL_CHARS]!r} is not name=value")
        labels[name] = value
    if labels.get(ROLE_LABEL, "both") not in {role.value for role in Role}:
        raise ValueError(f"--label role={labels[ROLE_LABEL]} is not prefill, decode or both")
    return labels


def _gpu_numbers(text: str) -> tuple[int, ...]:
    numbers = text.split(",") if text else []
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--gpus {text!r} is no list of numbers such as 0,1")
    return tuple(map(int, numbers))


def _check_ports(*endpoints: str) -> None:
    for endpoint in filter(None, endpoints):
        if not _PORT.fullmatch(endpoint):
            raise ValueError(f"--data-parallel-size needs tcp://ip:port, {endpoint!r} has no port")


def _of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: vLLM adds it to the port."""
    if not rank or not endpoint:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
