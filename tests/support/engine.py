"""Fakes of what an agent talks to: an engine's HTTP and KV events, and a scheduler.

They speak the real protocols on loopback ports and fail on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from extproc.generated.kvgate.v1 import agent_pb2

PAGE = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {waiting}
vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {generated}
vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="awake"}} {awake}
vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="discard_all"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} 0.25
vllm:cache_config_info{{block_size="4",engine="0",num_gpu_blocks="300"}} 1.0
"""


def whole_page(
    started: float = 1.79596191312e09,
    awake: float = 1.0,
    running: float = 2.0,
    waiting: float = 1.0,
    generated: int = 9_000,
) -> str:
    """A metrics page as vLLM writes it."""
    return PAGE.format(
        started=started, awake=awake, running=running, waiting=waiting, generated=generated
    )


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait for a condition to hold; a hang fails the test instead of blocking it."""
    async with asyncio.timeout(timeout_s):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


class FakeEngine:
    """/health, /v1/models, /metrics and /version of a vLLM server.

    It generates a token a scrape while ``works``; ``silent`` names pages that never answer.
    """

    def __init__(self) -> None:
        self.port = 0
        self.started = 1.5e9
        self.awake = 1.0
        self.running = 2.0
        self.waiting = 1.0
        self.generated = 0
        self.works = True
        self.health = 200
        self.health_checks = 0
        self.refused_health_checks = 0
        self.metrics_status = 200
        self.silent: set[str] = set()
        self.page: str | None = None
        self.version: Any = "0.32.0"
        self.models: Any = [{"id": "tiny"}]
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._answer])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.port or self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    def be_idle(self) -> None:
        """Nothing runs and nothing waits."""
        self.running = self.waiting = 0.0

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> Any:
        if request.path in self.silent:
            await asyncio.Event().wait()
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        self.health_checks += 1
        if self.refused_health_checks:
            self.refused_health_checks -= 1
            return web.Response(status=503)
        return web.Response(status=self.health)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.generated += self.works
        page = whole_page(self.started, self.awake, self.running, self.waiting, self.generated)
        text = page if self.page is None else self.page
        return web.Response(text=text, status=self.metrics_status)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.models})


class FakePublisher:
    """An engine's KV events: a PUB socket and a ROUTER that replays the last batches."""

    def __init__(self, keep: int = 10_000) -> None:
        self._context: zmq.asyncio.Context | None = None
        self._keep = keep
        self.ports = [0, 0]
        self.replays = 0
        self.events_at: list[tuple[int, bytes]] = []

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    async def start(self) -> None:
        self._seq = 0
        self.events_at.clear()
        self._context = self._context or zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        for index, socket in enumerate((self._pub, self._router)):
            await _bind(socket, self.ports, index)
        self._serving = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._pub.close(linger=0)
        self._router.close(linger=0)

    def close(self) -> None:
        if self._context:
            self._context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Wait until a subscriber is connected."""
        async with asyncio.timeout(10):
            await self._pub.recv()

    async def publish(self, *events: Any, heard: bool = True, rank: int = 0) -> int:
        """Publish a batch; ``heard=False`` loses it on the way. Its number."""
        return await self.publish_raw(
            msgspec.msgpack.encode([time.time(), list(events), rank]), heard=heard
        )

    async def publish_raw(self, payload: bytes, *, heard: bool = True) -> int:
        seq, self._seq = self._seq, self._seq + 1
        self.events_at.append((seq, payload))
        del self.events_at[: -self._keep]
        if heard:
            await self._pub.send_multipart([b"kv@test", struct.pack(">Q", seq), payload])
        return seq

    async def _serve(self) -> None:
        while True:
            client, _, wanted = await self._router.recv_multipart()
            self.replays += 1
            first = struct.unpack(">Q", wanted)[0]
            for seq, payload in [item for item in self.events_at if item[0] >= first]:
                number = struct.pack(">Q", seq)
                await self._router.send_multipart([client, b"", b"kv@test", number, payload])
            await self._router.send_multipart([client, b"", b"", b"\xff" * 8, b""])


async def _bind(socket: zmq.asyncio.Socket, ports: list[int], index: int) -> None:
    if not ports[index]:
        ports[index] = socket.bind_to_random_port("tcp://127.0.0.1")
        return
    async with asyncio.timeout(10):
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{ports[index]}")
                return
            except zmq.ZMQError:
                await asyncio.sleep(0.01)


class FakeFleet:
    """A scheduler's side of Report: keeps what it hears, stream by stream."""

    def __init__(self, **settings: Any) -> None:
        self.settings = agent_pb2.PoolSettings(
            pool="tiny",
            key_namespace=7,
            block_size_tokens=4,
            digest_capacity=4_096,
            digest_error_rate=0.01,
            report_interval_s=0.05,
            delta_interval_s=0.02,
            snapshot_interval_s=60.0,
        )
        self.settings.MergeFrom(agent_pb2.PoolSettings(**settings))
        self.streams: list[list[agent_pb2.AgentMessage]] = []
        self.ended: list[int] = []
        self.port = 0
        self.reading = asyncio.Event()
        self.reading.set()
        self._calls: list[grpc.aio.ServicerContext[Any, Any]] = []
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self._report,
            request_deserializer=agent_pb2.AgentMessage.FromString,
            response_serializer=agent_pb2.SchedulerMessage.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler("kvgate.v1.Fleet", {"Report": handler})
        self._server.add_generic_rpc_handlers((service,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server:
            await self._server.stop(0)
            self._server = None

    async def tell(self, **message: Any) -> None:
        """Send the newest stream a message: ``settings=...``, ``drain=...`` and so on."""
        await self._calls[-1].write(agent_pb2.SchedulerMessage(**message))

    async def _report(self, _: Any, context: Any) -> None:
        heard: list[agent_pb2.AgentMessage] = []
        number = len(self.streams)
        self.streams.append(heard)
        self._calls.append(context)
        while (message := await context.read()) is not grpc.aio.EOF:
            heard.append(message)
            if message.HasField("hello"):
                await context.write(agent_pb2.SchedulerMessage(settings=self.settings))
            await self.reading.wait()
        self.ended.append(number)

    def heard(self, kind: str, stream: int = -1) -> list[Any]:
        """Messages of one kind on a stream, the newest stream by default."""
        if not self.streams:
            return []
        return [getattr(item, kind) for item in self.streams[stream] if item.HasField(kind)]


@contextlib.asynccontextmanager
async def running(*fakes: Any) -> AsyncIterator[None]:
    """Start fakes, and stop them whatever happens."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await fake.start()
            if isinstance(fake, FakePublisher):
                stack.callback(fake.close)
            stack.push_async_callback(fake.stop)
        yield
