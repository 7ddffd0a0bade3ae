"""LE1 on the running product: a thousand requests that end in every way leave nothing behind."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.chat import asked, client_for, text
from tests.e2e.traffic import CHAT
from tests.support.system import MODEL, System, running_system

REQUESTS = 1_000
AT_ONCE = 50
HEARTBEATS = 5
RULE = {"name": "each", "per": ["tenant"], "concurrency": 12, "max_queue": 200}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[System]:
    policy = {
        "pools": [{"model": MODEL, "tokenizer": str(model_dir)}],
        "admission": {"rules": [RULE]},
        "reports": {"stale_after_s": 3.0, "lost_after_s": 5.0},
    }
    with running_system(
        tmp_path_factory.mktemp("leaks"),
        model_dir,
        policy=policy,
        simulator_flags=("--speedup", "4"),
    ) as running:
        yield running


async def one(client: httpx.AsyncClient, rng: random.Random, number: int) -> str:
    """A request that is read to its end, or left at a random moment."""
    stream = rng.random() < 0.5
    body = asked(text(80, seed=number % 40), str(number), max_tokens=24, stream=stream)
    patience_s = rng.choice([None, None, 0.02, 0.1, 0.3])
    try:
        async with asyncio.timeout(patience_s):
            return str((await client.post(CHAT, json=body)).status_code)
    except TimeoutError:
        return "left"
    except httpx.TransportError:
        return "broken"


async def disturb(system: System) -> None:
    """An engine and an agent are killed and come back; a third agent is cut off for a while."""
    await asyncio.sleep(1.0)
    system.workers[0].signal_engine(signal.SIGKILL)
    engine = system.workers[0].engine
    assert engine is not None
    engine.wait()
    await asyncio.sleep(0.5)
    agent = system.workers[1].agent
    assert agent is not None
    agent.kill()
    agent.wait()
    frozen = system.workers[2].agent
    assert frozen is not None
    frozen.send_signal(signal.SIGSTOP)
    await asyncio.sleep(4.0)
    frozen.send_signal(signal.SIGCONT)
    system.start_agent(1)
    system.start_engine(0)


async def test_quota_in_use_returns_to_the_truth_and_stays_there(system: System) -> None:
    rng = random.Random(11)
    ends: Counter[str] = Counter()
    numbers = iter(range(REQUESTS))
    async with client_for(system.url) as client:

        async def sender() -> None:
            for number in numbers:
                ends[await one(client, rng, number)] += 1

        disturbance = asyncio.create_task(disturb(system))
        await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
        await disturbance
    assert ends.total() == REQUESTS
    assert ends["left"] > 50
    assert ends["200"] > 100
    await asyncio.to_thread(time.sleep, HEARTBEATS * 1.0)
    for _ in range(3):
        for name in (
            "kvgate_running_requests",
            "kvgate_queued_requests",
            "kvgate_quota_requests",
            "kvgate_quota_tokens",
            "kvgate_quota_waiting",
            "kvgate_worker_in_flight_requests",
        ):
            assert system.metric(name) == 0, name
        await asyncio.to_thread(time.sleep, 1.0)
    await asyncio.to_thread(system.wait_ready)
    assert system.metric("kvgate_lease_mismatch") == 0
