"""Caches that restart, are cleared, overflow or lose events: kvgate knows within seconds.

One request may still be wrong: vLLM tells of a cleared cache with the next step that its
engine takes, which on an idle engine is the next request's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.chat import client_for
from tests.support.envoy import free_ports
from tests.support.event_tap import EventTap
from tests.support.system import MODEL, System, Worker, eventually, running_system
from tests.support.vllm import BLOCK_TOKENS, START_LIMIT_S, VllmEngines, vllm_policy
from workers.simulator.model import VOCAB_SIZE

BLOCKS = 200
MAX_MODEL_LEN = 4_096
PROMPT_TOKENS = 400
RIGHT_AGAIN_S = 5.0
REPORT_INTERVAL_S = 1.0
COMPLETIONS = "/v1/completions"

_seeds = itertools.count(1)


@dataclass
class Rig:
    system: System
    taps: list[EventTap]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Rig]:
    """Two servers with small caches; between each and its agent a tap that can lose events."""
    taps: list[EventTap] = []
    with ExitStack() as stack:

        def tapped_worker() -> Worker:
            *ports, tap_port = free_ports(4)
            worker = Worker(*ports, tap_port=tap_port)
            taps.append(stack.enter_context(EventTap(worker.kv_events_port, tap_port, len(taps))))
            return worker

        system = running_system(
            tmp_path_factory.mktemp("disturbed"),
            tiny_model,
            workers=2,
            policy=vllm_policy(tiny_model),
            engines=VllmEngines(blocks=BLOCKS, max_model_len=MAX_MODEL_LEN),
            new_worker=tapped_worker,
        )
        yield Rig(stack.enter_context(system), taps)


@dataclass(frozen=True)
class Told:
    at: float
    predicted: int
    cached: int
    worker: str

    @property
    def wrong(self) -> bool:
        return abs(self.predicted - self.cached) > BLOCK_TOKENS


def new_prompts(count: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Prompts that no test has used before."""
    rng = random.Random(next(_seeds))
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(tokens)] for _ in range(count)]


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> Told:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return Told(
        time.monotonic(),
        int(response.headers["x-kvgate-cached-tokens"]),
        (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        response.headers["x-kvgate-worker"],
    )


async def complete_at(worker: Worker, prompts: list[list[int]]) -> None:
    """Requests past kvgate, straight to an engine."""
    async with client_for(f"http://{worker.address}") as client:
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200


async def known_home(client: httpx.AsyncClient, prompt: list[int]) -> str:
    """The worker that kvgate would choose now for the cache it knows there; "" for none."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    response = await client.post(COMPLETIONS, json=body, headers={"x-kvgate-dry-run": "1"})
    assert response.status_code == 200, response.text
    said = response.json()
    return str(said["workers"][0]["address"]) if said["cached_tokens"] else ""


async def plant(client: httpx.AsyncClient, system: System, prompts: list[list[int]]) -> list[str]:
    """Have the prompts cached, by turns at either worker, and known to kvgate; their homes.

    Looks before it sends: a prompt that goes to the other worker would be cached at both.
    """
    homes = []
    for number, prompt in enumerate(prompts):
        worker = system.workers[number % len(system.workers)]
        await complete_at(worker, [prompt])
        homes.append(worker.address)
    for prompt, home in zip(prompts, homes, strict=True):
        deadline = time.monotonic() + RIGHT_AGAIN_S
        while (known := await known_home(client, prompt)) != home:
            assert time.monotonic() < deadline, (known, home)
            await asyncio.sleep(0.05)
        assert (told := await complete(client, prompt)).worker == home, told
    return homes


async def ask_for(
    seconds: float, client: httpx.AsyncClient, prompts: list[list[int]]
) -> list[Told]:
    """Ask for the prompts in turn, spread over this time; each at least once."""
    pause_s = seconds / len(prompts)
    told = []
    for prompt in prompts:
        told.append(await complete(client, prompt))
        await asyncio.sleep(pause_s)
    return told


def show(what: str, began: float, told: list[Told]) -> None:
    late = [answer.at - began for answer in told if answer.wrong]
    last = f"the last {max(late):.1f} s after" if late else "none"
    print(f"{what}: {len(late)} of {len(told)} predictions wrong, {last}")


async def test_a_fifth_of_the_events_lost_is_made_good_by_replay(rig: Rig) -> None:
    prompts = new_prompts(6, tokens=300)
    async with client_for(rig.system.url) as client:
        for tap in rig.taps:
            tap.loss = 0.2
        began = time.monotonic()
        told = []
        while sum(tap.dropped for tap in rig.taps) < 8 or len(told) < 60:
            fresh = new_prompts(1, tokens=100)
            told += [await complete(client, prompt) for prompt in [*prompts[:3], *fresh]]
            assert time.monotonic() - began < 120
        for tap in rig.taps:
            tap.loss = 1.0  # the last events of all: nothing comes after them
        lost = new_prompts(4, tokens=200)
        for prompt in lost:
            await complete(client, prompt)
        for tap in rig.taps:
            tap.loss = 0.0
        began_last = time.monotonic()
        await asyncio.sleep(RIGHT_AGAIN_S)
        told += [await complete(client, prompt) for prompt in lost]
    dropped, passed = (sum(getattr(t, n) for t in rig.taps) for n in ("dropped", "passed"))
    print(f"events: {dropped} dropped, {passed} passed")
    show("lost events", began_last, told)
    wrong = [answer for answer in told if answer.wrong]
    assert len(wrong) <= 0.01 * len(told), wrong


async def test_an_overflown_cache_is_claimed_for_no_more_than_five_seconds(rig: Rig) -> None:
    prompts = new_prompts(8)
    async with client_for(rig.system.url) as client:
        await plant(client, rig.system, prompts)
        for worker in rig.system.workers:
            await complete_at(worker, new_prompts(4, tokens=BLOCKS * BLOCK_TOKENS // 3))
        began = time.monotonic()
        told = await ask_for(RIGHT_AGAIN_S, client, prompts[:6])
        late = [await complete(client, prompt) for prompt in prompts[6:]]
    show("overflown cache", began, [*told, *late])
    assert all(answer.cached == 0 for answer in late)
    assert not [answer for answer in late if answer.wrong]


async def test_a_reset_cache_is_claimed_for_no_more_than_five_seconds(rig: Rig) -> None:
    prompts = new_prompts(8)
    async with client_for(rig.system.url) as client:
        await plant(client, rig.system, prompts)
        for worker in rig.system.workers:
            reset = await client.post(f"http://{worker.address}/reset_prefix_cache")
            assert reset.status_code == 200
            # The engine's next step, whoever asks for it, tells of it.
            await complete_at(worker, new_prompts(1, tokens=40))
        began = time.monotonic()
        told = await ask_for(RIGHT_AGAIN_S, client, prompts[:6])
        late = [await complete(client, prompt) for prompt in prompts[6:]]
    show("reset cache", began, [*told, *late])
    assert all(answer.cached == 0 for answer in late)
    assert not [answer for answer in late if answer.wrong]


async def test_a_restarted_engine_is_known_to_be_empty_from_its_first_request(rig: Rig) -> None:
    prompts = new_prompts(8)
    system = rig.system
    async with client_for(system.url) as client:
        homes = await plant(client, system, prompts)
        restarted = system.workers[0]
        restarted.signal_engine(signal.SIGTERM)
        assert restarted.engine is not None
        restarted.engine.wait(30)
        restarted.signal_engine(signal.SIGKILL)
        eventually(lambda: restarted.address not in system.ready_workers(), "seen as gone", 5)
        system.start_engine(0)
        eventually(lambda: restarted.address in system.ready_workers(), "back", START_LIMIT_S)
        began = time.monotonic()
        told = await ask_for(1.0, client, prompts)
    show("restarted engine", began, told)
    assert not [answer for answer in told if answer.wrong]
    kept = [answer for answer, home in zip(told, homes, strict=True) if home != restarted.address]
    assert kept
    assert all(answer.cached for answer in kept), "the other worker's cache is still known"


async def test_a_killed_engine_is_seen_within_two_reports_and_its_traffic_goes_elsewhere(
    rig: Rig,
) -> None:
    system = rig.system
    killed, other = system.workers
    prompts = new_prompts(8)
    async with client_for(system.url) as client:
        await plant(client, system, prompts)
        killed.signal_engine(signal.SIGKILL)
        began = time.monotonic()
        told = [await complete(client, prompt) for prompt in prompts]
        gone = f"{killed.address} is out"
        eventually(
            lambda: killed.address not in system.ready_workers(), gone, 2 * REPORT_INTERVAL_S
        )
        print(f"a killed engine was out after {time.monotonic() - began:.1f} s at most")
        told += [await complete(client, prompt) for prompt in prompts]
    assert {answer.worker for answer in told} == {other.address}
