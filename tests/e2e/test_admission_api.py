"""Admission as callers and operators meet it: the Scheduler API, refusals, reload, drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.chat import asked, client_for, text
from tests.support.envoy import free_ports
from tests.support.scheduler_api import Gateway, chat_call, gateway_at
from tests.support.system import (
    MODEL,
    System,
    Worker,
    eventually,
    fetch,
    policy_for,
    running_system,
)

CHAT = "/v1/chat/completions"
LITE = "sim-lite"
TENANT = "x-acme-tenant"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[System]:
    """Two workers; the first one also serves a smaller model, for requests that fall back."""
    workers = [Worker(*free_ports(3)) for _ in range(2)]
    policy = policy_for(model_dir)
    policy["pools"].append({"model": LITE, "workers": [workers[0].address]})
    policy["identity"] = {"tenant": [{"header": TENANT}]}
    with running_system(
        tmp_path_factory.mktemp("admission"),
        model_dir,
        workers=2,
        policy=policy,
        simulator_flags=("--speedup", "3", "--adapter", LITE),
        new_worker=iter(workers).__next__,
    ) as running:
        yield running


@pytest.fixture
def system(base: System) -> Iterator[System]:
    """The same system for each test, under its first policy again."""
    yield base
    write(base, base.policy)
    assert reloaded(base)[0] == 200
    base.wait_idle()


def write(system: System, policy: dict[str, Any]) -> None:
    (system.folder / "policy.yaml").write_text(yaml.safe_dump(policy))


def reloaded(system: System) -> tuple[int, dict[str, Any]]:
    response = httpx.post(f"http://127.0.0.1:{system.admin_port}/api/v1/policy/reload", timeout=10)
    return response.status_code, response.json()


def adopt(
    system: System,
    *rules: dict[str, Any],
    pool: dict[str, Any] | None = None,
    leases: dict[str, Any] | None = None,
    **policy: Any,
) -> None:
    """Go on under these quota rules, limits of the pool and terms of leases."""
    first, *others = system.policy["pools"]
    pools = [{**first, "admission": pool or {}}, *others]
    admission = {"rules": rules, "leases": leases or {}}
    write(system, {**system.policy, "pools": pools, "admission": admission, **policy})
    status, told = reloaded(system)
    assert (status, told.get("result")) == (200, "applied"), told


def page(system: System, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        fetch(f"http://127.0.0.1:{system.admin_port}/api/v1/{name}")[1]
    )
    return answer


def command(system: System, *arguments: str, body: bytes = b"") -> subprocess.Popen[bytes]:
    """The kvgate command in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "extproc.cli", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ, COLUMNS="200"),
    )
    assert process.stdin is not None
    process.stdin.write(body)
    process.stdin.close()
    process.stdin = None
    return process


async def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    out, err = await asyncio.to_thread(process.communicate)
    return process.returncode, (out + err).decode()


def running(system: System) -> float:
    return system.metric("kvgate_running_requests")


def body(words: str = "hello", **fields: Any) -> bytes:
    return json.dumps(asked(words, "?", **fields)).encode()


@asynccontextmanager
async def gateway(system: System) -> AsyncIterator[Gateway]:
    async with gateway_at(f"127.0.0.1:{system.control_port}") as caller:
        yield caller


@asynccontextmanager
async def load(
    system: System, clients: int = 6, max_tokens: int = 24
) -> AsyncIterator[Counter[str]]:
    """Chats one after the other from each client; what they got by status or error."""
    got: Counter[str] = Counter()
    stop = asyncio.Event()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        while not stop.is_set():
            number += 100
            try:
                request = asked(text(100, seed=number % 9), str(number), max_tokens=max_tokens)
                got[str((await client.post(CHAT, json=request)).status_code)] += 1
            except httpx.HTTPError as error:
                got[type(error).__name__] += 1

    async with client_for(system.url) as client:
        tasks = [asyncio.create_task(one(client, number)) for number in range(clients)]
        try:
            yield got
        finally:
            stop.set()
            await asyncio.gather(*tasks)


