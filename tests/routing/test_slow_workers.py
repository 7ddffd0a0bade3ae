"""Workers that answer too slowly or not at all, under virtual time."""

from __future__ import annotations

import heapq
import random
from itertools import count
from typing import Any

import pytest

from extproc.fleet.worker import Booking
from extproc.routing.router import Router
from extproc.tokens.keyer import PromptKeys
from tests.support.builders import join, pool, ready

TOKENS = 1_500
RATE = 8_000.0
EVERY_S = 0.1
NEVER_S = 1e9


class Cluster:
    """Four workers that prefill in order, reports every second, ten requests a second."""

    def __init__(self, profile: str) -> None:
        self.pool = pool(routing={"profile": profile})
        for number in range(4):
            join(self.pool, number, slots=64, leases=frozenset())
        self.router = Router(self.pool, random.Random(1))
        self.rates = [RATE] * 4
        self.free_at = [0.0] * 4
        self.now = 0.0
        self.sent: list[tuple[float, int]] = []
        self.waits: list[float] = []
        self._events: list[tuple[float, int, Any]] = []
        self._order = count()

    def run(self, seconds: float) -> None:
        """Send and answer for so long."""
        for step in range(round(seconds / EVERY_S)):
            self.now += EVERY_S
            while self._events and self._events[0][0] <= self.now:
                at, _, event = heapq.heappop(self._events)
                event(at)
            if step % 10 == 0:
                for worker in list(self.pool.workers.values()):
                    signals = {"generation_tokens_per_s": 0.0}
                    report = ready(signals=signals, leases=frozenset(self.pool._leases))
                    self.pool.report(worker, report, self.now)
            if step % 3 == 0:
                self.pool.tick(self.now)
            self._send()

    def _send(self) -> None:
        route = self.router.route([PromptKeys(TOKENS)], self.now)
        column = route.columns[0]
        lease = f"{next(self._order)}"
        booking = self.pool.book(column, TOKENS, lease, now=self.now)
        self.router.note(route, self.now)
        self.sent.append((self.now, column))
        begins = max(self.now, self.free_at[column])
        rate = self.rates[column]
        self.free_at[column] = begins + (TOKENS / rate if rate else NEVER_S)
        self._at(self.free_at[column], lambda at: self.pool.response_started(booking, at))
        self._at(self.free_at[column] + 0.5, lambda _at: self._end(booking))
        self.waits.append(self.free_at[column] - self.now)

    def _end(self, booking: Booking) -> None:
        self.pool.release(booking)

    def _at(self, when: float, event: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def wake(self) -> None:
        """What hangs is answered now."""
        self._events = [(min(at, self.now), n, event) for at, n, event in self._events]
        heapq.heapify(self._events)

    def share(self, column: int, since: float) -> float:
        """Part of the requests since then that went to a worker."""
        columns = [c for at, c in self.sent if at > since]
        return columns.count(column) / len(columns)


@pytest.mark.parametrize("profile", ["balanced", "finish"])
@pytest.mark.parametrize("rate", [RATE / 20, 0.0])
def test_a_slow_or_hanging_worker_is_routed_around_within_3_reports_and_comes_back(
    profile: str, rate: float
) -> None:
    """Its health page is fine and its reports keep coming."""
    cluster = Cluster(profile)
    cluster.run(20.0)
    assert 0.15 < cluster.share(0, 5.0) < 0.35
    cluster.rates[0] = rate
    cluster.run(3.0)
    cluster.run(20.0)
    assert cluster.share(0, 23.0) < 0.05
    cluster.rates[0] = RATE
    cluster.free_at[0] = cluster.now
    cluster.wake()
    cluster.run(60.0)
    assert cluster.share(0, cluster.now - 20.0) > 0.15


def test_a_new_worker_in_a_busy_pool_answers_about_as_soon_as_the_others() -> None:
    """It gets its share within the exploration time, its TTFT p99 within 1.5 times theirs."""
    cluster = Cluster("balanced")
    cluster.run(80.0)
    newcomer = join(cluster.pool, 9, now=cluster.now, slots=64, leases=frozenset())
    cluster.rates.append(RATE)
    cluster.free_at.append(0.0)
    before = len(cluster.sent)
    cluster.run(60.0)
    assert 0.12 < cluster.share(newcomer.column, 80.0) < 0.35
    by_worker: dict[bool, list[float]] = {True: [], False: []}
    for (_, column), wait in zip(cluster.sent[before:], cluster.waits[before:], strict=True):
        by_worker[column == newcomer.column].append(wait)
    p99 = {new: sorted(waits)[int(0.99 * len(waits))] for new, waits in by_worker.items()}
    assert p99[True] <= 1.5 * p99[False]
