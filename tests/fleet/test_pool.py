from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.cache.digest import DigestShape
from extproc.errors import DigestError
from extproc.fleet.pool import Pool
from extproc.fleet.table import ALWAYS, NEVER
from extproc.fleet.worker import Booking, Introduction, LoadReport, Tier, Worker, WorkerState
from extproc.policy import ReportPolicy
from tests.support.builders import (
    MODEL,
    address,
    delta,
    hello,
    join,
    keys_of,
    no_keys,
    pool,
    ready,
    snapshot,
    text_blocks,
)

X = keys_of(text_blocks(1, 6))
Y = keys_of(text_blocks(2, 6))


def held(pool: Pool, worker: Worker, keys: object = X) -> int:
    return int(pool.index.longest_runs(keys)[worker.column])  # type: ignore[arg-type]


def running(pool: Pool, worker: Worker) -> int:
    return int(pool.table.running()[worker.column])


class TestJoining:
    def test_a_worker_is_present_from_its_hello_and_ready_from_its_report(self) -> None:
        some = pool()
        worker = some.hello(Introduction(address(1), (MODEL, "lora"), 8), now=1.0)
        assert worker is not None
        assert worker.names == {MODEL, "lora"}
        assert some.table.present[worker.column]
        assert not some.table.usable()[worker.column]
        some.report(worker, ready(), now=1.0)
        assert some.table.has_slot()[worker.column]
        assert some.worker_at(worker.column) is worker

    def test_slots_are_what_the_engine_runs_or_the_policys(self) -> None:
        some = pool(routing={"max_in_flight_per_worker": 5})
        told, untold = join(some, 1, slots=3), join(some, 2)
        assert some.table.slots[[told.column, untold.column]].tolist() == [3, 5]

    def test_a_second_hello_is_the_same_worker(self) -> None:
        """Load, digest and bookings stay; the digest's numbers start afresh."""
        some = pool()
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X, sequence=9), now=0.0)
        booking = some.book(worker.column, 10, "lease")
        assert some.hello(Introduction(address(1), (MODEL,), 4), now=1.0) is worker
        assert (held(some, worker), running(some, worker)) == (6, 1)
        some.snapshot(worker, snapshot(Y, sequence=1), now=1.0)
        assert held(some, worker, Y) == 6
        some.release(booking)
        assert running(some, worker) == 0

    def test_a_full_pool_takes_nobody_but_its_own(self) -> None:
        some = pool(ReportPolicy(max_workers=2))
        join(some, 1)
        join(some, 2)
        assert some.hello(Introduction(address(3), (MODEL,), 0), now=0.0) is None
        assert some.hello(Introduction(address(2), (MODEL,), 0), now=0.0) is not None
        assert list(some.workers) == [address(1), address(2)]

    def test_more_workers_than_columns_grow_table_and_index_together(self) -> None:
        some = pool()
        workers = [join(some, number) for number in range(20)]
        assert len(some.table) == some.index.width >= 20
        assert len({worker.column for worker in workers}) == 20
        assert some.table.usable().sum() == 20


class TestStaticWorkers:
    def test_a_worker_without_an_agent_is_always_thought_ready(self) -> None:
        some = pool(workers=[address(1)])
        (worker,) = some.workers.values()
        assert not worker.reports
        assert some.table.has_slot()[worker.column]
        assert not some.table.last_resort(1e9)[worker.column]
        assert some.tick(1e9) == []

    def test_once_its_agent_speaks_the_agent_is_believed(self) -> None:
        some = pool(workers=[address(1)])
        worker = some.hello(Introduction(address(1), (MODEL,), 2), now=5.0)
        assert worker is not None
        assert worker.reports
        assert not some.table.usable().any()
        some.report(worker, ready(), now=5.0)
        assert some.table.usable()[worker.column]
        assert some.table.slots[worker.column] == 2
        assert some.tick(100.0) == [worker]