class TestSchedulerApi:
    async def test_a_gateway_admits_sends_and_releases(self, system: System) -> None:
        """As it would without Envoy: the request goes straight to the worker it was told."""
        request = body(text(300, seed=1), max_tokens=12)
        async with gateway(system) as caller, httpx.AsyncClient(timeout=30) as client:
            for turn in range(2):
                admitted = (await caller.admit(chat_call(request))).admitted
                assert running(system) == 1
                assert len(admitted.endpoints) == 2
                response = await client.post(
                    f"http://{admitted.endpoints[0]}{CHAT}",
                    content=request,
                    headers={"content-type": "application/json", "x-kvgate-lease": admitted.lease},
                )
                assert response.status_code == 200
                usage = response.json()["usage"]
                assert admitted.prompt_tokens == usage["prompt_tokens"]
                if turn:
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    assert admitted.cached_tokens == cached > 300
                # The engine may have told the end before the gateway does.
                await caller.release(admitted.lease, status=200)
                assert running(system) == 0
        assert system.metric("kvgate_requests_total", {"outcome": "allowed", "endpoint": "chat"})

    async def test_a_held_call_gets_its_turn_and_one_that_is_cancelled_leaves(
        self, system: System
    ) -> None:
        adopt(system, pool={"max_concurrency": 1})
        async with gateway(system) as caller:
            first = (await caller.admit(chat_call(body()))).admitted
            second = caller.admit(chat_call(body()))
            third = caller.admit(chat_call(body()))
            await until(lambda: page(system, "queues")["pools"][MODEL]["waiting"] == 2)
            second.cancel()
            await until(lambda: page(system, "queues")["pools"][MODEL]["waiting"] == 1)
            assert (await caller.release(first.lease)).released
            admitted = (await third).admitted
            assert admitted.queue_wait_s > 0
            late = caller.admit(chat_call(body()), timeout=0.3)
            with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
                await late
            await caller.release(admitted.lease)
        queues = page(system, "queues")["pools"][MODEL]
        assert (queues["running"], queues["waiting"]) == (0, 0)
        assert system.metric("kvgate_requests_total", {"outcome": "client_gone"}) >= 2

    async def test_envoys_requests_and_the_apis_share_one_queue(self, system: System) -> None:
        adopt(system, pool={"max_concurrency": 1})
        async with gateway(system) as caller, client_for(system.url) as client:
            lease = (await caller.admit(chat_call(body()))).admitted.lease
            waiting = asyncio.create_task(client.post(CHAT, content=body(), headers=JSON))
            await until(lambda: page(system, "queues")["pools"][MODEL]["waiting"] == 1)
            await caller.release(lease)
            assert (await waiting).status_code == 200

    async def test_refusals_are_typed(self, system: System) -> None:
        adopt(system, pool={"max_concurrency": 1, "max_queue": 0})
        async with gateway(system) as caller:
            lease = (await caller.admit(chat_call(body()))).admitted.lease
            refusal = (await caller.admit(chat_call(body()))).refusal
            assert (refusal.code, refusal.http_status) == ("queue_full", 429)
            assert refusal.reason == "quota:pool"
            assert refusal.retry_after_ms > 0
            selected = (await caller.select(chat_call(body()))).selected
            assert len(selected.endpoints) == 2, "a worker alone needs no quota"
            await caller.release(lease)

    async def test_a_gateway_that_falls_silent_loses_its_lease(self, system: System) -> None:
        adopt(system, leases={"api_ttl_s": 1.0})
        async with gateway(system) as caller:
            kept = (await caller.admit(chat_call(body()))).admitted.lease
            lost = (await caller.admit(chat_call(body()))).admitted.lease
            for _ in range(8):
                await asyncio.sleep(0.2)
                assert (await caller.renew(kept)).held
            assert running(system) == 1
            assert not (await caller.renew(lost)).held
            assert (await caller.release(kept)).released
        assert page(system, "queues")["pools"][MODEL]["leases_freed"]["silent"] == 1


