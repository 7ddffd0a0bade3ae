"""Slots come back, workers and schedulers may die: nothing leaks and nothing sticks."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.chat import Answer, ask, asked, client_for, text
from tests.support.system import SLOTS, System, eventually, fetch, policy_for, running_system

CHAT = "/v1/chat/completions"


@pytest.fixture
def small(tmp_path: Path, model_dir: Path) -> Iterator[System]:
    """One worker at a leisurely pace, and a short queue."""
    admission = {"max_queue": 4, "max_queue_time_s": 1.5}
    policy = policy_for(model_dir, admission=admission)
    with running_system(tmp_path / "system", model_dir, workers=1, policy=policy) as running:
        yield running


@pytest.fixture
def three(tmp_path: Path, model_dir: Path) -> Iterator[System]:
    with running_system(tmp_path / "system", model_dir) as running:
        yield running


async def leave_after(client: httpx.AsyncClient, body: dict[str, object], wait_s: float) -> None:
    """Start a request and drop its connection."""
    task = asyncio.create_task(client.post(CHAT, json=body))
    await asyncio.sleep(wait_s)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_client_that_leaves_frees_its_slot_in_every_phase(small: System) -> None:
    async with client_for(small.url) as client:
        # Prefilling: about 1.7 s of prompt.
        await leave_after(client, asked(text(12_000, seed=1), "leave"), 0.5)
        small.wait_idle()

        # Streaming: after the first chunks.
        body = asked("hello", "stream", max_tokens=4_000, stream=True, ignore_eos=True)
        async with client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_lines():
                assert small.metric("kvgate_running_requests") == 1
                break
        small.wait_idle()

        # Queued: all slots are taken.
        long_ones = [
            asyncio.create_task(client.post(CHAT, json=asked("x", str(n), max_tokens=300)))
            for n in range(SLOTS)
        ]
        while small.metric("kvgate_running_requests") < SLOTS:
            await asyncio.sleep(0.02)
        waiting = asyncio.create_task(client.post(CHAT, json=asked("y", "queued")))
        while small.metric("kvgate_queued_requests") < 1:
            await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while small.metric("kvgate_queued_requests") > 0:
            await asyncio.sleep(0.02)
        gone = {"outcome": "client_gone"}
        assert small.metric("kvgate_requests_total", gone) == 1
        assert small.metric("kvgate_running_requests") == SLOTS
        answers = await asyncio.gather(*long_ones)
        assert {answer.status_code for answer in answers} == {200}
    small.wait_idle()


async def test_a_full_queue_and_a_long_wait_get_429_with_retry_after(small: System) -> None:
    async with client_for(small.url) as client:
        tasks = []
        for number in range(SLOTS + 6):
            body = asked("x", str(number), max_tokens=600, ignore_eos=True)
            tasks.append(asyncio.create_task(client.post(CHAT, json=body)))
            await asyncio.sleep(0.02)
        answers = await asyncio.gather(*tasks)
    codes = Counter(
        answer.json()["error"]["code"] if answer.status_code != 200 else "served"
        for answer in answers
    )
    print(dict(codes))
    assert codes == {"served": SLOTS, "queue_full": 2, "queue_timeout": 4}
    for answer in answers:
        if answer.status_code != 200:
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) >= 1_000
    small.wait_idle()


async def test_killing_a_worker_loses_no_request_that_had_no_byte_yet(three: System) -> None:
    failures: list[str] = []
    served: Counter[str] = Counter()
    stop = asyncio.Event()

    async def stream_one(client: httpx.AsyncClient, number: int) -> None:
        # Old prompts stay with their holders; new ones are for whoever is least busy.
        seed = number % 7 if number % 2 else number
        body = asked(text(400, seed=seed), str(number), max_tokens=24, stream=True)
        got_byte = False
        try:
            async with client.stream("POST", CHAT, json=body) as response:
                if response.status_code != 200:
                    failures.append(f"status {response.status_code}")
                    return
                served[response.headers["x-kvgate-worker"]] += 1
                async for line in response.aiter_lines():
                    got_byte = got_byte or bool(line)
        except httpx.HTTPError as error:
            if not got_byte:
                failures.append(type(error).__name__)

    async def load(client: httpx.AsyncClient, offset: int) -> None:
        number = offset
        while not stop.is_set():
            await stream_one(client, number)
            number += 101

    victim = three.workers[1]
    assert victim.engine is not None
    async with client_for(three.url) as client:
        loads = [asyncio.create_task(load(client, offset)) for offset in range(9)]
        await asyncio.sleep(2)
        assert served[victim.address] > 0, "the victim works before it dies"
        victim.engine.send_signal(signal.SIGKILL)
        victim.engine.wait()
        while victim.address in three.ready_workers():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # what it sent before it died is read now
        before = served[victim.address]
        await asyncio.sleep(2)
        assert served[victim.address] == before, "no traffic to a worker that is gone"
        three.start_engine(1)
        while victim.address not in three.ready_workers():
            await asyncio.sleep(0.05)
        for _ in range(100):
            await asyncio.sleep(0.1)
            if served[victim.address] > before:
                break
        stop.set()
        await asyncio.gather(*loads)
    assert failures == []
    assert served[victim.address] > before, "a worker that came back is used again"
    three.wait_idle()


async def test_an_engine_that_dies_before_its_first_token_is_replaced(three: System) -> None:
    """Streaming and not, small bodies and 3 MB ones: the client sees one complete answer."""
    cases = [(True, 0), (False, 0), (True, 3_000_000), (False, 3_000_000)]
    async with client_for(three.url) as client:
        for number, (stream, padding) in enumerate(cases):
            body = asked(text(20_000, seed=number), "?", max_tokens=8, stream=stream)
            body["metadata"] = {"padding": "p" * padding}
            request = asyncio.create_task(client.post(CHAT, json=body))
            victim = await busy_worker(three)
            engine = three.workers[victim].engine
            assert engine is not None
            engine.kill()
            answer = await request
            assert answer.status_code == 200
            assert answer.headers["x-kvgate-worker"] != three.workers[victim].address
            assert ("data: [DONE]" if stream else '"completion_tokens":8') in answer.text
            engine.wait()
            three.start_engine(victim)
            three.wait_ready()
    assert three.metric("kvgate_retried_requests_total") == len(cases)
    three.wait_idle()


async def test_a_drained_worker_finishes_what_it_has_and_gets_nothing_new(three: System) -> None:
    """DR1."""
    admin = client_for(f"http://127.0.0.1:{three.admin_port}")
    body = asked("hello", "stream", max_tokens=200, stream=True, ignore_eos=True)
    async with admin, client_for(three.url) as client:
        async with client.stream("POST", CHAT, json=body) as response:
            address = response.headers["x-kvgate-worker"]
            lines = response.aiter_lines()
            await anext(lines)
            told = await admin.post(f"/api/v1/workers/{address}/drain?deadline_s=30")
            assert told.status_code == 202
            eventually(lambda: state_of(three, address) == "draining", "it drains")
            answers = [await ask(client, asked("hello", f"{n}?")) for n in range(6)]
            assert address not in {answer.worker for answer in answers}
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        eventually(lambda: state_of(three, address) == "drained", "nothing is left on it")
        assert (await admin.post(f"/api/v1/workers/{address}/resume")).status_code == 202
        eventually(lambda: state_of(three, address) == "ready", "it is back")
        nobody = await admin.post("/api/v1/workers/127.0.0.1:1/drain")
        assert nobody.status_code == 404
        assert (
            await admin.post(f"/api/v1/workers/{address}/drain?deadline_s=x")
        ).status_code == 400


def state_of(system: System, address: str) -> str:
    return next(w["state"] for w in system.fleet() if w["address"] == address)


async def busy_worker(system: System) -> int:
    """The worker whose engine runs a request."""
    for _ in range(500):
        for number in range(len(system.workers)):
            if system.engine_metric(number, "vllm:num_requests_running") > 0:
                return number
        await asyncio.sleep(0.01)
    raise AssertionError("no engine became busy")


async def test_a_worker_that_returns_empty_has_no_old_credit(three: System) -> None:
    prompt = text(2_000, seed=42)
    async with client_for(three.url) as client:
        first = await ask(client, asked(prompt, "one"))
        holder = next(n for n, w in enumerate(three.workers) if w.address == first.worker)
        eventually(lambda: any(w["digest"]["keys"] > 100 for w in three.fleet()), "the digest came")
        engine = three.workers[holder].engine
        assert engine is not None
        engine.kill()
        engine.wait()
        eventually(lambda: first.worker not in three.ready_workers(), "the loss is seen")
        three.start_engine(holder)
        eventually(lambda: first.worker in three.ready_workers(), "it is back")
        worker = next(w for w in three.fleet() if w["address"] == first.worker)
        assert worker["digest"]["keys"] == 0
        assert worker["digest"]["overlay_keys"] == 0
        again = await ask(client, asked(prompt, "two"))
        assert (again.status, again.predicted, again.cached) == (200, 0, 0)


async def test_requests_already_streaming_end_with_an_error_when_their_worker_dies(
    three: System,
) -> None:
    body = asked("hello", "stream", max_tokens=4_000, stream=True, ignore_eos=True)
    async with (
        client_for(three.url) as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        address = response.headers["x-kvgate-worker"]
        engine = next(w.engine for w in three.workers if w.address == address)
        assert engine is not None
        lines = response.aiter_lines()
        await anext(lines)
        engine.kill()
        with pytest.raises(httpx.HTTPError):
            async for _ in lines:
                pass
    three.wait_idle()


async def test_a_restarted_scheduler_is_found_again_and_knows_the_caches(three: System) -> None:
    """SU1."""
    prompt = text(2_700, seed=7)
    async with client_for(three.url) as client:
        first = await ask(client, asked(prompt, "one"))
        assert three.scheduler is not None
        three.scheduler.kill()
        three.scheduler.wait()
        three.start_scheduler()
        started = time.monotonic()
        status = 0
        while status != 200:
            assert time.monotonic() - started < 20
            status, _ = fetch(f"{three.url}/v1/models")
        three.wait_ready()
        print(f"ready again after {time.monotonic() - started:.1f} s")
        eventually(lambda: any(w["digest"]["keys"] > 100 for w in three.fleet()), "snapshots")
        again: Answer = await ask(client, asked(prompt, "two"))
    assert again.worker == first.worker
    assert again.predicted >= 2_700
    assert again.cached == again.predicted


async def test_a_scheduler_asked_to_stop_lets_running_answers_end(three: System) -> None:
    body = asked("hello", "stream", max_tokens=120, stream=True, ignore_eos=True)
    async with (
        client_for(three.url) as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        assert three.scheduler is not None
        three.scheduler.send_signal(signal.SIGTERM)
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in rest
    assert three.scheduler.wait(15) == 0


def test_a_scheduler_without_workers_is_not_ready(tmp_path: Path, model_dir: Path) -> None:
    """SU1."""
    tmp_path.mkdir(exist_ok=True)
    system = System(tmp_path, model_dir, policy_for(model_dir), ())
    try:
        system.start_scheduler()
        admin = f"http://127.0.0.1:{system.admin_port}"
        eventually(lambda: fetch(f"{admin}/livez")[0] == 200, "alive")
        assert fetch(f"{admin}/readyz") == (503, "no worker has reported\n")
    finally:
        system.stop()


async def test_response_headers_can_be_switched_off_and_bodies_buffered(
    tmp_path: Path, model_dir: Path
) -> None:
    policy = {**policy_for(model_dir), "response_headers": False}
    with running_system(
        tmp_path / "system", model_dir, workers=2, policy=policy, body_mode="buffered"
    ) as system:
        prompt = text(2_000, seed=3)
        async with client_for(system.url) as client:
            for number in range(3):
                response = await client.post(CHAT, json=asked(prompt, str(number)))
                assert response.status_code == 200
                assert not [name for name in response.headers if name.startswith("x-kvgate")]
            cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 2_000, "buffered mode routes by prefix too"
            assert (await client.get("/v1/models")).status_code == 200
            refused = await client.post(CHAT, json={"model": "nobody", "messages": []})
            assert refused.status_code == 404
            large = {**asked("short", "large"), "metadata": {"padding": "p" * 12_000_000}}
            assert (await client.post(CHAT, json=large)).status_code == 200
        system.wait_idle()
