from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.pool import Pool
from extproc.fleet.worker import EngineError, LoadReport, Outcome, Worker, WorkerState
from tests.support.builders import join, pool, ready

CALLERS = (EngineError.CLIENT, EngineError.TOO_LONG, EngineError.CLIENT_GONE)
BROKEN = (EngineError.ENGINE_DEAD, EngineError.STREAM, EngineError.OTHER)


def one(now: float = 0.0, **report: object) -> tuple[Pool, Worker]:
    some = pool()
    return some, join(some, 1, now=now, **report)


def score(pool: Pool, worker: Worker, now: float) -> float:
    return float(pool.health.scores(now)[worker.column])


def ended(pool: Pool, worker: Worker, error: EngineError, now: float, status: int = 500) -> None:
    pool.outcome(worker, Outcome("lease", status, error, duration_s=1.0), now)


def settled(pool: Pool, worker: Worker, now: float) -> float:
    """Where the score tends, its rise left out."""
    pool.tick(now)
    return float(pool.table.health_target[worker.column])


class TestScore:
    def test_a_new_worker_starts_low_and_rises_by_15_points_a_second(self) -> None:
        some, worker = one()
        assert [score(some, worker, now) for now in (0, 1, 2, 4, 60)] == [40, 55, 70, 100, 100]

    def test_a_worker_of_the_static_list_is_healthy_from_the_start(self) -> None:
        some = pool(workers=["10.0.0.9:1"])
        (worker,) = some.workers.values()
        assert score(some, worker, 0.0) == 100

    @pytest.mark.parametrize(
        ("report", "loss"),
        [
            ({"waiting": 16.0}, 25.0),
            ({"waiting": 4.0}, 6.25),
            ({"waiting": 100.0}, 25.0),
            ({"kv_usage": 0.9}, 12.5),
            ({"kv_usage": 0.9, "waiting": 4.0}, 12.5),
            ({"kv_usage": 0.8}, 0.0),
            ({"kv_usage": None, "waiting": None}, 0.0),
            ({"signals": {"ttft_s": 2.5}}, 35 * 0.25),
            ({"signals": {"ttft_s": 2.5}, "leases": frozenset()}, 0.0),
        ],
    )
    def test_each_part_costs_its_share(self, report: dict[str, object], loss: float) -> None:
        """LD1: what is not told costs nothing."""
        some, worker = one(**report)
        assert settled(some, worker, 0.0) == pytest.approx(100 - loss)

    def test_a_long_prefill_may_take_its_time(self) -> None:
        some, worker = one(leases=frozenset())
        booking = some.book(worker.column, 20_000, "a", now=0.0)
        some.response_started(booking, 7.5)
        assert some.table.ttft_share[worker.column] == pytest.approx(7.5 / (5 + 10))
        assert some.table.prefill_tokens_per_s[worker.column] == pytest.approx(20_000 / 7.5)

    def test_prefills_in_a_queue_tell_the_rate_all_the_same(self) -> None:
        some, worker = one(leases=frozenset())
        bookings = [some.book(worker.column, 1_000, f"{n}", now=0.0) for n in range(4)]
        for number, booking in enumerate(bookings):
            some.response_started(booking, 0.5 * (number + 1))
        assert some.table.prefill_tokens_per_s[worker.column] == pytest.approx(2_000)

    def test_short_prefills_and_early_headers_tell_no_rate(self) -> None:
        some, worker = one(leases=frozenset())
        some.response_started(some.book(worker.column, 100, "a", now=0.0), 1.0)
        some.response_started(some.book(worker.column, 1_000, "b"), 1.0)
        some.response_started(some.book(worker.column, 1_000, "c", now=1.0), 1.0)
        early, other = one()
        early.response_started(early.book(other.column, 1_000, "a", now=0.0), 1.0)
        for each, column in ((some, worker.column), (early, other.column)):
            assert math.isnan(each.table.prefill_tokens_per_s[column])

    @given(
        errors=st.lists(st.sampled_from(EngineError), max_size=20),
        waiting=st.floats(0, 1e6),
        kv=st.floats(0, 1),
    )
    def test_scores_stay_within_0_and_100(
        self, errors: list[EngineError], waiting: float, kv: float
    ) -> None:
        some, worker = one(waiting=waiting, kv_usage=kv)
        for now, error in enumerate(errors):
            ended(some, worker, error, float(now))
            some.tick(float(now))
            assert 0 <= score(some, worker, now + 0.5) <= 100


