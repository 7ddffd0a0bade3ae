"""Parts that fail one at a time: the others serve on, and metrics and worker state show it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chat import ask, client_for
from tests.e2e.traffic import CHAT, others_serve, rest_of, short, streaming, traffic
from tests.support.system import MODEL, System, Worker, eventually, fetch, running_system

FROZEN_AFTER_S = 2.0
STALE_AFTER_S, LOST_AFTER_S = 3.0, 6.0
SEEN_S = 30.0
"""For tests on a busy machine; when nothing else runs, all is seen within 6 s."""
SIGNAL_OF_MIDDLEWARE = "errors_per_s"
"""Told only while the agent hears of every request."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[System]:
    policy = {
        "pools": [{"model": MODEL, "tokenizer": str(model_dir)}],
        "reports": {"stale_after_s": STALE_AFTER_S, "lost_after_s": LOST_AFTER_S},
    }
    with running_system(
        tmp_path_factory.mktemp("failing"),
        model_dir,
        policy=policy,
        simulator_flags=("--speedup", "3"),
        agent_flags=("--frozen-after-s", str(FROZEN_AFTER_S)),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def all_well(system: System) -> Iterator[None]:
    """Each test repairs what it broke."""
    yield
    eventually(lambda: well(system), "all is well again", SEEN_S)
    system.wait_idle()


def well(system: System) -> bool:
    fleet = system.fleet()
    return len(fleet) == len(system.workers) and all(
        worker["ready"] and not worker["last_resort"] and SIGNAL_OF_MIDDLEWARE in worker["signals"]
        for worker in fleet
    )


def state_of(system: System, worker: Worker) -> dict[str, Any]:
    """What the admin API says of it; empty if it is not in the pool."""
    found = (told for told in system.fleet() if told["address"] == worker.address)
    return next(found, {})


def gauge(system: System, name: str, worker: Worker, **labels: str) -> list[float]:
    return system.samples(f"kvgate_worker_{name}", {"worker": worker.address, **labels})


def is_in_state(system: System, worker: Worker, state: str) -> bool:
    """Both the API and the metrics say so."""
    told = state_of(system, worker)
    return told.get("state") == state and gauge(system, "state", worker, state=state) == [1.0]


async def soon(condition: Any, what: str, limit_s: float = SEEN_S) -> None:
    await asyncio.to_thread(eventually, condition, what, limit_s)


async def tell_engine(worker: Worker, path: str, **body: Any) -> None:
    async with client_for(f"http://{worker.address}") as engine:
        assert (await engine.post(path, json=body)).status_code == 200


async def plant(system: System) -> dict[str, int]:
    """Cache something on every worker; keys of each, once kvgate knows them."""
    for worker in system.workers:
        for number in range(3):
            await tell_engine(worker, CHAT, **short(number))
    await soon(lambda: all(told["digest"]["keys"] for told in system.fleet()), "caches known")
    await asyncio.to_thread(system.wait_idle)
    return {told["address"]: told["digest"]["keys"] for told in system.fleet()}


async def test_a_killed_agent_leaves_its_engine_serving_as_a_last_resort_and_then_out(
    system: System,
) -> None:
    async with client_for(system.url) as client, traffic(client) as seen:
        async with streaming(system, client, 1500) as (number, response):
            worker = system.workers[number]
            assert worker.agent is not None
            worker.agent.kill()
            worker.agent.wait()
            await soon(lambda: state_of(system, worker)["last_resort"], "a last resort")
            assert gauge(system, "last_resort", worker) == [1.0]
            assert state_of(system, worker)["report_age_s"] >= STALE_AFTER_S - 1
            told = len(seen.answers)
            assert (await rest_of(response))[-1] == "data: [DONE]", "its engine serves on"
        await soon(lambda: not state_of(system, worker), "out of the pool")
        assert gauge(system, "ready", worker) == []
        assert worker.address not in seen.served_since(told + 10)
        system.start_agent(number)
        await soon(lambda: state_of(system, worker).get("ready"), "back")
        await soon(lambda: state_of(system, worker)["digest"]["keys"] > 0, "with its cache")


async def test_without_the_middlewares_socket_numbers_stand_in_for_leases(system: System) -> None:
    worker = system.workers[1]
    assert worker.socket is not None

    def heard(known: bool) -> bool:
        told = SIGNAL_OF_MIDDLEWARE in state_of(system, worker)["signals"]
        shown = gauge(system, "signal", worker, signal=SIGNAL_OF_MIDDLEWARE) != []
        return told is shown is known

    async with client_for(system.url) as client:
        async with traffic(client):
            worker.socket.unlink()
            worker.socket.mkdir()  # so that it cannot be made again
            await soon(lambda: heard(False), "requests are not known any more")
            assert state_of(system, worker)["ready"]
        assert "socket for the middleware" in system.logs()
        async with traffic(client):
            worker.socket.rmdir()
            await soon(lambda: heard(True), "requests are known again")
        await asyncio.to_thread(system.wait_idle)
        before = system.metric("kvgate_engine_outcomes_total")
        for number in range(12):
            assert (await ask(client, short(number))).status == 200
        await soon(
            lambda: system.metric("kvgate_engine_outcomes_total") == before + 12,
            "every end is told by an engine",
        )


async def test_a_removed_socket_is_made_again_and_every_request_told(system: System) -> None:
    async with client_for(system.url) as client, streaming(system, client, 2000) as streamed:
        number, response = streamed
        worker = system.workers[number]
        assert worker.socket is not None
        worker.socket.unlink()
        await soon(worker.socket.exists, "there again")
        await soon(lambda: SIGNAL_OF_MIDDLEWARE in state_of(system, worker)["signals"], "heard")
        told = state_of(system, worker)
        assert (told["in_flight"], told["foreign"]) == (1, 0)
        before = system.metric("kvgate_engine_outcomes_total")
        assert (await rest_of(response))[-1] == "data: [DONE]"
        await soon(
            lambda: system.metric("kvgate_engine_outcomes_total") == before + 1, "its end is told"
        )


async def test_a_scheduler_that_was_gone_knows_caches_and_running_requests_at_once(
    system: System,
) -> None:
    worker = system.workers[0]
    assert system.scheduler is not None
    async with client_for(system.url) as client, client_for(f"http://{worker.address}") as engine:
        cached = await plant(system)
        body = {**short(0), "max_tokens": 3000, "stream": True}
        async with engine.stream("POST", CHAT, json=body) as running:
            assert running.status_code == 200
            system.scheduler.kill()
            system.scheduler.wait()
            async with asyncio.timeout(10):
                refused = await ask(client, short(1))
            assert refused.status >= 500
            direct = await engine.post(CHAT, json=short(2))
            assert direct.status_code == 200, "engines serve whoever asks them"
            system.start_scheduler()
            await soon(lambda: well(system), "all workers are known again")
            assert state_of(system, worker)["foreign"] == 1
            assert gauge(system, "foreign_requests", worker) == [1.0]
        await soon(
            lambda: all(
                told["digest"]["keys"] >= cached[told["address"]] for told in system.fleet()
            ),
            "all caches are known again",
        )
        assert (await ask(client, short(3))).status == 200


async def test_a_stopped_engine_is_down_and_goes_on_where_it_was(system: System) -> None:
    worker = system.workers[0]
    cached = (await plant(system))[worker.address]
    async with client_for(system.url) as client:
        async with traffic(client):  # what it had taken is answered after all
            try:
                worker.signal_engine(signal.SIGSTOP)
                await soon(lambda: is_in_state(system, worker, "down"), "down")
                assert not state_of(system, worker)["ready"]
                assert state_of(system, worker)["digest"]["keys"] == 0
                await others_serve(client, worker)
            finally:
                worker.signal_engine(signal.SIGCONT)
            await soon(lambda: is_in_state(system, worker, "ready"), "ready")
        await soon(
            lambda: state_of(system, worker)["digest"]["keys"] >= cached, "its cache is told"
        )


async def test_a_scheduler_that_stood_still_loses_no_worker(system: System) -> None:
    """What it did not read meanwhile is no silence of theirs."""
    cached = await plant(system)
    assert system.scheduler is not None
    system.scheduler.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(LOST_AFTER_S + 1.5)
    finally:
        system.scheduler.send_signal(signal.SIGCONT)
    for _ in range(20):
        keys = {told["address"]: told["digest"]["keys"] for told in system.fleet()}
        assert keys.keys() == cached.keys()
        assert all(keys[address] >= cached[address] for address in cached)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("fault", ["404", "renamed", "garbage", "slow"])
async def test_a_metrics_page_of_no_use_leaves_the_worker_ready_and_its_load_unknown(
    system: System, fault: str
) -> None:
    worker = system.workers[1]
    assert gauge(system, "kv_usage_ratio", worker) != []
    async with client_for(system.url) as client, traffic(client):
        try:
            await tell_engine(worker, "/sim/metrics", fault=fault)
            await soon(lambda: gauge(system, "kv_usage_ratio", worker) == [], "no KV usage")
            told = state_of(system, worker)
            assert told["signals"].keys() <= {SIGNAL_OF_MIDDLEWARE, "busy_ratio"}
            assert is_in_state(system, worker, "ready")
            # Numbers that are old make it a last resort; a page without any has none to be old.
            assert told["last_resort"] is (fault != "renamed")
            assert gauge(system, "last_resort", worker) == [float(told["last_resort"])]
        finally:
            await tell_engine(worker, "/sim/metrics", fault=None)
        await soon(lambda: gauge(system, "kv_usage_ratio", worker) != [], "known again")


async def test_an_engine_whose_steps_stop_while_its_pages_answer_is_frozen(system: System) -> None:
    worker = system.workers[2]
    async with client_for(system.url) as client, traffic(client):
        try:
            await tell_engine(worker, "/sim/freeze", seconds=60)
            await soon(lambda: is_in_state(system, worker, "frozen"), "frozen")
            assert fetch(f"http://{worker.address}/health")[0] == 200
            assert not state_of(system, worker)["ready"]
            assert state_of(system, worker)["digest"]["keys"] > 0, "its cache is still there"
            await others_serve(client, worker)
        finally:
            await tell_engine(worker, "/sim/freeze", seconds=0)
        await soon(lambda: is_in_state(system, worker, "ready"), "ready")


async def test_a_cleared_cache_is_not_claimed_any_more(system: System) -> None:
    prompt = short(0)
    async with client_for(system.url) as client:
        await ask(client, prompt)
        await plant(system)
        before = {told["address"]: told["digest"] for told in system.fleet()}
        for worker in system.workers:
            await tell_engine(worker, "/reset_prefix_cache")
            # The next step, whoever asks for it, tells of it.
            await tell_engine(worker, CHAT, **short(1))
        await soon(
            lambda: all(
                told["digest"]["epoch"] > before[told["address"]]["epoch"]
                and told["digest"]["keys"] < before[told["address"]]["keys"]
                for told in system.fleet()
            ),
            "empty caches of new epochs",
        )
        again = await ask(client, prompt)
        assert (again.status, again.predicted, again.cached) == (200, 0, 0)