class TestRollout:
    async def test_cache_aware_routing_may_watch(self, system: System) -> None:
        adopt(system, rollout={"cache_routing": "shadow"})
        request = body(text(400, seed=77))
        async with client_for(system.url) as client:
            answers = [await client.post(CHAT, content=request, headers=JSON) for _ in range(12)]
        assert {answer.status_code for answer in answers} == {200}
        used = {answer.headers["x-kvgate-worker"] for answer in answers}
        assert len(used) == 2, "load alone chooses between two idle workers"
        assert system.metric("kvgate_shadow_routing_total") == 12
        assert system.metric("kvgate_shadow_routing_total", {"agreement": "other"}) > 0
        watched = f'"watched_pick": "{system.workers[0].address[:10]}'
        eventually(lambda: watched in system.logs(), "the pick is logged", 5)


class TestLookingBeforeDeciding:
    async def test_the_command_line_explains_a_request(self, system: System) -> None:
        process = command(
            system, "estimate", "--server", f"127.0.0.1:{system.control_port}", body=body()
        )
        status, shown = await ended(process)
        assert status == 0
        assert "allow" in shown
        for worker in system.workers:
            assert worker.address in shown
        assert "uncached" in shown

    async def test_a_dry_run_answers_and_sends_nothing_on(self, system: System) -> None:
        async with client_for(system.url) as client:
            served = sum(system.engine_metric(n, "vllm:request_success_total") for n in (0, 1))
            response = await client.post(
                CHAT, content=body(), headers={**JSON, "x-kvgate-dry-run": "1"}
            )
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
        said = response.json()
        assert said["verdict"] == "allow"
        addresses = {worker["address"] for worker in said["workers"]}
        assert addresses == {worker.address for worker in system.workers}
        assert sum(system.engine_metric(n, "vllm:request_success_total") for n in (0, 1)) == served
        assert running(system) == 0


class TestRefusalsThroughEnvoy:
    async def test_they_say_why_and_when_to_come_back(self, system: System) -> None:
        adopt(system, {"name": "one", "concurrency": 1, "max_queue": 0})
        async with gateway(system) as caller, client_for(system.url) as client:
            lease = (await caller.admit(chat_call(body()))).admitted.lease
            response = await client.post(CHAT, content=body(), headers=JSON)
            await caller.release(lease)
            again = await client.post(CHAT, content=body(), headers=JSON)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        headers = response.headers
        assert headers["x-kvgate-reason"] == "quota:one"
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after-ms"]) >= 250
        assert again.status_code == 200

    async def test_a_request_that_does_not_wait_is_told_at_once(self, system: System) -> None:
        adopt(system, pool={"max_concurrency": 1})
        async with gateway(system) as caller, client_for(system.url) as client:
            lease = (await caller.admit(chat_call(body()))).admitted.lease
            hurried = {**JSON, "x-kvgate-max-queue-ms": "0"}
            response = await client.post(CHAT, content=body(), headers=hurried)
            await caller.release(lease)
        assert response.json()["error"]["code"] == "would_wait"
        assert response.headers["x-kvgate-reason"] == "quota:pool"


class TestComingBack:
    async def test_who_waits_as_told_is_served_while_others_keep_asking(
        self, system: System
    ) -> None:
        """Twelve clients that ask again at once keep a queue of four full."""
        adopt(system, pool={"max_concurrency": 2, "max_queue": 4})
        stop = asyncio.Event()
        outcomes: list[tuple[float, int]] = []

        async def pushy(client: httpx.AsyncClient, number: int) -> None:
            while not stop.is_set():
                number += 100
                answer = await client.post(CHAT, json=asked("hello", str(number), max_tokens=24))
                if answer.status_code == 429:
                    await asyncio.sleep(0.05)

        async def patient(client: httpx.AsyncClient, number: int) -> None:
            request = asked("patient", str(number), max_tokens=24)
            while (answer := await client.post(CHAT, json=request)).status_code == 200:
                await asyncio.sleep(0.05)
            told_s = float(answer.headers["retry-after-ms"]) / 1_000
            await asyncio.sleep(told_s)
            outcomes.append((told_s, (await client.post(CHAT, json=request)).status_code))

        async with client_for(system.url) as client:
            crowd = [asyncio.create_task(pushy(client, number)) for number in range(12)]
            try:
                await until(lambda: page(system, "queues")["pools"][MODEL]["waiting"] == 4)
                await asyncio.gather(*[patient(client, number) for number in range(4)])
            finally:
                stop.set()
                await asyncio.gather(*crowd)
        assert [status for _, status in outcomes] == [200] * 4, outcomes
        ended = {how: system.metric("kvgate_places_ended_total", {"model": MODEL, "how": how})
                 for how in ("taken_up", "lost")}  # fmt: skip
        assert ended["taken_up"] >= 4


