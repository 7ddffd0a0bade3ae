"""Rules: what they match, count, lend and give back. AD1 of every limit: below, at, above."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from extproc.admission import quotas
from extproc.decision.ticket import Ticket
from extproc.errors import QueueFull, QuotaTooSmall, Refusal, WouldWait
from tests.support.crowd import Crowd, request


def crowd(*rules: dict[str, Any], **changes: Any) -> Crowd:
    return Crowd(slots=64, admission={"rules": list(rules)}, **changes)


def runs(made: Refusal | Ticket) -> bool:
    return isinstance(made, Ticket) and made.decision is not None


class TestLimits:
    """AD1: one below, at, and one above each limit."""

    @pytest.mark.parametrize(
        ("limit", "tokens", "fit"),
        [
            ({"concurrency": 3}, 90, 3),
            ({"tokens_in_flight": 300}, 90, 3),
            ({"tokens_in_flight": 299}, 90, 2),
            ({"requests_per_minute": 18, "burst_s": 10}, 90, 3),
            ({"tokens_per_minute": 1_800, "burst_s": 10}, 90, 3),
            ({"tokens_per_minute": 1_799, "burst_s": 10}, 90, 2),
        ],
        ids=str,
    )
    def test_as_many_run_as_the_limit_says(
        self, limit: dict[str, Any], tokens: int, fit: int
    ) -> None:
        some = crowd({"name": "r", **limit})
        made = [some.send(request(), tokens) for _ in range(fit + 2)]
        assert [each.decision is not None for each in made] == [True] * fit + [False] * 2
        assert made[-1].demand is not None
        assert made[-1].demand.blocked_by == "quota:r"

    def test_the_pools_own_limit_is_a_rule_too(self) -> None:
        some = crowd(pool={"max_concurrency": 2})
        made = [some.send(request(), 10) for _ in range(3)]
        assert made[2].demand is not None
        assert made[2].demand.blocked_by == "quota:pool"

    def test_the_queue_of_a_rule_is_bounded(self) -> None:
        some = crowd({"name": "r", "concurrency": 1, "max_queue": 2})
        made = [some.try_send(request(), 10) for _ in range(4)]
        assert isinstance(made[2], Ticket)
        refusal = made[3]
        assert isinstance(refusal, QueueFull)
        assert refusal.reason == "quota:r"
        some.leave(made[1] if isinstance(made[1], Ticket) else pytest.fail("it waits"))
        assert isinstance(some.try_send(request(), 10), Ticket)

    def test_a_queue_of_zero_never_queues(self) -> None:
        some = crowd({"name": "r", "concurrency": 1, "max_queue": 0})
        assert runs(some.try_send(request(), 10))
        assert isinstance(some.try_send(request(), 10), QueueFull)
        assert some.scheduler.admission.waiting == 0

    def test_the_bodies_that_wait_are_bounded(self) -> None:
        """AD1: ten bodies of 200 KB and one of 2 MB against 1 MB."""
        some = crowd(pool={"max_concurrency": 1, "max_queue_bytes": 1_000_000})
        assert runs(some.try_send(request(), 10))
        made = [some.try_send(request(body_bytes=200_000), 10) for _ in range(10)]
        assert [isinstance(each, Ticket) for each in made] == [True] * 5 + [False] * 5
        assert isinstance(some.try_send(request(body_bytes=2_000_000), 10), QueueFull)
        some.leave(made[0] if isinstance(made[0], Ticket) else pytest.fail("it waits"))
        assert isinstance(some.try_send(request(body_bytes=200_000), 10), Ticket)
        assert some.scheduler.admission.pools["sim"].waiting_bytes == 1_000_000

    def test_a_request_larger_than_the_limit_is_refused_at_once(self) -> None:
        """AD1: not queued for ever."""
        some = crowd({"name": "r", "tokens_in_flight": 1_000})
        refusal = some.try_send(request(), 1_000)
        assert isinstance(refusal, QuotaTooSmall)
        assert (refusal.http_status, refusal.retryable, refusal.reason) == (413, False, "quota:r")
        assert runs(some.try_send(request(), 990))

    def test_a_request_larger_than_the_bucket_runs_when_that_is_full(self) -> None:
        some = crowd({"name": "r", "tokens_per_minute": 6_000, "burst_s": 1})
        assert runs(some.try_send(request(), 1_990))
        late = some.send(request(), 90)
        some.run_until(18.9)
        assert late.decision is None, "the debt of 1,900 tokens takes 19 seconds"
        some.run_until(20.2)
        assert late.decision is not None


class TestMatching:
    RULE = {"name": "r", "concurrency": 1}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("match", "other"),
        [
            ({"tenants": ["t"]}, request("other")),
            ({"lanes": ["online"]}, request(lane="batch")),
            ({"tenant_classes": ["default"]}, request(tenant_class="gold")),
        ],
        ids=str,
    )
    def test_only_what_matches_is_counted(self, match: dict[str, Any], other: Any) -> None:
        some = crowd(self.RULE | {"match": match}, tenant_classes=[{"name": "default"}])
        assert runs(some.try_send(request(), 10))
        assert not runs(some.try_send(request(), 10))
        assert runs(some.try_send(other, 10))

    def test_adapters_are_told_apart(self) -> None:
        some = crowd(self.RULE | {"match": {"adapters": ["lora"]}})
        assert runs(some.try_send(request(model="lora"), 10))
        assert not runs(some.try_send(request(model="lora"), 10))
        assert runs(some.try_send(request(), 10))

    def test_per_counts_each_value_apart(self) -> None:
        some = crowd(self.RULE | {"per": ["tenant", "lane"]})
        for tenant in "ab":
            for lane in ("online", "batch"):
                assert runs(some.try_send(request(tenant, lane), 10))
                assert not runs(some.try_send(request(tenant, lane), 10))

    def test_a_hundred_thousand_tenants_leave_nothing_behind(self) -> None:
        """QU1: idle counters are removed in the end."""
        some = crowd(self.RULE | {"per": ["tenant"]})
        rule = next(rule for _, rule in some.scheduler.admission.rules() if rule.name == "r")
        for number in range(3_000):
            some.leave(some.send(request(f"t{number}"), 10))
        assert len(rule.counters) == 3_000
        for tick in range(30):
            some.scheduler.tick(1.0 + tick)
        assert len(rule.counters) == 0

    def test_counters_are_bounded_and_those_in_use_stay(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(quotas, "MAX_COUNTERS", 10)
        some = crowd({"name": "r", "per": ["tenant"], "requests_per_minute": 60, "burst_s": 60})
        busy = some.send(request("busy"), 10)
        for number in range(50):
            some.leave(some.send(request(f"t{number}"), 10))
        rule = next(rule for _, rule in some.scheduler.admission.rules() if rule.name == "r")
        assert len(rule.counters) == 10
        assert ("busy",) in rule.counters
        some.leave(busy)


class TestAllOrNothing:
    def test_nothing_is_taken_where_one_rule_lacks_room(self) -> None:
        some = crowd(
            {"name": "wide", "concurrency": 10},
            {"name": "narrow", "match": {"tenants": ["t"]}, "concurrency": 1},
        )
        for _ in range(4):
            some.send(request(), 10)
        used = {rule.name: rule.counters for _, rule in some.scheduler.admission.rules()}
        assert used["wide"][()].requests == 1
        assert runs(some.try_send(request("other"), 10))

    def test_everything_comes_back(self) -> None:
        some = crowd(
            {"name": "a", "concurrency": 2, "tokens_in_flight": 5_000},
            {"name": "b", "per": ["tenant"], "concurrency": 1},
        )
        for number in range(60):
            some.try_send(request(f"t{number % 3}"), 50 * number)
        some.run_until(60.0)
        for _, rule in some.scheduler.admission.rules():
            for counter in rule.counters.values():
                assert (counter.requests, counter.tokens) == (0, 0)
                assert (counter.waiting, counter.waiting_tokens) == (0, 0)


class TestBorrowing:
    RULES = (
        {"name": "batch", "match": {"lanes": ["batch"]}, "concurrency": 4, "lend_share": 0.5},
        {
            "name": "online",
            "match": {"lanes": ["online"]},
            "concurrency": 2,
            "borrow_from": ["batch"],
        },
    )

    def test_idle_quota_is_lent_up_to_its_share(self) -> None:
        some = crowd(*self.RULES)
        made = [some.send(request(), 10) for _ in range(5)]
        assert [each.decision is not None for each in made] == [True] * 4 + [False]

    def test_what_is_lent_is_not_the_lenders(self) -> None:
        some = crowd(*self.RULES)
        online = [some.send(request(), 10) for _ in range(4)]
        batch = [some.send(request(lane="batch"), 10) for _ in range(3)]
        assert [each.decision is not None for each in batch] == [True, True, False]
        some.leave(online[-1])
        assert batch[2].decision is not None, "the loan went back"

    def test_quota_in_use_is_not_lent(self) -> None:
        some = crowd(*self.RULES)
        for _ in range(4):
            some.send(request(lane="batch"), 10)
        made = [some.send(request(), 10) for _ in range(3)]
        assert [each.decision is not None for each in made] == [True, True, False]

    def test_tokens_are_borrowed_in_part(self) -> None:
        some = crowd(
            {"name": "batch", "match": {"lanes": ["batch"]}, "tokens_in_flight": 1_000},
            {
                "name": "online",
                "match": {"lanes": ["online"]},
                "tokens_in_flight": 500,
                "borrow_from": ["batch"],
            },
        )
        large = some.send(request(), 1_190)
        assert large.decision is not None
        assert not runs(some.try_send(request(lane="batch"), 390))
        some.leave(large)
        assert isinstance(some.try_send(request(), 1_500), QuotaTooSmall)


class TestPressure:
    RULES = (
        {
            "name": "batch",
            "match": {"lanes": ["batch"]},
            "concurrency": 16,
            "tighten_to": 0.25,
        },
    )

    def tightness(self, some: Crowd) -> float:
        return next(r.tightness for _, r in some.scheduler.admission.rules() if r.name == "batch")

    def test_batch_gives_way_while_online_waits_and_comes_back(self) -> None:
        pressure = {"tighten_above_s": 1.0, "loosen_below_s": 0.2, "step_s": 1.0}
        some = Crowd(admission={"rules": list(self.RULES), "pressure": pressure})
        feed = some.keep_waiting(("a", "online", 2_000, 60), ("b", "batch", 2_000, 20))
        feed()
        some.run_until(20.0, feed)
        assert self.tightness(some) == pytest.approx(0.25)
        some.run_until(60.0)
        assert some.scheduler.admission.waiting == 0
        some.run_until(70.0)
        assert self.tightness(some) == 1.0

    def test_steps_keep_their_distance(self) -> None:
        pressure = {"tighten_above_s": 1.0, "loosen_below_s": 0.2, "step_s": 4.0}
        some = Crowd(admission={"rules": list(self.RULES), "pressure": pressure})
        feed = some.keep_waiting(("a", "online", 4_000, 60))
        feed()
        seen = []

        def watch() -> None:
            feed()
            seen.append((some.now, self.tightness(some)))

        some.run_until(20.0, watch)
        steps = [now for (_, before), (now, after) in pairwise(seen) if after != before]
        assert len(steps) >= 3
        assert all(b - a >= 3.9 for a, b in pairwise(steps))


class TestEviction:
    def test_a_lane_that_can_wait_gives_up_its_place(self) -> None:
        some = crowd(pool={"max_concurrency": 1, "max_queue": 3})
        some.send(request(), 10)
        batch = [some.send(request(lane="batch"), 10) for _ in range(3)]
        online = some.send(request(), 10)
        some.run_until(0.06)
        assert [ticket.refusal is not None for ticket in batch] == [False, False, True]
        refusal = batch[2].refusal
        assert refusal is not None
        assert (refusal.code, refusal.reason) == ("queue_full", "quota:pool")
        assert refusal.retry_after_s
        assert online.demand is not None

    def test_nobody_of_the_same_lane_is_evicted(self) -> None:
        some = crowd(pool={"max_concurrency": 1, "max_queue": 1})
        some.send(request(), 10)
        some.send(request(), 10)
        assert isinstance(some.try_send(request(), 10), QueueFull)
        assert isinstance(some.try_send(request(lane="batch"), 10), QueueFull)


def test_a_request_that_does_not_wait_is_told_at_once() -> None:
    some = crowd({"name": "r", "concurrency": 1})
    some.send(request(), 10)
    refusal = some.try_send(request(max_queue_time_s=0.0), 10)
    assert isinstance(refusal, WouldWait)
    assert (refusal.reason, refusal.http_status) == ("quota:r", 429)
    assert refusal.retry_after_s