class TestErrors:
    @pytest.mark.parametrize("error", CALLERS)
    def test_what_callers_are_to_blame_for_changes_nothing(self, error: EngineError) -> None:
        some, worker = one()
        before = {name: array.copy() for name, array in vars(some.table).items()}
        for _ in range(100):
            ended(some, worker, error, 1.0, status=400)
        for name, array in vars(some.table).items():
            assert np.array_equal(array, before[name], equal_nan=array.dtype.kind == "f"), name

    @pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
    def test_statuses_of_callers_change_nothing(self, status: int) -> None:
        some, worker = one()
        for lease in "abcdef":
            some.response_started(some.book(worker.column, 10, lease), 1.0, status=status)
        ended(some, worker, EngineError.UNKNOWN, 1.0, status=status)
        assert some.table.error_rate[worker.column] == 0

    @pytest.mark.parametrize("error", BROKEN)
    def test_a_worker_that_only_fails_is_the_last_resort_after_four(
        self, error: EngineError
    ) -> None:
        some, worker = one()
        for count in range(1, 5):
            ended(some, worker, error, 1.0)
            assert some.table.last_resort(1.5)[worker.column] == (count == 4)
        assert some.table.suspect_until[worker.column] == 5.0

    def test_saturation_counts_in_full_and_starts_a_cool_down(self) -> None:
        some, worker = one()
        ended(some, worker, EngineError.KV_EXHAUSTED, 1.0, status=429)
        assert some.table.cooling_until[worker.column] == 5.0
        assert settled(some, worker, 1.0) == pytest.approx(60, abs=0.1)
        assert not some.table.last_resort(1.0)[worker.column]

    def test_every_mark_ends_by_itself(self) -> None:
        """HE3."""
        some, worker = one()
        ended(some, worker, EngineError.QUEUE_FULL, 1.0)
        for second in range(2, 60):
            some.report(worker, ready(), float(second))
            some.tick(float(second))
        assert settled(some, worker, 60.0) > 98
        assert score(some, worker, 60.0) > 98

    def test_answers_that_succeed_make_up_for_errors(self) -> None:
        some, worker = one()
        ended(some, worker, EngineError.OTHER, 1.0)
        bad = some.table.error_rate[worker.column]
        ended(some, worker, EngineError.NONE, 1.0, status=200)
        assert some.table.error_rate[worker.column] == pytest.approx(0.8 * bad)

    def test_headers_judge_only_where_no_middleware_speaks(self) -> None:
        some, silent = one()
        spoken = join(some, 2, leases=frozenset())
        for worker in (silent, spoken):
            some.response_started(some.book(worker.column, 1, worker.address), 1.0, status=503)
            some.suspect(worker, 1.0)
        assert some.table.error_rate[silent.column] == pytest.approx(0.36)
        assert some.table.error_rate[spoken.column] == 0

    def test_the_engines_word_goes_before_the_status(self) -> None:
        some, worker = one()
        booking = some.book(worker.column, 1, "a")
        some.response_started(booking, 1.0, status=429, error=EngineError.KV_EXHAUSTED)
        assert some.table.error_rate[worker.column] == 1

    def test_answers_of_a_worker_that_left_or_to_a_request_that_ended_are_no_news(self) -> None:
        some, worker = one()
        booking = some.book(worker.column, 1, "a")
        some.release(booking)
        some.response_started(booking, 1.0, status=503)
        assert some.table.error_rate[worker.column] == 0
        late = some.book(worker.column, 1, "b")
        some.tick(100.0)
        some.response_started(late, 101.0, status=503)
        ended(some, worker, EngineError.OTHER, 101.0)
        assert not some.table.error_rate.any()


