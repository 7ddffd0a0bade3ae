from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from extproc.fleet.pool import Pool
from extproc.fleet.table import WorkerTable
from extproc.fleet.worker import EngineError, LoadReport, Outcome, Worker, WorkerState
from extproc.policy import ReplicaPolicy, WarmupPolicy
from extproc.routing import leaders
from extproc.routing.router import Asked, Router
from extproc.tokens.keyer import PromptKeys
from tests.support.builders import (
    BLOCK,
    address,
    join,
    pool,
    prompt_keys,
    ready,
    text_blocks,
)

SYSTEM = text_blocks(1, 500)
RNG = random.Random(7)


def question(number: int) -> PromptKeys:
    """The shared system prompt and a question of its own."""
    return prompt_keys(SYSTEM + text_blocks(1_000 + number, 5))


def cold(number: int, blocks: int = 50) -> PromptKeys:
    return prompt_keys(text_blocks(50_000 + number, blocks))


class Traffic:
    """A pool that is sent requests, and what of them goes on running."""

    def __init__(self, workers: int, slots: int = 0, **changes: Any) -> None:
        digest = {"capacity_blocks": 50_000, "error_rate": 0.001}
        self.pool: Pool = pool(digest=digest, **changes)
        self.now = 0.0
        self.number = 0
        self.running: list[tuple[float, Any]] = []
        self.slots = slots
        for number in range(workers):
            join(self.pool, number, slots=slots)
        self.router = Router(self.pool, RNG)
        self.wait(10.0)

    def wait(self, seconds: float) -> None:
        """Time passes: requests end, workers report."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            for ends_at, booking in self.running[:]:
                if ends_at <= self.now:
                    self.pool.release(booking)
                    self.running.remove((ends_at, booking))
            for worker in self.pool.workers.values():
                self.pool.report(worker, ready(), self.now)
            self.pool.tick(self.now)

    def send(self, prompt: PromptKeys, takes_s: float = 0.0, **asked: Any) -> Worker:
        route = self.router.route([prompt], self.now, Asked(**asked))
        self.number += 1
        booking = self.pool.book(route.columns[0], 0, f"{self.number}", now=self.now)
        self.pool.first_token(booking)
        self.router.note(route, self.now)
        worker = self.pool.worker_at(route.columns[0])
        self.pool.credit(worker, prompt.keys)
        self.running.append((self.now + takes_s, booking))
        return worker

    def holders(self) -> int:
        keys = prompt_keys(SYSTEM).keys
        return int((self.pool.index.longest_runs(keys) >= 450).sum())


class TestHotPrefixes:
    def test_at_moderate_load_it_stays_on_three_holders_and_spreads_when_they_are_loaded(
        self,
    ) -> None:
        """16 workers, R = 3, every worker with 20 slots."""
        routing = {"replicas": {"max_load": 0.9, "max_extra_running": 18}}
        traffic = Traffic(16, slots=20, overlay={"ttl_s": 1_000.0}, routing=routing)
        number = 0
        for _ in range(60):
            for _ in range(9):
                number += 1
                traffic.send(question(number), takes_s=5.0)
            traffic.wait(1.0)
        assert traffic.router.is_hot(int(prompt_keys(SYSTEM).keys[-1]), traffic.now)
        assert traffic.holders() == 3
        for _ in range(10):
            for _ in range(30):
                number += 1
                traffic.send(question(number), takes_s=5.0)
            traffic.wait(1.0)
        assert traffic.holders() > 3

    def test_holders_over_the_cap_get_no_more(self) -> None:
        policy = ReplicaPolicy(max_holders=2)
        everyone = np.ones(5, dtype=bool)
        holders = np.array([True, True, False, True, True])
        order = np.array([0.4, 0.1, 0.0, 0.3, 0.2])
        kept = leaders.keeping_to_holders(everyone, holders, ~everyone, order, policy)
        assert kept.tolist() == [False, True, False, False, True]

    @pytest.mark.parametrize("holders", [0, 1, 2])
    def test_below_the_cap_anybody_may_become_a_holder(self, holders: int) -> None:
        everyone = np.ones(5, dtype=bool)
        some = np.arange(5) < holders
        kept = leaders.keeping_to_holders(everyone, some, ~everyone, np.zeros(5), ReplicaPolicy())
        assert kept.all()

    def test_a_short_shared_beginning_holds_nobody(self) -> None:
        """The shared root of all prompts is no reason to stay with three workers."""
        traffic = Traffic(8, routing={"replicas": {"hot_per_s": 0.1}})
        used = set()
        for number in range(40):
            prompt = prompt_keys(SYSTEM[: 2 * BLOCK] + text_blocks(90_000 + number, 50))
            used.add(traffic.send(prompt, takes_s=5.0).address)
        assert len(used) == 8

    def test_agents_tell_what_is_hot_too(self) -> None:
        traffic = Traffic(2)
        traffic.pool.take_hot(traffic.pool.worker_at(0), ((77, 5),))
        assert traffic.router.is_hot(77, traffic.now)
        assert not traffic.router.is_hot(78, traffic.now)


class TestStaying:
    def traffic(self, **affinity: Any) -> Traffic:
        made = Traffic(4, slots=10, routing={"affinity": {"sticky_s": 30.0, **affinity}})
        self.home = made.send(cold(1))
        return made

    def test_a_conversation_stays_though_another_worker_costs_less(self) -> None:
        traffic = self.traffic()
        traffic.pool.table.recent_tokens[self.home.column] = 1e9
        assert traffic.send(cold(1)) is self.home

    def test_not_for_ever(self) -> None:
        traffic = self.traffic()
        traffic.wait(31.0)
        traffic.pool.credit(self.home, cold(1).keys)
        traffic.pool.table.recent_tokens[self.home.column] = 1e9
        assert traffic.send(cold(1)) is not self.home

    @pytest.mark.parametrize("load", ["loaded", "not ready", "gone"])
    def test_not_on_a_worker_that_is(self, load: str) -> None:
        traffic = self.traffic()
        table, column = traffic.pool.table, self.home.column
        table.recent_tokens[column] = 1e9
        if load == "loaded":
            table.foreign[column] = 10
        elif load == "not ready":
            traffic.pool.report(self.home, LoadReport(WorkerState.DRAINING), traffic.now)
        else:
            for other in list(traffic.pool.workers.values()):
                if other is not self.home:
                    traffic.pool.report(other, ready(), traffic.now + 20)
                    traffic.pool.credit(other, cold(1).keys)
            traffic.pool.tick(traffic.now + 20)
        assert traffic.send(cold(1)) is not self.home

    def test_the_session_is_remembered_as_a_preference(self) -> None:
        traffic = Traffic(4, routing={"weights": {"session": 1_000, "recent_work": 0}})
        home = traffic.send(cold(1), session="s")
        assert {traffic.send(cold(n), session="s") for n in range(2, 8)} == {home}
        traffic.pool.table.foreign[home.column] = 50
        assert traffic.send(cold(9), session="s") is not home


class TestSoftAffinity:
    def test_a_cache_on_a_much_busier_worker_does_not_count(self) -> None:
        some = Traffic(2, routing={"affinity": {"max_extra_running": 3}, "weights": {"running": 1}})
        home = some.send(cold(1))
        some.wait(1.0)
        some.pool.table.foreign[home.column] = 3
        assert some.send(cold(1)) is home
        some.wait(1.0)
        some.pool.table.foreign[home.column] = 4
        assert some.send(cold(1)) is not home

    def test_a_small_match_is_no_reason_to_move(self) -> None:
        some = Traffic(2, routing={"affinity": {"min_benefit": 0.5}, "weights": {"running": 1}})
        home = some.send(cold(1, 20))
        some.wait(1.0)
        assert some.send(cold(1, 20)) is home
        some.wait(1.0)
        some.pool.table.foreign[home.column] = 1
        longer = prompt_keys(text_blocks(50_001, 20) + text_blocks(9, 30))
        assert some.send(longer) is not home


class TestNewWorkers:
    def test_all_are_new_together_or_none_is(self) -> None:
        table = WorkerTable()
        table.resize(3)
        table.joined_at[:] = [0.0, 100.0, 100.0]
        usable = np.array([True, True, False])
        policy = WarmupPolicy(duration_s=60)
        new = leaders.newcomers(table, usable, policy, 110.0)
        assert new is not None
        assert new.tolist() == [False, True, False]
        assert leaders.newcomers(table, usable, policy, 10.0) is None
        assert leaders.newcomers(table, usable, policy, 200.0) is None

    def test_their_load_counts_less_at_first(self) -> None:
        policy = WarmupPolicy(duration_s=100, load_discount=0.5)
        load, new = np.array([10.0, 10.0]), np.array([False, True])
        lighter = leaders.discounted(load, new, np.array([500.0, 50.0]), policy)
        assert lighter.tolist() == [10.0, 7.5]

    def test_a_share_of_new_prompts_goes_there_while_it_is_not_busier_than_the_rest(self) -> None:
        policy = WarmupPolicy(share=0.25)
        allowed, new = np.ones(4, dtype=bool), np.array([False, False, False, True])

        def explored(load: list[float]) -> int:
            running = np.array(load)
            masks = (
                leaders.exploring(allowed, new, running, allowed, policy, RNG) for _ in range(2_000)
            )
            return sum(mask.tolist() == new.tolist() for mask in masks)

        assert 400 < explored([4.0, 4.0, 4.0, 0.0]) < 600
        assert explored([4.0, 4.0, 4.0, 9.0]) == 0

    def test_one_that_joins_a_busy_pool_gets_its_share_and_no_flood(self) -> None:
        """Shares of new prompts over the exploration time, against the pool's mean."""
        traffic = Traffic(4, slots=100)
        number = 0

        def second() -> Counter[str]:
            nonlocal number
            counts: Counter[str] = Counter()
            for _ in range(20):
                number += 1
                counts[traffic.send(cold(number, 20), takes_s=3.0).address] += 1
            traffic.wait(1.0)
            return counts

        for _ in range(60):
            second()
        join(traffic.pool, 9, now=traffic.now, slots=100)
        shares = [second()[address(9)] for _ in range(60)]
        assert max(shares) <= 20 * 0.75
        assert sum(shares[:10]) >= 20
        assert 0.7 * 240 <= sum(shares) <= 1.4 * 240


