"""Leases whose end nobody told: LE1 and LE3 by what workers say and do not say."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.decision.ticket import Freed, Ticket
from extproc.fleet.worker import LoadReport, WorkerState
from tests.support.crowd import Crowd, request


class Listed(Crowd):
    """Workers that list what they run."""

    def tell(self, *running: Ticket, at: float) -> None:
        for worker in self.workers:
            leases = frozenset(ticket.id for ticket in running)
            load = LoadReport(WorkerState.READY, running=float(len(leases)), leases=leases)
            self.scheduler.report(self.served, worker, load, at)


def crowd(**changes: Any) -> Listed:
    return Listed(workers=1, slots=4, service_s=lambda _: 1e9, **changes)


def freed(some: Crowd, why: Freed) -> int:
    return some.scheduler.leases.freed["sim", why]


class TestLists:
    def test_a_listed_request_that_is_missing_three_times_has_ended(self) -> None:
        """LE1: the end was lost; quota is right again within five reports, and stays."""
        some = crowd()
        gone, stays = some.send(request(), 10), some.send(request(), 10)
        some.tell(gone, stays, at=1.0)
        for at in (2.0, 3.0):
            some.tell(stays, at=at)
            assert some.scheduler.admission.running == 2
        some.tell(stays, at=4.0)
        assert some.scheduler.admission.running == 1
        assert freed(some, Freed.ABSENT) == 1
        assert gone.lease is not None
        assert gone.lease.released
        some.leave(gone)
        assert some.scheduler.admission.running == 1

    def test_one_missing_list_is_no_end(self) -> None:
        """LE3: not too eager."""
        some = crowd()
        ticket = some.send(request(), 10)
        for at in range(1, 40, 3):
            some.tell(ticket, at=at)
            some.tell(at=at + 1)
            some.tell(at=at + 2)
        assert some.scheduler.admission.running == 1

    def test_a_long_answer_stays_counted_for_its_whole_life(self) -> None:
        """LE3: half an hour."""
        some = crowd()
        ticket = some.send(request(), 10)
        for at in range(1, 1_800):
            some.tell(ticket, at=at)
            some.scheduler.tick(at)
        assert some.scheduler.admission.running == 1
        some.leave(ticket)
        assert some.scheduler.admission.running == 0

    def test_a_request_on_its_way_is_not_missed_yet(self) -> None:
        some = crowd()
        some.send(request(), 10)
        for at in range(1, 60):
            some.tell(at=at)
        assert some.scheduler.admission.running == 1
        some.tell(at=61.0)
        assert some.scheduler.admission.running == 0
        assert freed(some, Freed.UNSEEN) == 1

    def test_who_waits_gets_what_a_leak_held(self) -> None:
        some = crowd(pool={"max_concurrency": 1})
        lost, waiting = some.send(request(), 10), some.send(request(), 10)
        some.tell(lost, at=1.0)
        for at in (2.0, 3.0, 4.0):
            some.tell(at=at)
        assert waiting.decision is not None

    def test_workers_without_lists_free_nothing(self) -> None:
        some = crowd()
        some.send(request(), 10)
        for at in range(1, 100):
            some.scheduler.report(
                some.served, some.workers[0], LoadReport(WorkerState.READY, running=0.0), at
            )
        assert some.scheduler.admission.running == 1

    def test_what_nobody_here_sent_is_counted_as_a_mismatch(self) -> None:
        some = crowd()
        load = LoadReport(WorkerState.READY, running=2.0, leases=frozenset(["x", "y"]))
        some.scheduler.report(some.served, some.workers[0], load, 1.0)
        assert some.scheduler.leases.mismatch(some.served.pool.workers) == 2
        some.tell(at=2.0)
        assert some.scheduler.leases.mismatch(some.served.pool.workers) == 0


class TestLostWorkers:
    def test_its_leases_are_free_without_any_traffic(self) -> None:
        """LE3: the sweep is driven by time."""
        some = crowd(pool={"max_concurrency": 4})
        running = [some.send(request(), 10) for _ in range(4)]
        some.scheduler.tick(100.0)
        assert some.scheduler.admission.running == 0
        assert freed(some, Freed.WORKER_LOST) == 4
        for ticket in running:
            some.scheduler.finish(ticket, 101.0)
        for _, rule in some.scheduler.admission.rules():
            assert all(counter.requests == 0 for counter in rule.counters.values())


class TestApiCallers:
    def arrive(self, some: Crowd) -> Ticket:
        return some.scheduler.arrive(some.served, request(), (), 0.0, renewable=True)

    def test_silence_ends_a_lease(self) -> None:
        some = crowd(reports={"lost_after_s": 9_000.0})
        ticket = self.arrive(some)
        some.scheduler.tick(119.0)
        assert some.scheduler.admission.running == 1
        some.scheduler.tick(121.0)
        assert some.scheduler.admission.running == 0
        assert freed(some, Freed.SILENT) == 1
        assert some.scheduler.ticket(ticket.id) is None

    @pytest.mark.parametrize("by_list", [False, True])
    def test_any_sign_of_life_renews_it(self, by_list: bool) -> None:
        """LE3."""
        some = crowd(reports={"lost_after_s": 9_000.0})
        ticket = self.arrive(some)
        for at in range(50, 1_200, 50):
            if by_list:
                some.tell(ticket, at=at)
            else:
                assert some.scheduler.renew(ticket.id, at)
            some.scheduler.tick(at)
        assert some.scheduler.admission.running == 1

    def test_a_lease_that_ended_cannot_be_renewed(self) -> None:
        some = crowd()
        ticket = self.arrive(some)
        some.scheduler.finish(ticket, 1.0)
        assert not some.scheduler.renew(ticket.id, 2.0)


def test_a_thousand_ends_of_every_kind_leave_nothing() -> None:
    """LE1: ends, cancels, lost ends, lost workers and doubled ends, mixed."""
    import random

    rng = random.Random(7)
    some = Listed(workers=3, slots=8, service_s=lambda _: 1e9, pool={"max_concurrency": 20})
    live: list[Ticket] = []
    for number in range(1_000):
        now = number * 0.1
        some.now = now
        live.append(some.send(request(f"t{number % 5}"), rng.choice([10, 500])))
        if rng.random() < 0.9:
            ticket = live.pop(rng.randrange(len(live)))
            fate = rng.random()
            if fate < 0.6:
                some.leave(ticket)
                some.leave(ticket)
            elif fate < 0.8 and ticket.booking is not None:
                ticket.listed = True  # its end is lost: only the lists tell
        if number % 10 == 0:
            some.tell(*[ticket for ticket in live if ticket.decision], at=now)
        if number % 200 == 199:
            some.scheduler.tick(now + 30.0)
            from tests.support.builders import join

            some.workers = [join(some.served.pool, n, now=now, slots=8) for n in range(3)]
    for ticket in live:
        some.leave(ticket)
    for at in range(5):
        some.tell(at=101.0 + at)
    some.scheduler.tick(101.0 + 60.0)
    assert some.scheduler.admission.running == 0
    assert int(some.served.pool.table.in_flight.sum()) == 0
    for _, rule in some.scheduler.admission.rules():
        assert all(not c.requests and not c.waiting for c in rule.counters.values())