class TestLoad:
    def test_requests_of_others_are_those_that_we_did_not_send(self) -> None:
        """SU1: a restarted scheduler learns what runs from the agents."""
        some = pool()
        worker = join(some, 1, running=3.0, waiting=1.0)
        assert running(some, worker) == 4

    def test_our_own_are_not_counted_twice(self) -> None:
        """LD3: in-flight requests are added to the last report, and only once."""
        some = pool()
        worker = join(some, 1)
        bookings = [some.book(worker.column, 0, "lease") for _ in range(3)]
        some.report(worker, ready(running=5.0), now=1.0)
        assert running(some, worker) == 5
        some.book(worker.column, 0, "lease")
        assert running(some, worker) == 6
        for booking in bookings:
            some.release(booking)
        assert running(some, worker) == 3

    def test_requests_that_ended_since_the_scrape_are_not_others(self) -> None:
        some = pool()
        worker = join(some, 1)
        bookings = [some.book(worker.column, 0, "lease") for _ in range(3)]
        for booking in bookings:
            some.release(booking)
        some.report(worker, ready(running=3.0), now=1.0)
        assert running(some, worker) == 0
        some.report(worker, ready(running=3.0), now=2.0)
        assert running(some, worker) == 3

    def test_absent_gauges_and_fewer_than_ours_are_nobody_elses(self) -> None:
        some = pool()
        worker = join(some, 1, running=None, waiting=None)
        assert running(some, worker) == 0
        some.book(worker.column, 0, "lease")
        some.report(worker, ready(running=0.0), now=1.0)
        assert running(some, worker) == 1

    def test_an_engine_that_is_gone_is_not_usable_and_its_cache_is_forgotten(self) -> None:
        some = pool()
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X), now=0.0)
        some.report(worker, LoadReport(WorkerState.DOWN), now=1.0)
        assert not some.table.usable().any()
        assert held(some, worker) == 0
        some.report(worker, ready(), now=2.0)
        assert some.table.usable()[worker.column]
        assert held(some, worker) == 0

    def test_freshness_counts_from_the_scrape_on_our_clock(self) -> None:
        """LD3: an old scrape sent just now is old."""
        some = pool(ReportPolicy(stale_after_s=3.0))
        new, old = join(some, 1, now=10.0), join(some, 2, now=10.0, age_s=2.0)
        stale = some.table.last_resort
        assert not stale(11.0)[new.column] and not stale(10.9)[old.column]  # noqa: PT018
        assert stale(11.0)[old.column]
        assert not stale(12.9)[new.column]
        assert stale(13.0)[new.column]


class TestDigests:
    def test_a_digest_is_good_until_its_max_age(self) -> None:
        """CI1."""
        some = pool(digest={"capacity_blocks": 500, "error_rate": 0.001, "max_age_s": 10})
        worker = join(some, 1)
        assert some.table.digest_until[worker.column] == ALWAYS
        some.snapshot(worker, snapshot(X[:3]), now=1.0)
        assert some.table.digest_until[worker.column] == 11.0
        some.delta(worker, delta(X[3:]), now=5.0)
        assert some.table.digest_until[worker.column] == 15.0
        assert held(some, worker) == 6

    def test_a_refused_digest_leaves_what_is_routed_from_here_on(self) -> None:
        """BL1: no credit for what was, and no end to credit for what comes."""
        some = pool()
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X), now=1.0)
        with pytest.raises(DigestError):
            some.snapshot(worker, snapshot(X, sequence=2, version=9), now=2.0)
        assert held(some, worker) == 0
        assert some.table.digest_until[worker.column] == ALWAYS
        some.credit(worker, X)
        assert held(some, worker) == 6

    def test_a_digest_that_is_ignored_does_not_renew_the_one_in_use(self) -> None:
        """CI1: a repeated message is no news."""
        some = pool()
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X), now=1.0)
        until = some.table.digest_until[worker.column]
        some.snapshot(worker, snapshot(X), now=50.0)
        assert some.table.digest_until[worker.column] == until

    def test_a_refused_delta_leaves_the_digest_as_it_is(self) -> None:
        some = pool()
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X), now=1.0)
        until = some.table.digest_until[worker.column]
        with pytest.raises(DigestError):
            some.delta(worker, delta(Y, sequence=9), now=2.0)
        assert (held(some, worker), held(some, worker, Y)) == (6, 0)
        assert some.table.digest_until[worker.column] == until

    def test_forgetting_empties_the_column_for_good(self) -> None:
        some = pool()
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X), now=1.0)
        some.forget_digest(worker)
        assert held(some, worker) == 0
        assert some.table.digest_until[worker.column] == ALWAYS


