from __future__ import annotations

import pytest

from extproc.routing.hot import HotPrefixes
from extproc.tokens.keyer import PromptKeys
from tests.support.builders import Fleet, keys_of, snapshot, text_blocks

TOKENS = text_blocks(1, 20)
SHARED = keys_of(TOKENS)


def test_a_steady_flow_settles_at_its_rate_and_fades_afterwards() -> None:
    hot = HotPrefixes(10)
    for step in range(1_500):
        hot.note(7, step / 5)
    assert hot.per_s(7, 300.0) == pytest.approx(5, rel=0.05)
    assert hot.per_s(7, 330.0) == pytest.approx(5 / 2.718, rel=0.05)
    assert hot.per_s(8, 300.0) == 0


def test_the_longest_unused_are_forgotten() -> None:
    """MM1."""
    hot = HotPrefixes(3)
    for key in (1, 2, 3, 1, 4):
        hot.note(key, 0.0)
    assert len(hot) == 3
    assert hot.per_s(2, 0.0) == 0
    assert hot.per_s(1, 0.0) > hot.per_s(4, 0.0) > 0


def test_the_top_comes_first() -> None:
    hot = HotPrefixes(10)
    for key, times in ((1, 2), (2, 5), (3, 1)):
        for _ in range(times):
            hot.note(key, 0.0)
    assert [key for key, _ in hot.top(2, 0.0)] == [2, 1]


class TestSurplus:
    """More holders than the cap: those that no longer get the prefix are told so."""

    def fleet(self, workers: int) -> Fleet:
        made = Fleet(workers=workers, routing={"replicas": {"max_holders": 2, "hot_per_s": 1.0}})
        for worker in made.workers:
            made.pool.snapshot(worker, snapshot(SHARED), 0.0)
        return made

    def told(self, fleet: Fleet, per_interval: int) -> list[list[int]]:
        hot = ((int(SHARED[-1]), per_interval),)
        return [fleet.scheduler.hot(fleet.served, worker, hot, 0.0) for worker in fleet.workers]

    def test_those_beyond_the_cap_are_told_and_get_no_more_of_it(self) -> None:
        fleet = self.fleet(5)
        told = self.told(fleet, 10)
        surplus = {w.address for w, keys in zip(fleet.workers, told, strict=True) if keys}
        assert len(surplus) == 3
        picked = {fleet.picked(PromptKeys(len(TOKENS) + 5, SHARED)) for _ in range(40)}
        assert not picked & surplus

    def test_enough_is_not_too_many(self) -> None:
        assert self.told(self.fleet(2), 10) == [[], []]

    def test_what_is_not_hot_is_nobodys_business(self) -> None:
        fleet = self.fleet(5)
        assert fleet.scheduler.hot(fleet.served, fleet.workers[0], ((1, 1),), 0.0) == []
        key = int(SHARED[-1])
        assert fleet.served.router.by_policy.surplus(0, [key], 0.0) == []
