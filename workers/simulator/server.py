"""The simulated worker as a server: routes, start, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Middleware

from workers.simulator.answers import json_answer
from workers.simulator.dialects import ChatDialect, CompletionsDialect, Dialect
from workers.simulator.embeddings import EmbeddingsDialect
from workers.simulator.engine import Engine
from workers.simulator.errors import ApiError
from workers.simulator.faults import Faults
from workers.simulator.handlers import REQUEST_ID_HEADER, GenerationHandler, request_id
from workers.simulator.kv_events import KvEventPublisher
from workers.simulator.loop import EngineLoop
from workers.simulator.metrics import EngineMetrics
from workers.simulator.other_dialects import MessagesDialect, ResponsesDialect
from workers.simulator.pages import Pages
from workers.simulator.prompt import Prompter, SegmentPrompter
from workers.simulator.settings import SimulatorSettings
from workers.simulator.speaker import Speaker
from workers.simulator.telling import RequestTeller

log = logging.getLogger(__name__)

BACKLOG = 2_048
"""Connections the kernel keeps for us to take, as uvicorn does for vLLM."""
MAX_BODY_BYTES = 256 * 1024 * 1024
CLOSE_TIMEOUT_S = 1.0
MESSAGES_PATH = "/v1/messages"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Simulator:
    """One running worker, as an async context manager; ports are known once it is entered."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self.settings = settings
        self.engine = Engine(settings.engine_config())
        self.publisher = _publisher(settings)
        prompter = SegmentPrompter if settings.cache_segments else Prompter
        self._prompter = prompter(settings.model_dir)
        self._metrics = EngineMetrics(self.engine, settings.model_name, settings.adapters)
        self._teller = RequestTeller(settings.socket) if settings.socket else None
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.port = settings.port

    @property
    def url(self) -> str:
        """Base URL of the HTTP server."""
        return f"http://{self.settings.host}:{self.port}"

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    async def _start(self) -> None:
        self._loop = EngineLoop(
            self.engine, self._metrics, self.publisher, self.settings.max_queued
        )
        self.engine_task = asyncio.create_task(self._loop.run())
        self._tasks.append(self.engine_task)
        if self.publisher is not None:
            self._tasks.append(asyncio.create_task(self.publisher.serve_replays()))
        if self._teller is not None:
            self._teller.start()
        self._runner = web.AppRunner(
            self._app(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_TIMEOUT_S,
        )
        await self._runner.setup()
        host, port = self.settings.host, self.settings.port
        await web.TCPSite(self._runner, host, port, backlog=BACKLOG).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            await self._loop.drain(self.settings.shutdown_s)
            await self._runner.cleanup()
        if self._teller is not None:
            self._teller.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.publisher is not None:
            self.publisher.close()

    def _app(self) -> web.Application:
        middlewares: list[Middleware] = [_plain_errors]
        if self._teller is not None:
            middlewares.insert(0, self._teller.middleware())
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        app.on_response_prepare.append(_echo_request_id)
        speaker = Speaker(self._prompter.tokenizer)
        faults = Faults()
        handler = GenerationHandler(self.settings, self._prompter, speaker, self._loop, faults)
        dialects: dict[str, Dialect] = {
            "/v1/chat/completions": ChatDialect(),
            "/v1/completions": CompletionsDialect(),
            "/v1/responses": ResponsesDialect(),
            MESSAGES_PATH: MessagesDialect(),
            "/v1/embeddings": EmbeddingsDialect(),
        }
        for path, dialect in dialects.items():
            app.router.add_post(path, _answering(handler, dialect))
        pages = Pages(
            self.settings,
            handler,
            self._prompter,
            self._loop,
            self._metrics,
            faults,
            self.publisher,
        )
        app.router.add_routes(pages.routes())
        return app


async def serve(
    settings: SimulatorSettings,
    *,
    ready: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until ``stop`` is set or the task is cancelled; an engine that dies ends it too."""
    async with Simulator(settings) as simulator:
        if ready is not None:
            ready()
        stopped = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait(
                (stopped, simulator.engine_task), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            stopped.cancel()
        if simulator.engine_task.done():
            await simulator.engine_task


def run(settings: SimulatorSettings) -> None:
    """Serve until SIGTERM or SIGINT, then return."""
    asyncio.run(_until_signal(settings))


async def _until_signal(settings: SimulatorSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop=stop)


def _publisher(settings: SimulatorSettings) -> KvEventPublisher | None:
    if settings.kv_events_port is None:
        return None
    return KvEventPublisher(
        settings.host, settings.kv_events_port, settings.kv_replay_port, settings.kv_events_topic
    )


def _answering(handler: GenerationHandler, dialect: Dialect) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler.answer(request, dialect)

    return answer


@web.middleware
async def _plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error)
    except web.HTTPError as error:
        headers = {k: v for k, v in error.headers.items() if k == "Allow"}
        return json_answer({"detail": error.reason}, status=error.status, headers=headers)
    except Exception as error:
        # Only the type: an exception's text or traceback could quote the prompt.
        log.error("%s failed: %s", request.path, type(error).__name__)
        return _refusal(request, ApiError(500, "internal error"))


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    anthropic = request.path == MESSAGES_PATH
    body = error.anthropic_body() if anthropic else error.body()
    return json_answer(body, status=error.status)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[REQUEST_ID_HEADER] = request_id(request)
