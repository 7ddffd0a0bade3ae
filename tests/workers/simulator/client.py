"""A client of one simulated worker, and readers of what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from workers.simulator.server import Simulator

Json = dict[str, Any]
WORDS = "the value of the file is set when the server is read by the system "


class Client:
    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(self.simulator.url)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.http.close()

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Json]:
        async with self.http.post(path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Json]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: Json) -> list[str]:
        """Data of every event of a stream."""
        async with self.http.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    async def complete(self, prompt: Any, **fields: Any) -> Json:
        status, body = await self.post("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, body
        return body

    async def cached(self, prompt: Any, **fields: Any) -> int:
        usage = (await self.complete(prompt, max_tokens=1, **fields))["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    async def metrics(self) -> dict[str, float]:
        """Sums of samples over their labels; a sample is also found under name{reason}."""
        async with self.http.get("/metrics") as response:
            text = await response.text()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
                for label in ("reason", "finished_reason"):
                    if label in sample.labels:
                        values[f"{sample.name}{{{sample.labels[label]}}}"] = sample.value
        return values

    async def until(self, **wanted: float) -> None:
        """Wait until gauges of /metrics have these values."""
        await self._poll(lambda m: all(m[f"vllm:{k}"] == value for k, value in wanted.items()))

    async def until_generated(self, tokens: int) -> None:
        """Wait until the engine has generated this many tokens."""
        await self._poll(lambda m: m["vllm:generation_tokens_total"] >= tokens)

    async def _poll(self, reached: Callable[[dict[str, float]], bool]) -> None:
        async with asyncio.timeout(10):
            while not reached(await self.metrics()):  # HTTP has no event
                await asyncio.sleep(0.005)


def chat(*turns: str, **fields: Any) -> Json:
    """Chat body: user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"model": "sim", "messages": messages, **fields}


def parsed(events: list[str]) -> list[Json]:
    """Events as objects, without the end mark."""
    return [json.loads(event) for event in events if event != "[DONE]"]
