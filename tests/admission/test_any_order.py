"""Quotas, turns and queues hold whatever happens, in any order, over two pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.admission.controller import AdmissionController
from extproc.admission.demand import Demand, Lease
from extproc.errors import Contended, QuotaTooSmall, Refusal
from extproc.policy import parse_policy

RULES: list[dict[str, Any]] = [
    {"name": "tenant", "per": ["tenant"], "concurrency": 2, "tokens_in_flight": 5_000},
    {"name": "shared", "tokens_in_flight": 9_000},
    {
        "name": "batch",
        "match": {"lanes": ["batch"]},
        "concurrency": 2,
        "tokens_in_flight": 3_000,
        "tighten_to": 0.5,
    },
    {
        "name": "online",
        "match": {"lanes": ["online"]},
        "concurrency": 4,
        "borrow_from": ["batch"],
    },
    {"name": "nobody-queues", "match": {"tenants": ["t3"]}, "concurrency": 1, "max_queue": 0},
    {
        "name": "rates",
        "match": {"tenants": ["t0"]},
        "requests_per_minute": 60,
        "tokens_per_minute": 60_000,
    },
]
SLOTS = {"a": 4, "b": 3}


def policy_of(shared_tokens: int) -> Any:
    rules = [rule | {} for rule in RULES]
    rules[1]["tokens_in_flight"] = shared_tokens
    limits = {"max_concurrency": 6, "max_queue": 20, "max_queue_time_s": 30.0}
    return parse_policy(
        {
            "pools": [{"model": name, "admission": limits} for name in SLOTS],
            "admission": {"rules": rules},
        }
    )


class AdmissionMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now = 0.0
        policy = policy_of(9_000)
        self.admission = AdmissionController(policy.admission, policy.pools, 0.0)
        self.running: dict[str, Lease] = {}
        self.waiting: dict[str, Demand] = {}
        self.ended: list[Lease] = []
        self.told: list[tuple[Demand, float]] = []
        self.received = self.answered = 0

    # What happens

    @rule(
        pool=st.sampled_from(sorted(SLOTS)),
        name=st.sampled_from(["base", "lora"]),
        tenant=st.integers(0, 4),
        lane=st.sampled_from(["online", "batch"]),
        uncached=st.sampled_from([0, 10, 300, 2_500, 9_500]),
        output=st.sampled_from([1, 100]),
        deadline_s=st.sampled_from([None, 0.0, 2.0]),
    )
    def arrive(self, deadline_s: float | None, **facts: Any) -> None:
        self.ask(
            Demand(
                id="",
                pool=facts["pool"],
                name=facts["name"],
                adapter="" if facts["name"] == "base" else facts["name"],
                tenant=f"t{facts['tenant']}",
                tenant_class="default",
                lane=facts["lane"],
                weight=1.0 + facts["tenant"],
                uncached_tokens=facts["uncached"],
                output_tokens=facts["output"],
                arrived_at=self.now,
                fingerprint=self.received + 1,
                deadline_at=None if deadline_s is None else self.now + deadline_s,
            )
        )

    @precondition(lambda self: self.told)
    @rule(data=st.data(), late_s=st.sampled_from([-0.5, 0.0, 1.0, 30.0]))
    def come_back(self, data: st.DataObject, late_s: float) -> None:
        """A refused client tries again: too early, as told, late, or much too late."""
        number = data.draw(st.integers(0, len(self.told) - 1))
        demand, told_s = self.told.pop(number)
        self.now = max(self.now, demand.arrived_at + told_s + late_s)
        self.settle_down()
        limit_s = None if demand.deadline_at is None else demand.deadline_at - demand.arrived_at
        self.ask(
            replace(
                demand,
                arrived_at=self.now,
                sequence=0,
                deadline_at=None if limit_s is None else self.now + limit_s,
                comebacks=0,
                parked_at=None,
                blocked_by="",
            )
        )

    def ask(self, demand: Demand) -> None:
        self.received += 1
        demand.id = str(self.received)
        try:
            lease = self.admission.admit(demand, self.has_room, self.now)
        except (Contended, QuotaTooSmall) as refusal:
            self.admission.promise(demand, refusal, demand.lane, self.now)
            self.refused(refusal)
            if refusal.retry_after_s is not None:
                self.told.append((demand, refusal.retry_after_s))
        else:
            if lease is None:
                self.waiting[demand.id] = demand
            else:
                self.begun(lease)
        self.settle_down()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), actual=st.none() | st.integers(0, 6_000))
    def end(self, data: st.DataObject, actual: int | None) -> None:
        lease = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.admission.release(lease, self.now)
        if actual is not None:
            self.admission.settle(lease, actual)
        self.ended.append(lease)
        self.answered += 1
        self.settle_down()

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        before = self.counts()
        self.admission.release(data.draw(st.sampled_from(self.ended)), self.now)
        assert self.counts() == before

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        demand = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        assert self.admission.leave(demand, self.now)
        assert not self.admission.leave(demand, self.now)
        self.answered += 1
        self.settle_down()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 5.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.admission.tick(self.now)
        self.settle_down()

    @rule(shared_tokens=st.sampled_from([2_000, 9_000, 20_000]))
    def reload(self, shared_tokens: int) -> None:
        policy = policy_of(shared_tokens)
        self.admission.reload(policy.admission, policy.pools, self.now)
        self.settle_down()

    # What is checked on the way

    def refused(self, refusal: Refusal) -> None:
        assert refusal.reason
        assert (refusal.retry_after_s is not None) == refusal.retryable
        self.answered += 1

    def settle_down(self) -> None:
        """What the scheduler does after every event."""
        for demand, refusal in self.admission.expired(self.now):
            assert refusal.retry_after_s is not None
            self.told.append((demand, refusal.retry_after_s))
            del self.waiting[demand.id]
            self.answered += 1
        progress = True
        while progress:
            progress, claimed = False, self.admission.claimed()
            for pool in SLOTS:
                while lease := self.admission.next_waiting(pool, self.has_room, self.now):
                    del self.waiting[lease.id]
                    self.begun(lease)
                    progress = True
            progress = progress or not claimed <= self.admission.claimed()

    def begun(self, lease: Lease) -> None:
        """At admission no limit was exceeded, and nobody of its kind was passed."""
        self.running[lease.id] = lease
        mine = lease.demand
        assert mine.deadline_at is None or mine.deadline_at >= self.now
        for holding in lease.holdings:
            counter = holding.counter
            assert counter.requests + counter.lent_requests <= counter.rule.concurrency
            assert counter.tokens + counter.lent_tokens <= counter.rule.tokens_in_flight
        if mine.sequence and not mine.returned:
            assert not self.elders(mine)

    def line(self, demand: Demand) -> tuple[Any, ...]:
        return (demand.pool, demand.tenant, demand.lane, demand.kind)

    def elders(self, demand: Demand) -> list[Demand]:
        """Those of its tenant, lane and kind that go first: who came back as told, then who
        came earlier."""
        return [
            other
            for other in self.waiting.values()
            if self.line(other)[:3] == self.line(demand)[:3]
            and other.kind in demand.elder_kinds
            and (other.kind != demand.kind or other.sequence < demand.sequence)
        ]

    def has_room(self, demand: Demand) -> bool:
        used = sum(lease.demand.pool == demand.pool for lease in self.running.values())
        return used < SLOTS[demand.pool]

    def counts(self) -> list[tuple[int, ...]]:
        return [
            (
                counter.requests,
                counter.tokens,
                counter.lent_requests,
                counter.lent_tokens,
                counter.waiting,
                counter.waiting_tokens,
                counter.waiting_bytes,
            )
            for _, rule_ in self.admission.rules()
            for counter in rule_.counters.values()
        ]

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.received == self.answered + len(self.waiting) + len(self.running)
        assert self.admission.running == len(self.running)
        assert self.admission.waiting == len(self.waiting)

    @invariant()
    def places_are_counted(self) -> None:
        """Work that may come back is that of the places kept."""
        for pool in self.admission.pools.values():
            places = pool.returns.places
            for lane in pool.queue.lanes:
                work = sum(place.cost_tokens for place in places if place.lane == lane)
                assert pool.returns.tokens(lane) == pytest.approx(pool.returns.share * work)
            assert pool.returns.share >= 0.0

    @invariant()
    def no_counter_is_negative(self) -> None:
        assert all(min(counts) >= 0 for counts in self.counts())

    @invariant()
    def who_waits_lacks_something(self) -> None:
        """Work conserving: quota, room, an elder's turn, or a large request's claim."""
        for demand in self.waiting.values():
            kind, _, _ = demand.blocked_by.partition(":")
            assert kind in ("quota", "capacity")
            blocked = any(
                counter.claimed or counter.block(demand.cost_tokens, self.now)
                for counter in demand.counters
            )
            assert self.elders(demand) or blocked or not self.has_room(demand)

    def teardown(self) -> None:
        if not hasattr(self, "admission"):
            return
        for lease in self.running.values():
            self.admission.release(lease, self.now)
        for demand in list(self.waiting.values()):
            self.admission.leave(demand, self.now)
        assert all(not any(counts) for counts in self.counts())


TestAnyOrder = AdmissionMachine.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=50)