class TestProgress:
    def stalled(self, pool: Pool, worker: Worker, now: float) -> bool:
        pool.tick(now)
        return bool(pool.health.stalled(now)[worker.column])

    def hanging(self) -> tuple[Pool, Worker]:
        some, worker = one()
        some.book(worker.column, 2_000, "a", now=10.0)
        return some, worker

    def report(self, pool: Pool, worker: Worker, now: float, **signals: float) -> None:
        pool.report(worker, ready(signals=signals), now)

    def test_a_worker_that_owes_a_first_token_and_does_nothing_stalls(self) -> None:
        """Its health page is fine, and it reports."""
        some, worker = self.hanging()
        for now in (11.0, 12.0, 13.0, 13.9):
            self.report(some, worker, now, generation_tokens_per_s=0.0)
            assert not self.stalled(some, worker, now)
        assert self.stalled(some, worker, 14.1)
        assert some.table.last_resort(14.1)[worker.column]
        assert score(some, worker, 14.1) == 0

    @pytest.mark.parametrize("signal", ["prompt_tokens_per_s", "generation_tokens_per_s"])
    def test_an_engine_whose_counters_move_does_not_stall(self, signal: str) -> None:
        some, worker = self.hanging()
        self.report(some, worker, 13.0, **{signal: 5.0})
        assert not self.stalled(some, worker, 14.1)

    def test_a_known_rate_shortens_the_patience(self) -> None:
        some, worker = self.hanging()
        some.table.prefill_tokens_per_s[worker.column] = 20_000
        assert self.stalled(some, worker, 13.2)

    def test_a_stalled_worker_returns_by_the_ramp(self) -> None:
        some, worker = self.hanging()
        booking = some.book(worker.column, 0, "b", now=11.0)
        assert self.stalled(some, worker, 15.0)
        some.response_started(booking, 20.0)
        some.tick(20.0)
        assert [score(some, worker, now) for now in (20.0, 21.0, 22.0)] == [0, 15, 30]

    def test_a_worker_with_nothing_to_do_never_stalls(self) -> None:
        some, worker = one()
        self.report(some, worker, 1_000.0)
        assert not self.stalled(some, worker, 1_000.0)


def test_a_restarted_engine_is_new_again() -> None:
    some, worker = one(leases=frozenset())
    some.response_started(some.book(worker.column, 1_000, "a", now=0.0), 1.0)
    some.report(worker, LoadReport(WorkerState.DOWN), 50.0)
    some.report(worker, ready(), 51.0)
    assert some.table.joined_at[worker.column] == 50.0
    assert score(some, worker, 51.0) == 55
    assert math.isnan(some.table.prefill_tokens_per_s[worker.column])


def test_the_time_for_an_output_token_is_averaged() -> None:
    some, worker = one(signals={"tpot_s": 0.02})
    some.report(worker, ready(signals={"tpot_s": 0.04}), 1.0)
    some.report(worker, ready(), 2.0)
    assert some.table.tpot_s[worker.column] == pytest.approx(0.024)


class TestComparison:
    """LD1: what is not known is the pool's mean, never zero."""

    def compared(self, name: str, values: list[float], now: float = 0.0) -> list[float]:
        some = pool()
        workers = [join(some, number) for number in range(3)]
        column = {"slowness": "prefill_tokens_per_s", "kv_pressure": "kv_usage"}[name]
        columns = [worker.column for worker in workers]
        getattr(some.table, column)[columns] = values
        some.tick(now)
        return [round(value, 6) for value in getattr(some.table, name)[columns].tolist()]

    def test_a_worker_of_unknown_speed_is_an_average_one(self) -> None:
        assert self.compared("slowness", [1_750.0, math.nan, 250.0]) == [0.571429, 1.0, 4.0]
        assert self.compared("slowness", [math.nan] * 3) == [1.0, 1.0, 1.0]

    def test_small_differences_in_speed_are_noise(self) -> None:
        assert self.compared("slowness", [800.0, 1_000.0, 1_200.0]) == [1.0, 1.0, 1.0]

    def test_a_slow_worker_is_thought_faster_as_time_passes(self) -> None:
        """HE3: without requests nobody would ever find out that it is well again."""
        assert self.compared("slowness", [1_750.0, math.nan, 250.0], now=60.0) == [1.0, 1.0, 1.0]

    def test_slowness_has_a_bound(self) -> None:
        assert self.compared("slowness", [1e6, 1e6, 1.0])[2] == 20.0

    def test_only_kv_use_over_80_percent_presses(self) -> None:
        assert self.compared("kv_pressure", [0.8, 0.9, 1.0]) == [0, 0.5, 1]

    def test_unknown_kv_use_is_neither_full_nor_empty(self) -> None:
        assert self.compared("kv_pressure", [math.nan, 0.9, 1.0]) == [0.75, 0.5, 1]
        assert self.compared("kv_pressure", [math.nan] * 3) == [0, 0, 0]

    def test_an_old_report_fades_into_the_mean(self) -> None:
        mean = (0.8 + 0.8 + 1.0) / 3
        faded = [mean + 0.5 * (value - mean) for value in (0.8, 0.8, 1.0)]
        expected = [round((value - 0.8) / 0.2, 6) for value in faded]
        assert self.compared("kv_pressure", [0.8, 0.8, 1.0], now=1.5) == expected
