"""``EngineProbe``: looks at an engine's server over HTTP.

Each look asks /health, /v1/models and /metrics at once, on connections of its own, so that
a server that died is seen as refused at once. Reads are bounded in time and in bytes, and
no answer, however broken, raises.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import aiohttp
import msgspec

from workers.agent.engine_metrics import EngineMetrics, parse_metrics
from workers.agent.engine_state import Answer, Look
from workers.agent.gpu import Gpu, NoGpu
from workers.agent.metrics_page import MAX_PAGE_BYTES, MetricsError

MAX_VERSION_CHARS = 64


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Page(NamedTuple):
    answer: Answer
    status: int = 0
    body: bytes | None = None
    """Of a 200 answer, cut after ``MAX_PAGE_BYTES`` + 1."""


_decode_models = msgspec.json.Decoder(_ModelList).decode
_decode_version = msgspec.json.Decoder(_Version).decode


class EngineProbe:
    """One engine's HTTP side. Use as ``async with``."""

    def __init__(self, base_url: str, *, api_key: str = "", gpu: Gpu | None = None) -> None:
        self.engine = ""
        """What the engine calls itself; empty = unknown. Asked once in each life."""
        self._base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._gpu = gpu or NoGpu()
        self._version_asked = False

    async def __aenter__(self) -> EngineProbe:
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._session.close()

    async def look(self, timeout_s: float) -> Look:
        """Ask all pages at once; takes ``timeout_s`` at most, twice that once in a life."""
        health, models, page = await asyncio.gather(
            *(self._get(path, timeout_s) for path in ("/health", "/v1/models", "/metrics"))
        )
        answer = _common_answer(health, models, page)
        listed = _models(models)
        metrics = _metrics(page)
        if answer is Answer.REFUSED:
            self._version_asked = False
        elif listed and not self._version_asked:
            self._version_asked = True
            version = _version(await self._get("/version", timeout_s))
            self.engine = f"{metrics.engine if metrics else ''} {version}".strip()
        return Look(
            answer,
            None if listed is None else tuple(model.id for model in listed),
            metrics,
            # An engine without the page is judged by its models.
            healthy=health.status < 500,
            adapters=tuple(model.id for model in listed or () if model.parent is not None),
            gpu=self._gpu.read(),
        )

    async def _get(self, path: str, timeout_s: float) -> _Page:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(self._base_url + path, timeout=timeout) as response:
                body = await _read(response) if response.status == 200 else None
                return _Page(Answer.UP, response.status, body)
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return _Page(Answer.REFUSED if refused else Answer.SILENT)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return _Page(Answer.SILENT)


def _common_answer(*pages: _Page) -> Answer:
    answers = {page.answer for page in pages}
    return next(
        answer for answer in (Answer.UP, Answer.REFUSED, Answer.SILENT) if answer in answers
    )


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(65_536):
        body += chunk
        if len(body) > MAX_PAGE_BYTES:
            break
    return bytes(body[: MAX_PAGE_BYTES + 1])


def _metrics(page: _Page) -> EngineMetrics | None:
    try:
        return None if page.body is None else parse_metrics(page.body)
    except MetricsError:
        return None


def _models(page: _Page) -> list[_Model] | None:
    """Base first; None if the engine did not say in time."""
    if page.answer is not Answer.UP:
        return None
    try:
        models = [] if page.body is None else _decode_models(page.body).data
    except msgspec.MsgspecError:
        return []
    return sorted(models, key=lambda model: model.parent is not None)


def _version(page: _Page) -> str:
    try:
        return "" if page.body is None else _decode_version(page.body).version[:MAX_VERSION_CHARS]
    except msgspec.MsgspecError:
        return ""