class TestDegrade:
    async def test_the_engine_is_told_a_shorter_answer(self, system: System) -> None:
        step = {"max_output_tokens": 16}
        rule = {"name": "work", "tokens_in_flight": 400, "max_queue": 0, "degrade": [step]}
        adopt(system, rule)
        async with gateway(system) as caller, client_for(system.url) as client:
            # No answer was seen in this lane, so each is expected as long as it may be.
            lane = ("x-kvgate-lane", "batch")
            first = chat_call(body(max_tokens=200), headers=[lane])
            lease = (await caller.admit(first)).admitted.lease
            long_one = body(max_tokens=250, ignore_eos=True)
            response = await client.post(CHAT, content=long_one, headers={**JSON, lane[0]: lane[1]})
            await caller.release(lease)
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 16
        assert response.headers["x-kvgate-degraded"] == "max_output_tokens=16"

    async def test_the_engine_is_told_another_model(self, system: System) -> None:
        rule = {
            "name": "large",
            "match": {"models": [MODEL]},
            "concurrency": 1,
            "max_queue": 0,
            "degrade": [{"model": LITE}],
        }
        adopt(system, rule)
        async with gateway(system) as caller, client_for(system.url) as client:
            lease = (await caller.admit(chat_call(body()))).admitted.lease
            response = await client.post(CHAT, content=body(), headers=JSON)
            other = (await caller.admit(chat_call(body()))).admitted
            for held in (lease, other.lease):
                await caller.release(held)
        assert response.status_code == 200
        assert response.json()["model"] == LITE
        assert response.headers["x-kvgate-degraded"] == f"model={LITE}"
        assert response.headers["x-kvgate-worker"] == system.workers[0].address
        assert other.model == LITE


class TestIdentity:
    async def test_tenants_and_lanes_of_a_trusted_gateway_have_their_own_limits(
        self, system: System
    ) -> None:
        per_tenant = {"name": "tenants", "per": ["tenant"], "concurrency": 1, "max_queue": 0}
        batch = {"name": "batch", "match": {"lanes": ["batch"]}, "concurrency": 1, "max_queue": 0}
        adopt(system, per_tenant, batch)
        async with gateway(system) as caller, client_for(system.url) as client:

            async def sent(tenant: str, lane: str) -> httpx.Response:
                headers = {**JSON, TENANT: tenant, "x-kvgate-lane": lane}
                return await client.post(CHAT, content=body(), headers=headers)

            pairs = [(TENANT, "acme"), ("x-kvgate-lane", "batch")]
            lease = (await caller.admit(chat_call(body(), headers=pairs))).admitted.lease
            same_tenant, same_lane, neither = [
                await sent("acme", "online"),
                await sent("globex", "batch"),
                await sent("globex", "online"),
            ]
            (shown,) = [r for r in page(system, "queues")["rules"] if r["rule"] == "tenants"]
            await caller.release(lease)
        assert same_tenant.headers["x-kvgate-reason"] == "quota:tenants"
        assert same_lane.headers["x-kvgate-reason"] == "quota:batch"
        assert (neither.status_code, neither.headers["x-kvgate-lane"]) == (200, "online")
        used = {each["of"]["tenant"]: each["requests"] for each in shown["busiest"]}
        assert used["acme"] == 1


