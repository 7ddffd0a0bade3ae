"""The ext_proc service: one gRPC stream a request, each a :class:`~extproc.call.Call`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from extproc.call import Call, Context
from extproc.desk import Desk
from extproc.replies import ProcessingRequest, ProcessingResponse
from extproc.stream import ProtocolViolation

logger = logging.getLogger("kvgate.requests")

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


class Processor:
    """Serves Envoy's streams until ``close``."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._streams: set[asyncio.Task[Any]] = set()

    @property
    def open_streams(self) -> int:
        """Requests that Envoy has with us."""
        return len(self._streams)

    def handler(self) -> grpc.GenericRpcHandler:
        """What to register with a gRPC server."""
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})

    async def close(self, grace_s: float) -> None:
        """Refuse new requests, wait for open ones, then end their streams in good order.

        Envoy takes a stream that ends without an error as "nothing more to say" and lets
        the response go on.
        """
        self._desk.closing = True
        if self._streams:
            await asyncio.wait(self._streams, timeout=grace_s)
        cut = list(self._streams)
        for task in cut:
            task.cancel()
        if cut:
            logger.warning("streams left to Envoy", extra={"facts": {"streams": len(cut)}})
            await asyncio.wait(cut, timeout=1.0)

    async def _process(self, _requests: object, context: Context) -> None:
        task = asyncio.current_task()
        call = Call(self._desk, context)
        try:
            if task is not None:
                self._streams.add(task)
                task.add_done_callback(self._streams.discard)
            await call.run()
        except ProtocolViolation as violation:
            self._desk.metrics.protocol_errors.labels("envoy").inc()
            logger.error("protocol violation", extra={"facts": {"what": str(violation)}})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(violation))
        except asyncio.CancelledError:
            if not self._desk.closing:
                raise
            await call.leave()
        finally:
            call.end()
