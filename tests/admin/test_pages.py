"""The admin API, page by page, over a scheduler whose time the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp.test_utils import TestClient, TestServer

from extproc.admin.context import Admin
from extproc.admin.http import admin_app
from extproc.control import FleetService
from extproc.desk import Desk
from extproc.policy import load_policy
from extproc.reload import PolicyReloader
from extproc.request.identity import Identity
from tests.support.builders import MODEL, Fleet, address, prompt_keys, ready
from tests.support.builders import profile as profile_of
from tests.support.scheduler_api import Clock, desk_of

QUEUES, SCALING, RELOAD = "/api/v1/queues", "/api/v1/scaling", "/api/v1/policy/reload"


class Pages:
    """An admin application; two workers with two slots each unless a test says otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fleet = Fleet(workers=2, slots=2)
        self.clock = Clock()
        self.desk: Desk = desk_of(self.fleet.scheduler, self.clock)
        self.state = "ready"
        scheduler, metrics = self.desk.scheduler, self.desk.metrics
        metrics.watch(scheduler, self.clock)
        admin = Admin(
            scheduler=scheduler,
            metrics=metrics,
            fleet=FleetService(
                scheduler, scheduler.policy.reports, metrics, self.clock, self.desk.wake
            ),
            reloader=PolicyReloader(path, self.desk),
            readiness=lambda: self.state,
            clock=self.clock,
        )
        self.client = TestClient(TestServer(admin_app(admin)))

    def write(self, *, pool: Any = (), **policy: Any) -> None:
        digest = {"capacity_blocks": 500, "error_rate": 0.001}
        document = {
            "pools": [{"model": MODEL, "block_size_tokens": 4, "digest": digest, **dict(pool)}],
            **policy,
        }
        self.path.write_text(yaml.safe_dump(document))

    def adopt(self, **policy: Any) -> None:
        self.write(**policy)
        self.desk.adopt(load_policy(self.path))

    def tick(self, now: float) -> None:
        self.clock.now = now
        for worker in self.fleet.workers:
            self.fleet.scheduler.report(self.fleet.served, worker, ready(kv_usage=0.5), now)
        self.fleet.scheduler.tick(now)

    async def get(self, path: str) -> Any:
        response = await self.client.get(path)
        assert response.status == 200
        return await response.json()


@pytest.fixture
async def pages(tmp_path: Path) -> AsyncIterator[Pages]:
    made = Pages(tmp_path / "policy.yaml")
    async with made.client:
        yield made


class TestQueues:
    async def test_lanes_show_what_waits_and_since_when(self, pages: Pages) -> None:
        keys = prompt_keys([1] * 8)
        for number in range(6):
            lane = "batch" if number == 5 else "online"
            identity = Identity(lane=lane, tenant=f"t{number % 2}")
            pages.fleet.arrive(keys, now=float(number), profile=profile_of(identity=identity))
        pages.clock.now = 10.0
        page = await pages.get(QUEUES)
        assert page["admission"] == "on"
        pool = page["pools"][MODEL]
        assert (pool["running"], pool["waiting"]) == (4, 2)
        assert pool["oldest_wait_s"] == 6.0
        online, batch = pool["lanes"]["online"], pool["lanes"]["batch"]
        assert (online["waiting"], online["tenants"], online["oldest_wait_s"]) == (1, 1, 6.0)
        assert (batch["waiting"], batch["oldest_wait_s"], batch["priority"]) == (1, 5.0, 1)
        assert online["waiting_tokens"] > 0

    async def test_rules_show_limits_use_and_who_uses_most(self, pages: Pages) -> None:
        rule = {
            "name": "tenants",
            "per": ["tenant"],
            "concurrency": 3,
            "tokens_per_minute": 1e6,
            "max_queue": 5,
        }
        pages.adopt(admission={"rules": [rule]})
        for tenant, requests in (("small", 1), ("large", 3)):
            for _ in range(requests):
                identity = Identity(tenant=tenant)
                pages.fleet.arrive(profile=profile_of(identity=identity))
        own, shown = (await pages.get(QUEUES))["rules"]
        assert (own["rule"], own["pool"], own["counters"]) == ("pool", MODEL, 1)
        assert own["busiest"][0]["requests"] == 4
        assert (shown["rule"], shown["pool"], shown["per"]) == ("tenants", None, ["tenant"])
        assert shown["limits"]["concurrency"] == 3
        assert shown["limits"]["tokens_in_flight"] is None
        assert shown["limits"]["tokens_per_minute"] == 1e6
        assert shown["tightness"] == 1.0
        busiest = [(each["of"]["tenant"], each["requests"]) for each in shown["busiest"]]
        assert busiest == [("large", 3), ("small", 1)]

    async def test_leases_are_counted_by_their_end(self, pages: Pages) -> None:
        ticket = pages.fleet.arrive()
        pages.fleet.scheduler.finish(ticket, 0.0)
        freed = (await pages.get(QUEUES))["pools"][MODEL]["leases_freed"]
        assert freed == {"ended": 1, "absent": 0, "unseen": 0, "worker_lost": 0, "silent": 0}


