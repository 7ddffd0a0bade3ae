"""The small parts: rates, buckets, estimates, service level, scaling, lateness."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.drain_rate import DrainRate
from extproc.admission.lateness import Lateness
from extproc.admission.rate_bucket import RateBucket
from extproc.admission.scaling import DesiredWorkers, PoolSignals, desire
from extproc.admission.service_level import ServiceLevel
from extproc.admission.work import WorkEstimator
from extproc.policy import ScalingPolicy


class TestDrainRate:
    @pytest.mark.parametrize("per_s", [0.5, 20.0])
    def test_a_steady_flow_is_its_own_rate_from_the_start_on(self, per_s: float) -> None:
        rate = DrainRate()
        rate.resume(0.0)
        for number in range(1, int(60 * per_s)):
            rate.add(100.0, number / per_s)
            if number / per_s > 4.0:
                assert rate.per_s(number / per_s) == pytest.approx(100.0 * per_s, rel=0.35)

    def test_idle_time_does_not_slow_it_down(self) -> None:
        rate = DrainRate()
        rate.resume(0.0)
        for number in range(100):
            rate.add(10.0, number * 0.1)
        rate.pause(10.0)
        before = rate.per_s(10.0)
        assert rate.per_s(1_000.0) == before
        rate.resume(1_000.0)
        rate.resume(1_005.0)
        later = rate.per_s(1_010.0)
        assert before is not None
        assert later is not None
        assert later < before

    def test_nothing_seen_tells_nothing(self) -> None:
        rate = DrainRate()
        rate.pause(1.0)
        assert rate.per_s(5.0) is None


class TestRateBucket:
    @given(
        st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400)), max_size=60),
        st.integers(60, 6_000),
        st.floats(1, 30),
    )
    def test_over_any_time_no_more_than_rate_and_burst_and_one(
        self, asks: list[tuple[float, int]], per_minute: int, burst_s: float
    ) -> None:
        bucket = RateBucket(per_minute, burst_s, 0.0)
        now, taken = 0.0, 0
        for pause_s, amount in asks:
            now += pause_s
            if bucket.has(amount, now):
                bucket.take(amount, now)
                taken += amount
                assert taken <= per_minute / 60 * now + bucket.capacity + amount + 1e-6

    def test_the_wait_it_tells_is_the_wait_it_takes(self) -> None:
        bucket = RateBucket(60, 10, 0.0)
        bucket.take(10, 0.0)
        wait_s = bucket.wait_s(4, 0.0)
        assert wait_s == pytest.approx(4.0)
        assert not bucket.has(4, wait_s - 0.01)
        assert bucket.has(4, wait_s)
        assert not bucket.full(wait_s)

    def test_corrections_pay_back_at_most_to_full(self) -> None:
        bucket = RateBucket(60, 10, 0.0)
        bucket.take(4, 0.0)
        bucket.correct(-9)
        assert bucket.level == 10
        bucket.correct(15)
        assert bucket.level == -5

    def test_other_limits_go_on_at_the_same_part(self) -> None:
        bucket, wider = RateBucket(60, 10, 0.0), RateBucket(600, 10, 0.0)
        bucket.take(5, 0.0)
        wider.adopt(bucket, 0.0)
        assert wider.level == 50


class TestWork:
    def test_it_learns_by_pool_lane_and_size(self) -> None:
        work = WorkEstimator(256)
        for _ in range(30):
            work.observe("a", "online", 1_000, 40)
            work.observe("a", "batch", 1_000, 900)
        assert work.output_tokens("a", "online", 900, None) == 40
        assert work.output_tokens("a", "batch", 600, None) == 900
        for unseen in (("b", "online", 900), ("a", "online", 90)):
            assert work.output_tokens(*unseen, None) == 256
        assert work.output_tokens("a", "batch", 900, 100) == 100

    def test_it_follows_a_change(self) -> None:
        work = WorkEstimator(256)
        for tokens in [100] * 200 + [1_000] * 100:
            work.observe("a", "l", 10, tokens)
        assert work.output_tokens("a", "l", 10, None) > 950


class TestLateness:
    def test_few_first_tokens_come_after_the_margin(self) -> None:
        import random

        rng = random.Random(3)
        late = Lateness()
        assert late.margin_s == 0.0
        beyond = 0
        for number in range(2_000):
            actual_s = 0.1 + rng.expovariate(1 / 0.15)
            beyond += number > 100 and actual_s > 0.1 + late.margin_s
            late.observe(0.1, actual_s)
        assert 0.03 < beyond / 1_900 < 0.07

    def test_early_ones_make_no_negative_margin(self) -> None:
        late = Lateness()
        for _ in range(50):
            late.observe(1.0, 0.2)
        assert late.margin_s == 0.0


class TestServiceLevel:
    def test_shares_and_rates(self) -> None:
        level = ServiceLevel()
        assert (level.violation_rate(0.0), level.goodput_per_s(0.0)) == (0.0, 0.0)
        for second in range(600):
            level.first_token(0.2, 1.0, second)
            level.first_token(2.0, 1.0, second)
            level.first_token(9.0, None, second)
            level.ended_well(second)
        assert level.violation_rate(600.0) == pytest.approx(1 / 3)
        assert level.goodput_per_s(600.0) == pytest.approx(1.0, rel=0.05)
        assert level.goodput_per_s(1_000.0) < 0.01


CALM = PoolSignals(
    ready=4,
    slots=16.0,
    running=20,
    waiting=0,
    expected_wait_s=0.0,
    oldest_wait_s=0.0,
    backlog_tokens=0,
    kv_usage=0.3,
    ttft_violation_rate=0.0,
    goodput_per_s=5.0,
)
POLICY = ScalingPolicy(min_workers=2, max_workers=10)


class TestScaling:
    @pytest.mark.parametrize(
        ("change", "workers", "reason"),
        [
            ({}, 2, "warm_floor"),
            ({"running": 0, "kv_usage": None}, 2, "warm_floor"),
            ({"running": 64}, 5, "requests"),
            ({"running": 60, "waiting": 30}, 7, "requests"),
            ({"kv_usage": 0.95}, 5, "kv_usage"),
            ({"expected_wait_s": 5.0}, 2, "warm_floor"),
            ({"expected_wait_s": 6.0}, 7, "wait"),
            ({"expected_wait_s": 600.0}, 8, "wait"),
            ({"ttft_violation_rate": 0.06}, 5, "ttft"),
            ({"ready": 9, "expected_wait_s": 60.0}, 10, "ceiling"),
            ({"ready": 0, "slots": 0.0, "running": 0, "waiting": 50}, 2, "warm_floor"),
        ],
        ids=str,
    )
    def test_what_asks_for_how_many(
        self, change: dict[str, float], workers: int, reason: str
    ) -> None:
        made = desire(replace(CALM, **change), POLICY)
        assert (made.workers, made.reason) == (workers, reason)

    def test_up_at_once_and_down_after_a_while(self) -> None:
        follow, busy = DesiredWorkers(), replace(CALM, running=100)
        assert follow.update(busy, POLICY, 0.0).workers == 8
        assert follow.update(replace(CALM, running=60), POLICY, 10.0).reason == "scale_in_delay"
        late = follow.update(CALM, POLICY, 305.0)
        assert (late.workers, late.reason) == (5, "scale_in_delay")
        assert follow.update(CALM, POLICY, 320.0).workers == 2
        assert follow.update(busy, POLICY, 321.0).workers == 8
