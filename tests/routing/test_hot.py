from __future__ import annotations

import pytest

from extproc.routing.hot import HotPrefixes


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
