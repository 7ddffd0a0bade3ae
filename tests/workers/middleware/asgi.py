"""Both neighbours of the middleware: a scripted application, and an agent that listens."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers.middleware import App, KvgateMiddleware, Message, Receive, Scope, Send
from workers.request_events import Ended, Event, Hello, decode

SSE = b"text/event-stream; charset=utf-8"
JSON = b"application/json"


def scope_of(path: str = "/v1/chat/completions", **fields: Any) -> Scope:
    """An HTTP scope as uvicorn makes it."""
    headers = [(b"host", b"w1"), (b"x-kvgate-lease", b"lease-1"), (b"x-other", b"1")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, **fields}


def start(status: int = 200, content_type: bytes = SSE, **fields: Any) -> Message:
    headers = [(b"content-type", content_type), (b"x-request-id", b"r1")]
    return {"type": "http.response.start", "status": status, "headers": headers, **fields}


def body(data: bytes = b"", *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def streamed(chunks: Iterable[bytes]) -> list[Message]:
    """What starlette sends for a stream."""
    return [start(), *(body(chunk) for chunk in chunks), body(more=False)]


def plain(status: int, document: Any) -> list[Message]:
    """What starlette sends for a JSON answer."""
    return [start(status, JSON), body(json.dumps(document).encode(), more=False)]


Step = Message | BaseException | Callable[[Receive], Awaitable[None]]


def answering(steps: Sequence[Step]) -> App:
    """An application that reads the request, then sends, raises or awaits what is listed."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            if callable(step):
                await step(receive)
            else:
                await send(step)

    return app


async def until_disconnect(receive: Receive) -> None:
    """A step: the application waits for the client to leave."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def drive(app: App, scope: Scope | None = None) -> list[Message]:
    """Run one request whose client leaves afterwards; what the server is asked to send."""
    sent: list[Message] = []
    received = itertools.chain(
        [{"type": "http.request", "body": b"{}", "more_body": False}],
        itertools.repeat({"type": "http.disconnect"}),
    )

    async def receive() -> Message:
        return next(received)

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope or scope_of(), receive, send)
    return sent


def bytes_of(messages: Iterable[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


class Listener:
    """An agent that only reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(str(path))
        self._open: list[KvgateMiddleware] = []

    def middleware(self, app: App, *, hold: str = "1", **options: Any) -> KvgateMiddleware:
        """A middleware that tells this listener, and is closed with it."""
        environ = {"KVGATE_SOCKET": str(self.path), "KVGATE_HOLD_HEADERS": hold}
        self._open.append(KvgateMiddleware(app, environ=environ, **options))
        return self._open[-1]

    def datagrams(self) -> Iterator[bytes]:
        while True:
            try:
                yield self.socket.recv(65_536)
            except BlockingIOError:
                return

    def events(self) -> list[Event]:
        """All that has arrived, in order."""
        events = [decode(datagram) for datagram in self.datagrams()]
        assert None not in events
        return [event for event in events if event is not None]

    def news(self) -> list[Event]:
        """Without the greetings."""
        return [event for event in self.events() if not isinstance(event, Hello)]

    def ended(self) -> Ended:
        """The end of the only request that ended."""
        [end] = [event for event in self.events() if isinstance(event, Ended)]
        return end

    def close(self) -> None:
        """Stop listening; the file stays."""
        self.socket.close()
        for middleware in self._open:
            middleware.close()


@contextmanager
def listening() -> Iterator[Listener]:
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        listener = Listener(Path(folder, "s"))
        try:
            yield listener
        finally:
            listener.close()


class Time:
    """A clock that moves when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def step(self, seconds: float) -> Callable[[Receive], Awaitable[None]]:
        """A step of an application: time goes by."""

        async def passes(receive: Receive) -> None:
            self.now_s += seconds
            await asyncio.sleep(0)

        return passes
