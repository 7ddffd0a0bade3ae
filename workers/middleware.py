"""``KvgateMiddleware``: pure ASGI, for ``vllm serve --middleware``.

It holds an answer's headers back until its first data, gives error answers their class in
a header, and tells the agent when each generating request starts, gets its first chunk and
ends. Bodies pass as they are; docs/middleware.md says what a client notices. Standard
library only, Python 3.10: it runs in the engine's own environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from workers.engine_errors import (
    MAX_ERROR_BYTES,
    EngineError,
    classify,
    classify_event,
    classify_exception,
    error_text,
)
from workers.event_sender import EventSender
from workers.request_events import valid_lease
from workers.request_reporter import NoReporter, Outcome, Reporter, RequestReporter
from workers.response_scan import ResponseScan, Usage, is_before_prefill

SOCKET_VARIABLE = "KVGATE_SOCKET"
HOLD_VARIABLE = "KVGATE_HOLD_HEADERS"
ERROR_HEADER = b"x-kvgate-engine-error"
LEASE_HEADER = b"x-kvgate-lease"

ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat_batch",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/cohere/v2/chat": "cohere_chat",
    "/inference/v1/generate": "generate",
    "/invocations": "invocations",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "pooling",
    "/classify": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
}
"""Paths that make the engine compute, and what the agent calls them."""

MAX_HELD_CHUNKS = 4
"""vLLM sends two events before prefill; who sends more gets them through."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Clock = Callable[[], float]

_BODY = "http.response.body"
_START = "http.response.start"