class TestBookings:
    def test_a_booking_counts_at_once_and_until_it_is_released(self) -> None:
        some = pool()
        worker = join(some, 1)
        booking = some.book(worker.column, 100, "lease")
        table = some.table
        assert (running(some, worker), table.pending_prefill_tokens[worker.column]) == (1, 100)
        some.first_token(booking)
        assert (running(some, worker), table.pending_prefill_tokens[worker.column]) == (1, 0)
        some.release(booking)
        assert running(some, worker) == 0

    def test_releasing_without_a_first_token_ends_the_prefill(self) -> None:
        some = pool()
        worker = join(some, 1)
        some.release(some.book(worker.column, 100, "lease"))
        assert some.table.pending_prefill_tokens[worker.column] == 0

    @given(steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from("bfr")), max_size=40))
    def test_counts_are_those_of_live_bookings_under_any_order(
        self, steps: list[tuple[int, str]]
    ) -> None:
        """LE3: late and repeated calls never free twice."""
        some = pool()
        worker = join(some, 1)
        bookings: dict[int, Booking] = {}
        for number, step in steps:
            booking = bookings.get(number)
            if booking is None:
                bookings[number] = some.book(worker.column, 10**number, "lease")
            elif step == "f":
                some.first_token(booking)
            elif step == "r":
                some.release(booking)
            live = [each for each in bookings.values() if not each.released]
            pending = sum(each.uncached_tokens for each in live if each.prefilling)
            assert some.table.in_flight[worker.column] == len(live)
            assert some.table.pending_prefill_tokens[worker.column] == pending

    @pytest.mark.parametrize("again", [False, True])
    def test_a_booking_that_outlives_its_worker_is_released_against_nothing(
        self, again: bool
    ) -> None:
        """LE1: also when another worker has the column by then."""
        some = pool()
        worker = join(some, 1)
        bookings = [some.book(worker.column, 50, "lease") for _ in range(2)]
        assert some.tick(100.0) == [worker]
        if again:
            newcomer = join(some, 2, now=100.0)
            assert newcomer.column == worker.column
        some.first_token(bookings[0])
        some.release(bookings[0])
        some.release(bookings[1])
        assert not some.table.in_flight.any()
        assert not some.table.pending_prefill_tokens.any()


class TestSuspicion:
    def test_a_suspect_is_the_last_resort_for_a_while(self) -> None:
        """RT1."""
        some = pool(routing={"suspect_s": 2.0})
        worker = join(some, 1)
        some.suspect(worker, now=0.5)
        assert some.table.last_resort(2.4)[worker.column]
        assert not some.table.last_resort(2.5)[worker.column]

    def test_marks_only_grow_longer(self) -> None:
        """TM1."""
        some = pool(routing={"suspect_s": 2.0})
        worker = join(some, 1)
        some.suspect(worker, now=5.0)
        some.suspect(worker, now=1.0)
        assert some.table.suspect_until[worker.column] == 7.0


class TestTicks:
    def test_a_silent_worker_leaves_the_pool(self) -> None:
        some = pool(ReportPolicy(lost_after_s=15.0))
        silent, talking = join(some, 1), join(some, 2)
        some.report(talking, ready(), now=10.0)
        assert some.tick(15.0) == []
        assert some.tick(15.1) == [silent]
        assert list(some.workers) == [address(2)]
        assert not some.table.present[silent.column]
        assert some.table.fresh_until[silent.column] == NEVER
        with pytest.raises(KeyError):
            some.worker_at(silent.column)

    def test_silence_while_nobody_listened_does_not_count(self) -> None:
        some = pool(ReportPolicy(stale_after_s=3.0, lost_after_s=15.0))
        worker = join(some, 1)
        some.excuse(20.0)
        assert some.tick(35.0) == []
        assert some.table.fresh_until[worker.column] == 23.0
        assert some.tick(35.1) == [worker]

    def test_workers_that_come_and_go_leave_nothing_behind(self) -> None:
        """MM1."""
        some = pool()
        size = None
        for number in range(100):
            join(some, number, now=number * 100.0)
            some.tick(number * 100.0)
            size = size or some.index.nbytes
            assert (len(some.workers), len(some.table), some.index.nbytes) == (1, 8, size)

    def test_credit_without_digests_lives_for_minutes(self) -> None:
        some = pool(overlay={"ttl_s": 10.0, "ttl_without_digest_s": 300.0})
        worker = join(some, 1, sends_digests=False)
        some.credit(worker, X)
        for now in (300.0, 599.9):
            some.report(worker, ready(), now)
            some.tick(now)
            assert held(some, worker) == 6
        some.report(worker, ready(), 600.0)
        some.tick(600.0)
        assert held(some, worker) == 0

    def test_credit_beside_digests_lives_for_seconds(self) -> None:
        some = pool(overlay={"ttl_s": 10.0, "ttl_without_digest_s": 300.0})
        worker = join(some, 1)
        some.snapshot(worker, snapshot(Y), now=0.0)
        some.credit(worker, X)
        some.tick(10.0)
        assert held(some, worker) == 6
        some.report(worker, ready(), 20.0)
        some.tick(20.0)
        assert (held(some, worker), held(some, worker, Y)) == (0, 6)

    def test_every_worker_of_a_large_pool_is_aged_in_turn(self) -> None:
        """Ticks age few at a time; those that wait longest come first."""
        some = pool(overlay={"ttl_without_digest_s": 1.0})
        workers = [join(some, number, sends_digests=False) for number in range(40)]
        for worker in workers:
            some.credit(worker, X)
        for tick in range(1, 7):
            some.tick(float(tick))
        assert [held(some, worker) for worker in workers] == [0] * 40

    def test_no_credit_is_no_harm(self) -> None:
        some = pool()
        worker = join(some, 1)
        some.credit(worker, no_keys())
        assert some.index.overlay_keys(worker.column) == 0


