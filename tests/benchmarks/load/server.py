"""A scripted OpenAI server: the next answers, in order, then good ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

EVENT = (
    b'data: {"object":"chat.completion.chunk",'
    b'"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
)
ROLE = EVENT.replace(b'"content":" word"', b'"role":"assistant","content":""')
STREAM = {"content-type": "text/event-stream"}
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"gone","code":500}}\n\n'


def usage(prompt: int = 100, completion: int = 4, cached: int | None = 48) -> bytes:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    chunk = {"object": "chat.completion.chunk", "choices": [], "usage": counts}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@dataclass
class Script:
    """One answer. ``pieces`` of a stream are ``pause_s`` apart; ``cut`` drops the connection."""

    status: int = 200
    pieces: tuple[bytes, ...] = (ROLE, EVENT, EVENT, EVENT, EVENT, usage(), DONE)
    pause_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    code: str = "queue_full"
    cut: bool = False


@dataclass
class Server:
    url: str
    scripts: list[Script]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.came_s.append(time.monotonic())
        self.bodies.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._answer(request, self.scripts.pop(0) if self.scripts else Script())
        finally:
            self.at_once -= 1

    async def _answer(self, request: web.Request, script: Script) -> web.StreamResponse:
        if script.status != 200:
            error = {"error": {"code": script.code}}
            return web.json_response(error, status=script.status, headers=script.headers)
        response = web.StreamResponse(headers={**STREAM, **script.headers})
        await response.prepare(request)
        for piece in script.pieces:
            await response.write(piece)
            await asyncio.sleep(script.pause_s)
        if script.cut:
            assert request.transport is not None
            request.transport.abort()
        return response


@asynccontextmanager
async def serving(*scripts: Script) -> AsyncIterator[Server]:
    app = web.Application()
    runner = web.AppRunner(app)
    server = Server("", list(scripts))
    app.router.add_post("/v1/chat/completions", server.answer)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
