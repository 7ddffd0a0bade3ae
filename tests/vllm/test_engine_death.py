"""An engine that dies: before its first token nobody notices, after it nothing is repeated."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import pytest

from tests.e2e.chat import client_for, text
from tests.support.system import MODEL, System, eventually
from tests.support.vllm import START_LIMIT_S

COMPLETIONS = "/v1/completions"


async def busy_worker(system: System) -> int:
    """The worker that has a request, half a second into its prefill of more than two.

    kvgate is asked, not the engine: vLLM's metrics page waits for the step.
    """
    addresses = [worker.address for worker in system.workers]
    for _ in range(1_000):
        busy = [worker["address"] for worker in system.fleet() if worker["in_flight"]]
        if busy:
            await asyncio.sleep(0.5)
            return addresses.index(busy[0])
        await asyncio.sleep(0.01)
    raise AssertionError("no engine became busy")


def revive(system: System, number: int) -> None:
    address, engine = system.workers[number].address, system.workers[number].engine
    assert engine is not None
    engine.wait(10)
    eventually(lambda: address not in system.ready_workers(), "its death is seen", 10)
    system.start_engine(number)
    eventually(lambda: address in system.ready_workers(), "it is back", START_LIMIT_S)


@pytest.mark.parametrize(("stream", "padding"), [(True, 0), (False, 3_000_000)])
async def test_before_the_first_token_another_worker_answers(
    mid: System, stream: bool, padding: int
) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": text(1_400, seed=padding + stream),
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": stream,
        "metadata": {"padding": "p" * padding},
    }
    before = mid.metric("kvgate_retried_requests_total")
    async with client_for(mid.url) as client:
        request = asyncio.create_task(client.post(COMPLETIONS, json=body))
        victim = await busy_worker(mid)
        mid.workers[victim].signal_engine(signal.SIGKILL)
        answer = await request
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvgate-worker"] == mid.workers[1 - victim].address
    assert ("data: [DONE]" if stream else '"completion_tokens":4') in answer.text
    assert mid.metric("kvgate_retried_requests_total") == before + 1
    revive(mid, victim)


async def test_after_the_first_token_the_stream_ends_with_an_error(mid: System) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2_000, "ignore_eos": True}
    before = mid.metric("kvgate_retried_requests_total")
    async with (
        client_for(mid.url) as client,
        client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response,
    ):
        address = response.headers["x-kvgate-worker"]
        victim = next(n for n, w in enumerate(mid.workers) if w.address == address)
        lines = response.aiter_lines()
        await anext(lines)
        mid.workers[victim].signal_engine(signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            async for _ in lines:
                pass
    assert mid.metric("kvgate_retried_requests_total") == before
    mid.wait_idle()
