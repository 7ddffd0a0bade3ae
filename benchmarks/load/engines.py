"""``EngineWatch``: what engines themselves say while a run goes on, from their /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_QUEUE_SUM = "vllm:request_queue_time_seconds_sum"
_QUEUE_COUNT = "vllm:request_queue_time_seconds_count"


class Look(msgspec.Struct, frozen=True):
    """Requests running and waiting on each engine at one time; NaN where one did not answer."""

    at_s: float
    running: list[float]
    waiting: list[float]

    @property
    def load(self) -> list[float]:
        """Running and waiting together, of the engines that answered."""
        both = (r + w for r, w in zip(self.running, self.waiting, strict=True))
        return [value for value in both if value == value]


class EngineWatch:
    """Scrapes while it is entered; times count from then.

    Attributes:
        looks: one for each scrape.
    """

    def __init__(self, urls: Sequence[str], interval_s: float = 0.25) -> None:
        self._urls = urls
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._last: dict[str, dict[str, float]] = {}
        self.looks: list[Look] = []

    @property
    def waiting_most(self) -> float:
        """The longest waiting queue that any engine had at a scrape."""
        return max((w for look in self.looks for w in look.waiting if w == w), default=0.0)

    @property
    def engine_queue_s(self) -> float:
        """Mean time that requests waited inside the engines, since these started."""
        waited = sum(values.get(_QUEUE_SUM, 0.0) for values in self._last.values())
        count = sum(values.get(_QUEUE_COUNT, 0.0) for values in self._last.values())
        return waited / count if count else 0.0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_TIMEOUT_S))
        self._start = time.monotonic()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._look()
        await self._session.close()

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        at_s = time.monotonic() - self._start
        pages = await asyncio.gather(*map(self._scrape, self._urls))
        nan = float("nan")
        self.looks.append(
            Look(
                at_s,
                [page.get(_RUNNING, nan) for page in pages],
                [page.get(_WAITING, nan) for page in pages],
            )
        )

    async def _scrape(self, url: str) -> dict[str, float]:
        try:
            async with self._session.get(f"{url}/metrics") as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return {}
        wanted = [line for line in text.splitlines() if line.startswith(_PREFIXES)]
        samples = [
            sample
            for family in text_string_to_metric_families("\n".join(wanted) + "\n")
            for sample in family.samples
        ]
        self._last[url] = {sample.name: sample.value for sample in samples}
        return self._last[url]


_PREFIXES = tuple(
    name + end for name in (_RUNNING, _WAITING, _QUEUE_SUM, _QUEUE_COUNT) for end in ("{", " ")
)