class TestReload:
    async def test_sighup_changes_a_limit_under_load(self, system: System) -> None:
        first, *others = system.policy["pools"]
        narrow = {
            **system.policy,
            "pools": [{**first, "admission": {"max_concurrency": 2}}, *others],
        }
        assert system.scheduler is not None
        applied = system.metric("kvgate_policy_reloads_total", {"result": "applied"})
        async with load(system, clients=8) as got:
            await until(lambda: running(system) > 2)
            write(system, narrow)
            system.scheduler.send_signal(signal.SIGHUP)
            await until(
                lambda: (
                    system.metric("kvgate_policy_reloads_total", {"result": "applied"}) > applied
                )
            )
            await until(lambda: running(system) <= 2)
            seen = []
            for _ in range(20):
                seen.append(running(system))
                await asyncio.sleep(0.05)
            assert max(seen) == 2
            assert page(system, "workers")["policy"] != ""
        print(dict(got))
        assert set(got) == {"200"}

    async def test_a_bad_file_changes_nothing(self, system: System) -> None:
        before = page(system, "workers")["policy"]
        assert system.scheduler is not None
        refused = system.metric("kvgate_policy_reloads_total", {"result": "refused"})
        (system.folder / "policy.yaml").write_text('api_key_hash_secret: "SECRET-CANARY-789')
        system.scheduler.send_signal(signal.SIGHUP)
        await until(
            lambda: system.metric("kvgate_policy_reloads_total", {"result": "refused"}) > refused
        )
        status, told = reloaded(system)
        assert status == 422
        assert "not YAML" in told["error"]["message"]
        assert page(system, "workers")["policy"] == before
        assert "policy reload" in system.logs()
        assert "SECRET-CANARY-789" not in system.logs()
        async with client_for(system.url) as client:
            assert (await client.post(CHAT, content=body(), headers=JSON)).status_code == 200


class TestDrain:
    async def test_a_drain_under_load_costs_no_client_an_error(self, system: System) -> None:
        """DR1."""
        name = system.workers[1].address
        server = ("--server", f"http://127.0.0.1:{system.admin_port}")
        async with load(system) as got:
            await until(lambda: in_flight(system, name) > 0)
            status, shown = await ended(command(system, "drain", name, "--wait", *server))
            print(shown)
            assert status == 0
            assert shown.splitlines()[-1] == f"{name}: drained, 0 in flight"
            for _ in range(10):
                assert in_flight(system, name) == 0
                await asyncio.sleep(0.05)
            assert (await ended(command(system, "resume", name, *server)))[0] == 0
            await until(lambda: in_flight(system, name) > 0)
        print(dict(got))
        assert set(got) == {"200"}

    async def test_with_every_worker_drained_nobody_is_picked(self, system: System) -> None:
        admin = f"http://127.0.0.1:{system.admin_port}/api/v1/workers"
        async with client_for(system.url) as client, gateway(system) as caller:
            for worker in system.workers:
                await client.post(f"{admin}/{worker.address}/drain?deadline_s=5")
            await until(lambda: not system.ready_workers())
            response = await client.post(CHAT, content=body(), headers=JSON)
            refusal = (await caller.admit(chat_call(body()))).refusal
            for worker in system.workers:
                await client.post(f"{admin}/{worker.address}/resume")
            await until(lambda: len(system.ready_workers()) == 2)
            assert (await client.post(CHAT, content=body(), headers=JSON)).status_code == 200
        assert response.status_code == 503
        assert response.json()["error"]["code"] == refusal.code == "no_ready_worker"
        assert int(response.headers["retry-after"]) >= 1
        assert "x-kvgate-worker" not in response.headers


async def test_what_scaling_says_follows_the_load(system: System) -> None:
    adopt(system, rollout={"scaling": "shadow"})

    def pool() -> dict[str, Any]:
        shown: dict[str, Any] = page(system, "scaling")["pools"][MODEL]
        return shown

    async with load(system, clients=30, max_tokens=200):
        await until(lambda: pool()["desired"]["workers"] == 4)
        assert pool()["waiting"] > 0
        assert pool()["ready"] == 2
    assert page(system, "scaling")["acts"] is False
    assert system.metric("kvgate_desired_workers") == 0
    eventually(lambda: pool()["waiting"] == 0, "all served", 10)
    assert pool()["goodput_per_s"] > 0


def in_flight(system: System, address: str) -> int:
    (found,) = [worker for worker in system.fleet() if worker["address"] == address]
    count: int = found["in_flight"]
    return count


async def until(condition: Any, within_s: float = 10.0) -> None:
    """Wait, and let this process's own requests go on meanwhile."""
    async with asyncio.timeout(within_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)
