"""``EngineProbe``: looks at a vLLM server over HTTP.

Each look asks /metrics and /v1/models, on connections of its own, so that a server that
died is seen as refused at once. Reads are bounded in time and in bytes, and no answer,
however broken, raises.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from workers.engine_metrics import MAX_PAGE_BYTES, EngineMetrics, MetricsError, parse_metrics
from workers.engine_state import Answer, Look


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


_decode_models = msgspec.json.Decoder(_ModelList).decode


class EngineProbe:
    """One engine's HTTP side. Use as ``async with``."""

    def __init__(self, base_url: str, *, api_key: str = "") -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> EngineProbe:
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._session.close()

    async def look(self, timeout_s: float) -> Look:
        """Ask both pages at once; takes ``timeout_s`` at most."""
        (answer, models), (_, page) = await asyncio.gather(
            self._get("/v1/models", timeout_s), self._get("/metrics", timeout_s)
        )
        return Look(answer, _model_names(models), _metrics(page))

    async def _get(self, path: str, timeout_s: float) -> tuple[Answer, bytes | None]:
        """The body of a 200 answer, cut after ``MAX_PAGE_BYTES`` + 1."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(self._base_url + path, timeout=timeout) as response:
                body = await _read(response) if response.status == 200 else None
                return Answer.UP, body
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return (Answer.REFUSED if refused else Answer.SILENT), None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return Answer.SILENT, None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(65_536):
        body += chunk
        if len(body) > MAX_PAGE_BYTES:
            break
    return bytes(body[: MAX_PAGE_BYTES + 1])


def _metrics(page: bytes | None) -> EngineMetrics | None:
    try:
        return None if page is None else parse_metrics(page)
    except MetricsError:
        return None


def _model_names(page: bytes | None) -> tuple[str, ...]:
    try:
        models = [] if page is None else _decode_models(page).data
    except msgspec.MsgspecError:
        return ()
    return tuple(model.id for model in sorted(models, key=lambda model: model.parent is not None))
