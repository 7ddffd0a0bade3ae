"""Requests told to the agent, as kvgate's middleware tells those of a vLLM server.

Reporter, datagrams, error classes and usage scan are the middleware's own; only the web
framework differs. Usage is known where the answer has it, so with streams only if the client
asks for it. Error answers carry their class in the middleware's header.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from workers.engine_errors import (
    EngineError,
    classify,
    classify_event,
    classify_exception,
    error_text,
)
from workers.event_sender import EventSender
from workers.middleware import ENDPOINTS, ERROR_HEADER, LEASE_HEADER
from workers.request_events import valid_lease
from workers.request_reporter import Outcome, RequestReporter
from workers.response_scan import ResponseScan, Usage

_LEASE_NAME, _ERROR_NAME = LEASE_HEADER.decode(), ERROR_HEADER.decode()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Telling:
    """One request, from its arrival to its end."""

    def __init__(self, reporter: RequestReporter, lease: str | None, endpoint: str) -> None:
        self._reporter = reporter
        self._began_s = time.monotonic()
        self._number = reporter.started(lease, endpoint)
        self._scan: ResponseScan | None = None
        self._ttft_s: float | None = None

    def chunk(self, data: bytes) -> None:
        """A chunk of a streamed answer has been written."""
        if self._scan is None:
            self._scan = ResponseScan(sse=True)
            self._ttft_s = time.monotonic() - self._began_s
            self._reporter.first_chunk(self._number, self._ttft_s)
        self._scan.feed(data)

    def answered(self, response: web.StreamResponse) -> None:
        """The whole answer is there; an error's class goes into its headers."""
        if self._scan is not None:
            event = self._scan.error
            error = EngineError.NONE if event is None else classify_event(*error_text(event))
            self._end(response.status, error)
            return
        body = response.body if isinstance(response, web.Response) else None
        body = body if isinstance(body, bytes) else b""
        if response.status >= 400:
            error = classify(response.status, error_text(body)[1])
            response.headers[_ERROR_NAME] = error.value
            self._end(response.status, error)
            return
        self._scan = ResponseScan(sse=False)
        self._scan.feed(body)
        self._end(response.status, EngineError.NONE)

    def failed(self, error: EngineError) -> None:
        """There is no answer, or not the whole of it."""
        self._end(0 if self._scan is None else 200, error)

    def _end(self, status: int, error: EngineError) -> None:
        outcome = Outcome(
            status=status,
            error=error,
            duration_s=time.monotonic() - self._began_s,
            ttft_s=self._ttft_s,
            usage=Usage() if self._scan is None else self._scan.usage,
            streamed=self._ttft_s is not None,
        )
        self._reporter.ended(self._number, outcome)


TELLING = web.RequestKey("telling", Telling)


class RequestTeller:
    """Tells an agent of one server's requests; use as the outermost middleware.

    Args:
        socket: the agent's Unix socket; it need not be there yet.
    """

    def __init__(self, socket: Path) -> None:
        sender = EventSender(str(socket), time.monotonic)
        self._reporter = RequestReporter(sender, clock=time.monotonic, wall_clock=time.time)

    def start(self) -> None:
        """Begin to beat; called in the event loop."""
        self._reporter.start()

    def close(self) -> None:
        """Nothing more is told."""
        self._reporter.close()

    def middleware(self) -> Middleware:
        """For ``web.Application``."""

        @web.middleware
        async def tell(request: web.Request, handler: Handler) -> web.StreamResponse:
            endpoint = ENDPOINTS.get(request.path) if request.method == "POST" else None
            if endpoint is None:
                return await handler(request)
            lease = valid_lease(request.headers.get(_LEASE_NAME, ""))
            telling = request[TELLING] = Telling(self._reporter, lease, endpoint)
            try:
                response = await handler(request)
            except BaseException as error:
                telling.failed(classify_exception(error))
                raise
            if request.transport is None or request.transport.is_closing():
                telling.failed(EngineError.CLIENT_GONE)
            else:
                telling.answered(response)
            return response

        return tell


async def write(request: web.Request, response: web.StreamResponse, chunk: bytes) -> None:
    """Write a chunk of a stream, and tell of it if anybody listens."""
    await response.write(chunk)
    telling = request.get(TELLING)
    if telling is not None:
        telling.chunk(chunk)