class TestScaling:
    async def test_a_full_pool_wants_more_workers_and_says_why(self, pages: Pages) -> None:
        for _ in range(6):
            pages.fleet.arrive()
        pages.tick(1.5)
        page = await pages.get(SCALING)
        assert (page["scaling"], page["acts"]) == ("on", True)
        pool = page["pools"][MODEL]
        assert (pool["ready"], pool["running"], pool["waiting"]) == (2, 4, 2)
        assert pool["desired"] == {"workers": 4, "reason": "requests"}
        assert (pool["oldest_wait_s"], pool["kv_usage"]) == (1.5, 0.5)
        assert pool["backlog_tokens"] > 0
        assert await self.metric(pages) == 4.0

    async def test_in_shadow_it_is_shown_and_marked_and_no_metric(self, pages: Pages) -> None:
        pages.adopt(rollout={"scaling": "shadow"})
        pages.tick(1.5)
        page = await pages.get(SCALING)
        assert (page["scaling"], page["acts"]) == ("shadow", False)
        assert page["pools"][MODEL]["desired"] == {"workers": 2, "reason": "kv_usage"}
        assert await self.metric(pages) is None

    async def test_off_there_is_no_number(self, pages: Pages) -> None:
        pages.tick(1.5)
        pages.adopt(rollout={"scaling": "off"})
        pages.tick(3.0)
        page = await pages.get(SCALING)
        assert (page["scaling"], page["acts"]) == ("off", False)
        assert page["pools"][MODEL]["desired"] is None
        assert page["pools"][MODEL]["ready"] == 2

    async def metric(self, pages: Pages) -> float | None:
        text = await (await pages.client.get("/metrics")).text()
        name = f'kvgate_desired_workers{{model="{MODEL}"}} '
        found = [line for line in text.splitlines() if line.startswith(name)]
        return float(found[0].removeprefix(name)) if found else None


class TestReload:
    async def test_it_says_what_came_of_it(self, pages: Pages) -> None:
        pages.write(pool={"admission": {"max_concurrency": 7}})
        response = await pages.client.post(RELOAD)
        told = await response.json()
        assert (response.status, told["result"]) == (200, "applied")
        assert told["policy"] == (await pages.get("/api/v1/workers"))["policy"]
        assert (await (await pages.client.post(RELOAD)).json())["result"] == "unchanged"

    async def test_a_bad_file_is_said_to_be_bad(self, pages: Pages) -> None:
        pages.write(pool={"admission": {"max_concurrency": 0}})
        response = await pages.client.post(RELOAD)
        assert response.status == 422
        message = (await response.json())["error"]["message"]
        assert "pools.0.admission.max_concurrency" in message


class TestWorkers:
    async def test_the_fleet_is_listed(self, pages: Pages) -> None:
        page = await pages.get("/api/v1/workers")
        assert [worker["address"] for worker in page["pools"][MODEL]] == [address(0), address(1)]

    @pytest.mark.parametrize(
        ("order", "status"),
        [("drain", 404), ("drain?deadline_s=x", 400), ("drain?deadline_s=-1", 400),
         ("resume", 404)],
    )  # fmt: skip
    async def test_orders_that_nobody_can_take(self, pages: Pages, order: str, status: int) -> None:
        response = await pages.client.post(f"/api/v1/workers/{address(0)}/{order}")
        assert response.status == status
        assert (await response.json())["error"]["message"]


async def test_readiness_is_the_schedulers(pages: Pages) -> None:
    for state, status in (("ready", 200), ("degraded", 200), ("shutting down", 503)):
        pages.state = state
        response = await pages.client.get("/readyz")
        assert (response.status, await response.text()) == (status, f"{state}\n")
    assert (await pages.client.get("/livez")).status == 200
