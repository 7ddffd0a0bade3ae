"""A whole request path around the real Envoy: scripted processor, scripted workers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import httpx
from aiohttp import web
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.envoy_config import DESTINATION_HEADER, PROCESSOR_SERVICE, BodyMode, EnvoySettings
from extproc.ports import server_options
from extproc.request.identity import IdentityReader
from extproc.scheduler import Decision
from extproc.stream import Arrived, RequestStream
from tests.support.envoy import RunningEnvoy, envoy_settings, free_ports, running_envoy

CHUNK = 62_000
Behaviour = Literal["serve", "refuse", "reset", "reset_after_body", "busy", "dying", "faulty"]


@dataclass
class Seen:
    """What one external-processor stream was told."""

    headers: list[tuple[str, str]]
    body_bytes: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    response_status: str = ""
    ended: bool = False
    cancelled: bool = False


@dataclass
class ToyProcessor(pb_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """Sends every request to ``destination`` after holding it for ``hold_s``."""

    body_mode: BodyMode = "full_duplex"
    destination: str = ""
    hold_s: float = 0.0
    streams: list[Seen] = field(default_factory=list)

    async def Process(self, _: object, context: Any) -> None:  # noqa: N802
        first = await context.read()
        headers = [
            (item.key, item.raw_value.decode()) for item in first.request_headers.headers.headers
        ]
        seen = Seen(headers)
        self.streams.append(seen)
        duplex = self.body_mode == "full_duplex"
        request = self._request_in_duplex if duplex else self._request_in_one_piece
        try:
            await request(context, first, seen)
            await self._response(context, seen)
        except asyncio.CancelledError:
            seen.cancelled = True
            raise

    async def _request_in_duplex(self, context: Any, first: Any, seen: Seen) -> None:
        body, message = b"", first
        ended = first.request_headers.end_of_stream
        while not ended and not message.HasField("request_trailers"):
            message = await context.read()
            body += message.request_body.body
            ended = message.request_body.end_of_stream
        seen.body_bytes = len(body)
        await asyncio.sleep(self.hold_s)
        await context.write(pb.ProcessingResponse(request_headers=self._answer()))
        if first.request_headers.end_of_stream:
            return
        starts = range(0, len(body), CHUNK) or range(1)
        for start in starts:
            last = start == starts[-1] and ended
            piece = pb.StreamedBodyResponse(body=body[start : start + CHUNK], end_of_stream=last)
            mutation = pb.BodyMutation(streamed_response=piece)
            answer = pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))
            await context.write(pb.ProcessingResponse(request_body=answer))
        if not ended:
            await context.write(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))

    async def _request_in_one_piece(self, context: Any, first: Any, seen: Seen) -> None:
        if first.request_headers.end_of_stream:
            await asyncio.sleep(self.hold_s)
            await context.write(pb.ProcessingResponse(request_headers=self._answer()))
            return
        await context.write(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))
        message = await context.read()
        if message.HasField("response_headers"):  # Envoy's own 413 in place of the body
            await self._tell(context, message, seen)
            return
        seen.body_bytes = len(message.request_body.body)
        await asyncio.sleep(self.hold_s)
        answer = pb.BodyResponse(response=self._answer().response)
        await context.write(pb.ProcessingResponse(request_body=answer))

    def _answer(self) -> Any:
        response = pb.CommonResponse()
        if self.destination:
            for name, value in ((DESTINATION_HEADER, self.destination), ("x-kvgate-lease", "ours")):
                option = response.header_mutation.set_headers.add()
                option.header.key, option.header.raw_value = name, value.encode()
        return pb.HeadersResponse(response=response)

    async def _response(self, context: Any, seen: Seen) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await self._tell(context, message, seen)
        seen.ended = True

    async def _tell(self, context: Any, message: Any, seen: Seen) -> None:
        if message.HasField("response_trailers"):
            await context.write(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
            return
        pairs = message.response_headers.headers.headers
        seen.response_status = {item.key: item.raw_value.decode() for item in pairs}[":status"]
        for struct in message.attributes.values():
            seen.attributes.update(struct.items())
        await context.write(pb.ProcessingResponse(response_headers=pb.HeadersResponse()))


@dataclass
class StreamProcessor(ToyProcessor):
    """Answers by kvgate's own stream; ``edit`` makes the body that the worker gets.

    With ``dry_answer`` the client gets that, and no worker anything.
    """

    edit: Callable[[bytes], bytes] | None = None
    dry_answer: bytes | None = None
    identities: IdentityReader | None = None
    arrived: list[Arrived] = field(default_factory=list)

    async def Process(self, _: object, context: Any) -> None:  # noqa: N802
        reader = self.identities
        wanted = (reader.headers, reader.metadata_paths) if reader else ()
        stream = RequestStream(2**30, *wanted)
        while (message := await context.read()) is not grpc.aio.EOF:
            step = stream.receive(message)
            answers = step.answers
            if isinstance(step.event, Arrived):
                self.arrived.append(step.event)
                answers = self._answers(stream, step.event)
            elif step.event is not None:
                answers = stream.answer_response([])
            for answer in answers:
                await context.write(answer)
            if stream.replied:
                return

    def _answers(self, stream: RequestStream, event: Arrived) -> list[Any]:
        if self.dry_answer is not None:
            return stream.reply(200, self.dry_answer, [("x-kvgate-decision-id", "ours")])
        decision = Decision("ours", tuple(self.destination.split(",")), 0, 0, 0.0)
        body = self.edit(event.body) if self.edit and event.body else None
        return stream.answer(decision, body)


@asynccontextmanager
async def serving(processor: ToyProcessor, port: int) -> AsyncIterator[Any]:
    """The processor as a gRPC server; yields the health service that Envoy asks."""
    server = grpc.aio.server(options=server_options(2**30))
    checks = health.aio.HealthServicer()
    await checks.set(PROCESSOR_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    pb_grpc.add_ExternalProcessorServicer_to_server(processor, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield checks
    finally:
        await server.stop(0)


@dataclass
class Worker:
    """An upstream that tells what reached it, or fails in one way."""

    address: str
    behaviour: Behaviour = "serve"
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        if self.behaviour == "reset":
            request.transport.abort()
        body = await request.read()
        told = {
            "worker": self.address,
            "headers": [(name.lower(), value) for name, value in request.headers.items()],
            "body_bytes": len(body),
            "body_sha256": hashlib.sha256(body).hexdigest(),
            "path": request.path,
        }
        self.requests.append(told)
        if self.behaviour == "reset_after_body":
            request.transport.abort()
        if self.behaviour in ("dying", "faulty"):
            error = "engine_dead" if self.behaviour == "dying" else "other"
            return web.json_response(told, status=500, headers={"x-kvgate-engine-error": error})
        return web.json_response(told, status=503 if self.behaviour == "busy" else 200)


@asynccontextmanager
async def running_worker(behaviour: Behaviour) -> AsyncIterator[Worker]:
    port = free_ports(1)[0]
    worker = Worker(f"127.0.0.1:{port}", behaviour)
    if behaviour == "refuse":
        yield worker
        return
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", worker.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=2_048).start()
    try:
        yield worker
    finally:
        await runner.cleanup()


@dataclass
class Rig:
    envoy: RunningEnvoy
    processor: Any
    workers: list[Worker]
    client: httpx.AsyncClient

    def send_to(self, *indexes: int) -> None:
        """The list that the processor answers from now on."""
        self.processor.destination = ",".join(self.workers[index].address for index in indexes)

    async def post(self, content: Any = b'{"model":"m"}', **options: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", content=content, **options)


@asynccontextmanager
async def rig(
    *behaviours: Behaviour,
    body_mode: BodyMode = "full_duplex",
    http2: bool = False,
    processor_up: bool = True,
    processor: ToyProcessor | None = None,
    filters: Sequence[Mapping[str, Any]] = (),
    **changes: Any,
) -> AsyncIterator[Rig]:
    """Envoy, a processor and one worker for each behaviour (one that serves by default).

    ``filters`` are HTTP filters that Envoy runs before kvgate's.
    """
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(running_worker(each))
            for each in behaviours or ("serve",)
        ]
        settings: EnvoySettings = envoy_settings(
            workers=tuple(each.address for each in workers), body_mode=body_mode, **changes
        )
        processor = processor or ToyProcessor(body_mode)
        if processor_up:
            await stack.enter_async_context(serving(processor, settings.processor_port))
        envoy = await stack.enter_async_context(running_envoy(settings, filters))
        client = httpx.AsyncClient(base_url=envoy.url, http1=not http2, http2=http2, timeout=30)
        await stack.enter_async_context(client)
        yield Rig(envoy, processor, workers, client)


async def until(condition: Callable[[], bool], within_s: float = 3.0) -> None:
    """Wait for something that another task or process makes true."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
