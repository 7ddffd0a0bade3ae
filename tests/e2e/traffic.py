"""Traffic for tests of failures: requests that all have to be answered, and long streams."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.chat import Answer, ask, asked, text
from tests.support.system import System, Worker

CHAT = "/v1/chat/completions"

_seeds = itertools.count(10_000)


def short(number: int) -> dict[str, Any]:
    """A small prompt that nobody has asked before."""
    return asked(text(60, seed=next(_seeds)), str(number))


@dataclass
class Traffic:
    """Requests that nothing but their answers holds up."""

    answers: list[Answer] = field(default_factory=list)

    def served_since(self, count: int) -> set[str]:
        return {answer.worker for answer in self.answers[count:]}


@asynccontextmanager
async def traffic(client: httpx.AsyncClient) -> AsyncIterator[Traffic]:
    """Ten requests a second; at the end all have been answered with 200."""
    seen, stop, tasks = Traffic(), asyncio.Event(), []

    async def one(number: int) -> None:
        seen.answers.append(await ask(client, short(number)))

    async def start() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0.1)

    starter = asyncio.create_task(start())
    try:
        yield seen
    finally:
        stop.set()
        await starter
        await asyncio.gather(*tasks)
    wrong = [answer for answer in seen.answers if answer.status != 200]
    assert not wrong


async def others_serve(client: httpx.AsyncClient, worker: Worker, count: int = 12) -> None:
    """Requests are answered, and not by this worker."""
    async with asyncio.timeout(10):
        answers = [await ask(client, short(number)) for number in range(count)]
    assert {answer.status for answer in answers} == {200}
    assert worker.address not in {answer.worker for answer in answers}


@asynccontextmanager
async def streaming(
    system: System, client: httpx.AsyncClient, tokens: int
) -> AsyncIterator[tuple[int, httpx.Response]]:
    """A stream that has begun, and the number of the worker that it comes from."""
    body = asked(text(60, seed=next(_seeds)), "stream", max_tokens=tokens, stream=True)
    async with client.stream("POST", CHAT, json=body) as response:
        home = response.headers["x-kvgate-worker"]
        yield [worker.address for worker in system.workers].index(home), response


async def rest_of(response: httpx.Response) -> list[str]:
    """Lines of a stream up to its end."""
    return [line async for line in response.aiter_lines() if line]