class TestStates:
    @pytest.mark.parametrize("state", list(WorkerState))
    def test_only_a_ready_worker_takes_requests(self, state: WorkerState) -> None:
        some = pool()
        worker = join(some, 1, state=state)
        assert bool(some.usable(MODEL)[worker.column]) is (state is WorkerState.READY)

    @pytest.mark.parametrize(
        ("state", "kept"),
        [
            (WorkerState.DRAINING, 6),
            (WorkerState.DRAINED, 6),
            (WorkerState.FROZEN, 6),
            (WorkerState.STARTING, 0),
            (WorkerState.ASLEEP, 0),
            (WorkerState.DOWN, 0),
        ],
    )
    def test_credit_stays_where_the_engines_cache_does(self, state: WorkerState, kept: int) -> None:
        """CI1: a sleeping worker has no cache and gets no requests."""
        some = pool()
        worker = join(some, 1)
        some.credit(worker, X)
        some.report(worker, ready(state=state), now=1.0)
        assert held(some, worker) == kept


class TestForeignLoad:
    def test_leases_tell_our_requests_from_others(self) -> None:
        some = pool()
        worker = join(some, 1)
        for lease in ("a", "b"):
            some.book(worker.column, 0, lease)
        leases = frozenset({"a", "of another scheduler"})
        some.report(worker, ready(running=5.0, waiting=1.0, leases=leases), now=1.0)
        # "b" is booked and not there yet; of six on the engine one is ours.
        assert int(some.table.foreign[worker.column]) == 5
        assert running(some, worker) == 7


class TestAdapters:
    def test_an_adapter_goes_where_it_is_listed(self) -> None:
        some = pool()
        first, second = join(some, 1, adapters=("lora",)), join(some, 2)
        assert some.serves("lora")
        assert some.usable("lora")[[first.column, second.column]].tolist() == [True, False]
        assert some.has_slot("lora")[[first.column, second.column]].tolist() == [True, False]
        for name in (MODEL, None, "of the policy, loaded on demand"):
            assert some.usable(name)[[first.column, second.column]].all()

    def test_loading_and_unloading_is_seen_in_reports(self) -> None:
        some = pool()
        worker = join(some, 1)
        some.report(worker, ready(adapters=("lora",)), now=1.0)
        assert some.serves("lora")
        some.report(worker, ready(adapters=("other",)), now=2.0)
        assert not some.serves("lora")
        some.tick(1_000.0)
        assert not some.serves("other"), "a lost worker lists nothing"

    def test_workers_without_an_agent_may_have_any_adapter(self) -> None:
        some = pool(workers=[address(9)])
        told = join(some, 1, adapters=("lora",))
        untold = some.workers[address(9)]
        join(some, 2)
        assert np.flatnonzero(some.usable("lora")).tolist() == sorted([told.column, untold.column])

    def test_many_workers_keep_their_lists(self) -> None:
        some = pool()
        workers = [join(some, number, adapters=("lora",)) for number in range(20)]
        assert some.usable("lora").sum() == len(workers)