class KvgateMiddleware:
    """Around the engine's application; configured by environment variables."""

    def __init__(
        self,
        app: App,
        *,
        environ: Mapping[str, str] = os.environ,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        self._app = app
        self._clock = clock
        self._hold = environ.get(HOLD_VARIABLE, "1").strip().lower() not in _OFF
        self._reporter: Reporter = NoReporter()
        if path := environ.get(SOCKET_VARIABLE):
            sender = EventSender(path, clock)
            self._reporter = RequestReporter(sender, clock=clock, wall_clock=wall_clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's scope: a generating request is watched, the rest passes."""
        endpoint = _endpoint(scope)
        if endpoint is None:
            await self._pass(scope, receive, send)
            return
        self._reporter.start()
        call = _Call(self._reporter, receive, send, hold=self._hold, clock=self._clock)
        call.start(_lease(scope), endpoint)
        try:
            await self._app(scope, call.receive, call.send)
            await call.release()
        except BaseException as error:
            await call.fail(error)
            raise
        call.end()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        self._reporter.start()
        try:
            await self._app(scope, receive, send)
        finally:
            self.close()

    def close(self) -> None:
        """The server stops: nothing more is told."""
        self._reporter.close()


_OFF = ("0", "false", "no", "off")


def _endpoint(scope: Scope) -> str | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"]
    if path in ENDPOINTS:
        return ENDPOINTS[path]
    root = scope.get("root_path", "")
    return ENDPOINTS.get(path.removeprefix(root)) if root else None


def _lease(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == LEASE_HEADER:
            return valid_lease(value.decode("latin-1"))
    return None


class _Call:
    """One request: its receive and send as the application sees them."""

    __slots__ = (
        "_answered",
        "_began_s",
        "_clock",
        "_ended",
        "_error",
        "_flows",
        "_gone",
        "_held",
        "_hold",
        "_number",
        "_receive",
        "_replaced",
        "_reporter",
        "_scan",
        "_send",
        "_status",
        "_streamed",
        "_ttft_s",
    )

    def __init__(
        self, reporter: Reporter, receive: Receive, send: Send, *, hold: bool, clock: Clock
    ) -> None:
        self._reporter = reporter
        self._receive = receive
        self._send = send
        self._hold = hold
        self._clock = clock
        self._status = 0
        self._streamed = False
        self._scan: ResponseScan | None = None
        self._held: list[Message] = []
        # The start has been sent and the first data seen: messages only pass.
        self._flows = False
        # An error answer has taken the place of the stream; its rest is not sent.
        self._replaced = False
        self._error: EngineError | None = None
        self._ttft_s: float | None = None
        self._gone = False
        # The client got any of the answer; known once it has left.
        self._answered = True
        self._ended = False

    def start(self, lease: str | None, endpoint: str) -> None:
        """The request is in the engine's hands from here on."""
        self._began_s = self._clock()
        self._number = self._reporter.started(lease, endpoint)

    def end(self, error: EngineError | None = None) -> None:
        """The request is over; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        usage = self._scan.usage if self._scan is not None else Usage()
        outcome = Outcome(
            status=self._status if self._answered else 0,
            error=error if error is not None else self._outcome(),
            duration_s=self._clock() - self._began_s,
            ttft_s=self._ttft_s,
            usage=usage,
            streamed=self._streamed,
        )
        self._reporter.ended(self._number, outcome)

    async def fail(self, error: BaseException) -> None:
        """The application raised; a start that is still held is not sent.

        The server's own answer to an exception carries no class. So one that is known is
        answered here, before the server sees the exception and closes the connection.
        """
        kind = EngineError.CLIENT_GONE if self._gone else classify_exception(error)
        if self._held or not self._status:
            self._held = []
            self._status = 0 if kind is EngineError.CLIENT_GONE else 500
            if kind in _FAILURES:
                with contextlib.suppress(Exception):  # the application's own goes on
                    for message in _failure(kind):
                        await self._send(message)
        self.end(kind)

    def _outcome(self) -> EngineError:
        if self._gone:
            return EngineError.CLIENT_GONE
        if self._error is not None:
            return self._error
        if self._scan is not None and self._scan.error is not None:
            return classify_event(*error_text(self._scan.error))
        return EngineError.NONE

    async def receive(self) -> Message:
        """What the client sends; its leaving is noted."""
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._gone:
            self._gone = True
            self._answered = self._flows
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """What the application answers."""
        if self._flows and message["type"] == _BODY and message.get("more_body", False):
            # Nearly all messages of a stream: not even a coroutine of our own.
            self._look(message.get("body"))
            return self._send(message)
        return self._take(message)

    async def _take(self, message: Message) -> None:
        if message["type"] != _BODY:
            await self._other(message)
            return
        if self._flows:
            self._look(message.get("body"))
            await self._send(message)
        elif not await self._begin(message):
            return
        if not message.get("more_body", False):
            self.end()

    async def release(self) -> None:
        """Send what is held back."""
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    async def _other(self, message: Message) -> None:
        if message["type"] == _START:
            self._take_start(message)
            if self._hold or self._status >= 400:
                self._held.append(message)
                return
        await self.release()
        await self._send(message)

    def _take_start(self, start: Message) -> None:
        self._status = start["status"]
        content_type = _header(start, b"content-type")
        self._streamed = content_type.startswith(b"text/event-stream")
        if self._status < 400 and (self._streamed or b"json" in content_type):
            self._scan = ResponseScan(sse=self._streamed)

    def _look(self, body: Any) -> None:
        # Servers take any bytes-like object; one of another kind passes unseen.
        if self._scan is not None and isinstance(body, bytes) and body:
            self._scan.feed(body)

    async def _begin(self, message: Message) -> bool:
        """A body message before the first data; False if it is kept back or left out."""
        more = message.get("more_body", False)
        if self._replaced:
            if not more:
                await self._send({"type": _BODY, "body": b"", "more_body": False})
            return not more
        body = message.get("body", b"")
        if not body and more and self._held:
            return False  # It would only push the headers out.
        self._look(body)
        if self._streamed and more and self._status < 400 and _is_early(body):
            if self._held and len(self._held) <= MAX_HELD_CHUNKS and not body.startswith(b":"):
                self._held.append(message)
                return False
        else:
            message = self._first_data(message, body)
        await self.release()
        await self._send(message)
        if self._ttft_s is not None:
            # Told after the client has it, so that telling costs it nothing.
            self._reporter.first_chunk(self._number, self._ttft_s)
        return True

    def _first_data(self, message: Message, body: bytes) -> Message:
        """The first data is here; the message to send for it, after what is held."""
        self._flows = True
        if self._status >= 400:
            self._error = classify(self._status, error_text(bytes(body[:MAX_ERROR_BYTES]))[1])
            self._held = [_marked(start, self._error) for start in self._held]
        elif self._scan is not None and self._scan.error is not None:
            return self._error_first(message, self._scan.error)
        elif self._streamed and body:
            self._ttft_s = self._clock() - self._began_s
        return message

    def _error_first(self, message: Message, payload: bytes) -> Message:
        """A stream whose first data is an error, headers still held: answer with that error."""
        if not self._held:
            return message
        payload = payload.strip()
        if len(payload) >= MAX_ERROR_BYTES or not payload.endswith(b"}"):
            return message
        code, text = error_text(payload)
        self._status, self._error = code, classify(code, text)
        self._held = [_marked(_as_json(self._held[0], code, payload), self._error)]
        self._streamed, self._flows, self._replaced = False, False, True
        return {**message, "body": payload}


_FAILURES = {
    EngineError.SHUTTING_DOWN: "The engine is shutting down.",
    EngineError.ENGINE_DEAD: "The engine is dead.",
    EngineError.KV_EXHAUSTED: "The engine has no memory left for the request.",
    EngineError.QUEUE_FULL: "The engine accepts no more requests.",
}


def _failure(kind: EngineError) -> tuple[Message, Message]:
    """The answer to an exception of a known class, in the engine's own form."""
    error = {"message": _FAILURES[kind], "type": "InternalServerError", "param": None, "code": 500}
    body = json.dumps({"error": error}).encode()
    start = _as_json({"type": _START, "headers": []}, 500, body)
    return _marked(start, kind), {"type": _BODY, "body": body, "more_body": False}


def _is_early(body: Any) -> bool:
    return isinstance(body, bytes) and (not body or is_before_prefill(body))


def _header(start: Message, wanted: bytes) -> bytes:
    for name, value in start.get("headers", ()):
        if name.lower() == wanted:
            return bytes(value).lower()
    return b""


def _marked(start: Message, error: EngineError) -> Message:
    headers = [*start.get("headers", ()), (ERROR_HEADER, error.value.encode())]
    return {**start, "headers": headers}


def _as_json(start: Message, status: int, payload: bytes) -> Message:
    headers = [
        (name, value)
        for name, value in start.get("headers", ())
        if name.lower() not in (b"content-type", b"content-length")
    ]
    headers.append((b"content-type", b"application/json"))
    headers.append((b"content-length", str(len(payload)).encode()))
    return {**start, "status": status, "headers": headers}
