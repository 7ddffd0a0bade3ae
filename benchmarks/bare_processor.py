"""The floor under any Python external processor: no decision, everything else.

    python -m benchmarks.bare_processor PORT DESTINATION

The same server, event loop, options and messages as kvgate's, with a destination that never
changes: what kvgate costs above this is the price of its decisions.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.rig import HOST
from extproc import event_loop, replies
from extproc.policy import RequestPolicy
from extproc.ports import server_options
from extproc.processor import SERVICE
from extproc.replies import ProcessingRequest, ProcessingResponse


class _BareProcessor:
    def __init__(self, destination: str) -> None:
        self._headers = replies.headers_answer([], destination)
        self._response = replies.response_headers_answer([])

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})

    async def _process(self, _requests: object, context: Any) -> None:
        pieces: list[bytes] = []
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.HasField("request_body"):
                pieces.append(message.request_body.body)
                if message.request_body.end_of_stream:
                    await context.write(self._headers)
                    for answer in replies.streamed_body(b"".join(pieces), ends_stream=True):
                        await context.write(answer)
            elif message.HasField("response_headers"):
                await context.write(self._response)


async def _serve(port: int, destination: str) -> None:
    server = grpc.aio.server(options=server_options(RequestPolicy().max_body_bytes))
    server.add_generic_rpc_handlers((_BareProcessor(destination).handler(),))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    event_loop.run(_serve(int(sys.argv[1]), sys.argv[2]))