class TestIllWorkers:
    """An engine that answers badly is routed around within 3 reports, and comes back."""

    def ailing(self) -> Traffic:
        return Traffic(4, slots=50)

    def share_of(self, traffic: Traffic, ill: int, end: Any, seconds: int) -> list[int]:
        """Requests a second to the ill worker; its requests end by ``end``."""
        counts = []
        for _ in range(seconds):
            count = 0
            for _ in range(20):
                worker = traffic.send(PromptKeys(3_000), takes_s=1.0)
                if worker.column == ill:
                    count += 1
                    end(traffic, worker)
            counts.append(count)
            traffic.wait(1.0)
        return counts

    @pytest.mark.parametrize(
        ("status", "error"),
        [
            (429, EngineError.KV_EXHAUSTED),
            (503, EngineError.UNKNOWN),
            (500, EngineError.ENGINE_DEAD),
        ],
    )
    def test_errors_keep_new_requests_away(self, status: int, error: EngineError) -> None:
        traffic = self.ailing()

        def fails(traffic: Traffic, worker: Worker) -> None:
            _, booking = traffic.running.pop()
            traffic.pool.release(booking)
            traffic.pool.outcome(worker, Outcome("x", status, error, 0.1), traffic.now)

        counts = self.share_of(traffic, 0, fails, seconds=12)
        assert sum(counts[3:]) <= 6, counts
        counts = self.share_of(traffic, 0, lambda *_: None, seconds=40)
        assert sum(counts[-10:]) >= 25, counts

    def test_callers_who_provoke_errors_move_nothing(self) -> None:
        traffic = self.ailing()

        def provoked(traffic: Traffic, worker: Worker) -> None:
            for status in (400, 413, 429):
                booking = traffic.pool.book(worker.column, 1, f"c{traffic.number} {status}")
                traffic.pool.response_started(booking, traffic.now, status=status)
                traffic.pool.release(booking)
            outcome = Outcome("x", 400, EngineError.CLIENT, 0.1)
            traffic.pool.outcome(worker, outcome, traffic.now)

        counts = self.share_of(traffic, 0, provoked, seconds=10)
        assert 30 < sum(counts) < 70
        assert traffic.pool.health.scores(traffic.now)[:4].tolist() == [100.0] * 4