class TestHostMemory:
    """Blocks that the engine would load back are worth less than those it has at hand."""

    def blocks(self, some: Pool, worker: Worker) -> float:
        return float(some.cached_blocks(X)[worker.column])

    def test_a_prefix_continued_in_host_memory_counts_in_part(self) -> None:
        some = pool(routing={"host_hit_weight": 0.5})
        worker, other = join(some, 1), join(some, 2)
        some.snapshot(worker, snapshot(X[:2]), now=1.0)
        some.snapshot(worker, snapshot(X[2:4]), 1.0, Tier.HOST)
        assert self.blocks(some, worker) == 2 + 0.5 * 2
        assert self.blocks(some, other) == 0
        some.delta(worker, delta(X[4:6]), 2.0, Tier.HOST)
        assert self.blocks(some, worker) == 2 + 0.5 * 4

    def test_a_gap_in_both_tiers_ends_the_run(self) -> None:
        some = pool(routing={"host_hit_weight": 1.0})
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X[3:]), 1.0, Tier.HOST)
        assert self.blocks(some, worker) == 0
        some.snapshot(worker, snapshot(X[:2]), now=1.0)
        assert self.blocks(some, worker) == 2

    def test_an_engine_that_is_gone_has_no_host_memory_either(self) -> None:
        some = pool()
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X), 1.0, Tier.HOST)
        some.report(worker, ready(state=WorkerState.DOWN), now=2.0)
        assert self.blocks(some, worker) == 0

    def test_a_new_stream_starts_with_a_snapshot_in_both_tiers(self) -> None:
        some = pool()
        worker = join(some, 1)
        some.snapshot(worker, snapshot(X), 1.0, Tier.HOST)
        some.hello(hello(1), now=2.0)
        with pytest.raises(DigestError):
            some.delta(worker, delta(X), 2.0, Tier.HOST)

    def test_workers_may_come_and_go_in_any_order(self) -> None:
        some = pool()
        workers = [join(some, number) for number in range(20)]
        some.snapshot(workers[-1], snapshot(X), 1.0, Tier.HOST)
        assert self.blocks(some, workers[-1]) == 3
        assert self.blocks(some, workers[0]) == 0
        some.tick(1_000.0)
        newcomer = join(some, 30, now=1_000.0)
        assert self.blocks(some, newcomer) == 0


def test_a_long_prompt_matches_over_both_tiers() -> None:
    some = pool(digest={"capacity_blocks": 4_000, "error_rate": 0.001})
    worker = join(some, 1)
    prompt = keys_of(text_blocks(5, 500))
    size = DigestShape(4_000, 0.001)
    some.snapshot(worker, snapshot(prompt[:450:2], size=size), 1.0)
    some.snapshot(worker, snapshot(prompt[1:450:2], size=size), 1.0, Tier.HOST)
    assert 225 <= float(some.cached_blocks(prompt)[worker.column]) <= 227


