"""A worker that costs next to nothing: any HTTP/1.1 request gets the same small JSON.

    python -m benchmarks.upstream PORT...

Raw asyncio, one process for all ports. It relies on its one client, Envoy: no pipelining,
and a body that never holds a bare line end (JSON).
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.rig import HOST

_BODY = b'{"object":"chat.completion","choices":[{"message":{"content":"ok"}}]}'
_RESPONSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY)
    + _BODY
)
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class _Responder(asyncio.Protocol):
    """One connection. ``_left``: bytes of the body to come, None while reading a head."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._left: int | None = None
        self._chunked = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._left is None:
            self._head += data
            head, end, data = self._head.partition(_HEAD_END)
            if not end:
                return
            self._begin(head.lower())
        if self._ends(data) and self._transport is not None:
            self._head, self._left, self._tail = b"", None, b""
            self._transport.write(_RESPONSE)

    def _begin(self, head: bytes) -> None:
        self._chunked = b"transfer-encoding: chunked" in head
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        self._left = int(length or 0)
        self._tail = b"\r\n"

    def _ends(self, data: bytes) -> bool:
        if self._chunked:
            self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
            return self._tail == _LAST_CHUNK
        assert self._left is not None
        self._left -= len(data)
        return self._left <= 0


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(_Responder, HOST, port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve([int(port) for port in sys.argv[1:]]))