class TestRoom:
    """Beyond a slot: a short queue in the engine and KV blocks for the new tokens."""

    def room(self, pool: Pool, worker: Worker, tokens: int = 0) -> bool:
        return bool(pool.has_room(None, tokens)[worker.column])

    def busy(self, **report: object) -> tuple[Pool, Worker]:
        some = pool(routing={"max_engine_queue": 2})
        return some, join(some, 1, running=1.0, **report)

    @pytest.mark.parametrize(("waiting", "room"), [(0.0, True), (2.0, True), (3.0, False)])
    def test_a_queue_in_the_engine_leaves_no_room(self, waiting: float, room: bool) -> None:
        some, worker = self.busy(waiting=waiting)
        assert self.room(some, worker) == room == some.has_any_room()
        assert some.has_slot(None)[worker.column]

    @pytest.mark.parametrize(("tokens", "room"), [(40, True), (41, False)])
    def test_the_tokens_have_to_fit_the_free_blocks(self, tokens: int, room: bool) -> None:
        some, worker = self.busy(kv_usage=0.5, kv_blocks=20)
        assert self.room(some, worker, tokens) == room

    def test_much_prefill_ahead_leaves_no_room_until_its_first_token(self) -> None:
        some = pool(admission={"max_prefill_s": 0.5})
        worker = join(some, 1)
        booking = some.book(worker.column, 1_001, "a", now=0.0)
        assert self.room(some, worker)  # no rate is known yet
        some.table.prefill_tokens_per_s[worker.column] = 2_000.0
        assert not self.room(some, worker)
        assert not some.has_any_room()
        some.first_token(booking)
        assert self.room(some, worker)
        some.book(worker.column, 1_000, "b", now=0.0)
        assert self.room(some, worker)

    @pytest.mark.parametrize("known", [{"kv_usage": 1.0}, {"kv_blocks": 5}])
    def test_what_is_not_told_does_not_limit(self, known: dict[str, float]) -> None:
        """LD1."""
        some, worker = self.busy(waiting=None, **known)
        assert self.room(some, worker, 1_000_000)

    def test_what_was_sent_since_the_report_is_taken_off(self) -> None:
        some, worker = self.busy(kv_usage=0.0, kv_blocks=10)
        booking = some.book(worker.column, 20, "a", output_tokens=9)
        assert some.table.output_tokens[worker.column] == 9
        assert self.room(some, worker, 8)
        assert not self.room(some, worker, 9)
        some.release(booking)
        assert some.table.output_tokens[worker.column] == 0
        assert self.room(some, worker, 40)

    def test_a_report_counts_what_its_engine_lists_or_else_everything(self) -> None:
        some, worker = self.busy(kv_usage=0.0, kv_blocks=10)
        first = some.book(worker.column, 16, "a")
        some.book(worker.column, 16, "b")
        told = ready(running=1.0, kv_usage=0.4, kv_blocks=10, leases=frozenset({"a", "x"}))
        some.report(worker, told, 1.0)
        assert some.table.kv_booked_blocks[worker.column] == 4
        some.release(first)
        assert some.table.kv_booked_blocks[worker.column] == 4
        some.report(worker, ready(running=1.0, kv_usage=0.8, kv_blocks=10), 2.0)
        assert some.table.kv_booked_blocks[worker.column] == 0

    def test_an_idle_worker_takes_whatever_comes(self) -> None:
        """The engine alone knows what to do with more than all its memory."""
        some = pool()
        worker = join(some, 1, waiting=0.0, kv_usage=0.0, kv_blocks=10)
        assert self.room(some, worker, 1_000)
        some.book(worker.column, 1, "a")
        assert not self.room(some, worker, 1_000)

    def test_a_silent_worker_is_not_thought_full(self) -> None:
        """LD3: nobody knows."""
        some, worker = self.busy(waiting=9.0, kv_usage=1.0, kv_blocks=10)
        some.tick(2.9)
        assert not self.room(some, worker, 50)
        some.tick(3.0)
        assert self.room(some, worker, 50)

    def test_adapters_have_room_where_they_are(self) -> None:
        some = pool()
        holder, other = join(some, 1, adapters=("lora",)), join(some, 2)
        assert some.has_room("lora", 10)[[holder.column, other.column]].tolist() == [True, False]


class TestHot:
    def test_counts_of_all_agents_add_up_and_are_replaced(self) -> None:
        some = pool()
        first, second = join(some, 1), join(some, 2)
        some.take_hot(first, ((7, 3), (8, 1)))
        some.take_hot(second, ((7, 2),))
        assert (some.told_hot(7), some.told_hot(8), some.told_hot(9)) == (5.0, 1.0, 0.0)
        some.take_hot(first, ((8, 4),))
        assert (some.told_hot(7), some.told_hot(8)) == (2.0, 4.0)
        assert first.hot_prefixes == ((8, 4),)

    def test_a_worker_that_leaves_takes_its_counts_along(self) -> None:
        """MM1."""
        some = pool()
        some.take_hot(join(some, 1), ((7, 3),))
        some.tick(1_000.0)
        assert some.told_hot(7) == 0.0


def test_lists_of_allowed_workers_name_addresses_or_ips() -> None:
    some = pool()
    first, second = join(some, 1), join(some, 2)
    for names, allowed in (
        ({address(1)}, [True, False]),
        ({"10.0.0.2"}, [False, True]),
        ({"10.0.0.1:9999"}, [False, False]),
        (set(), [False, False]),
    ):
        assert some.among(names)[[first.column, second.column]].tolist() == allowed


def test_reports_are_trusted_less_as_they_age() -> None:
    some = pool(ReportPolicy(stale_after_s=4.0), workers=[address(9)])
    worker, static = join(some, 1, now=10.0), some.workers[address(9)]
    trusts = [some.trust(now)[worker.column] for now in (10.0, 11.0, 13.0, 99.0)]
    assert trusts == [1.0, 0.75, 0.25, 0.0]
    assert some.trust(99.0)[static.column] == 1.0


def test_columns_are_found_by_address() -> None:
    some = pool()
    worker = join(some, 1)
    assert some.column_of(worker.address) == worker.column
    assert some.column_of("10.9.9.9:1") == some.column_of(None) == -1
