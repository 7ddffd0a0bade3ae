from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.picker import pick


def picked(
    costs: list[float], count: int = 3, allowed: list[bool] | None = None, seed: int = 1
) -> list[int]:
    flags = np.array([True] * len(costs) if allowed is None else allowed, dtype=bool)
    return pick(np.array(costs, dtype=float), flags, count, random.Random(seed))


def test_the_cheapest_come_first() -> None:
    assert picked([5, 1, 3, 2]) == [1, 3, 2]
    assert picked([5, 1, 3, 2], count=1) == [1]


def test_only_allowed_columns_are_picked() -> None:
    assert picked([1, 2, 3], allowed=[False, True, True]) == [1, 2]
    assert picked([1, 2, 3], allowed=[False, False, True]) == [2]
    assert picked([1, 2, 3], allowed=[False] * 3) == []


def test_the_costs_stay_as_they_were() -> None:
    costs = np.array([1.0, 1.0, 2.0])
    pick(costs, np.array([True] * 3), 3, random.Random(1))
    assert costs.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("count", [1, 3])
def test_each_of_equal_columns_leads_about_as_often(count: int) -> None:
    """LD5: ties are broken at random, over the equal ones only."""
    rng = random.Random(5)
    costs = np.array([7.0, 2.0, 2.0, 9.0, 2.0])
    leaders = Counter(pick(costs, np.ones(5, dtype=bool), count, rng)[0] for _ in range(3_000))
    assert set(leaders) == {1, 2, 4}
    assert all(900 < times < 1_100 for times in leaders.values())


def test_later_places_are_shared_by_equals_too() -> None:
    """LD5, RT1: the second and third choice of a pool of equals is not always the same."""
    rng = random.Random(5)
    lists = [pick(np.zeros(5), np.ones(5, dtype=bool), 3, rng) for _ in range(3_000)]
    for place in range(3):
        times = Counter(columns[place] for columns in lists)
        assert set(times) == set(range(5))
        assert all(400 < count < 800 for count in times.values())


@given(
    workers=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12),
    count=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_the_list_is_distinct_allowed_and_in_order(
    workers: list[tuple[int, bool]], count: int, seed: int
) -> None:
    """RT1."""
    costs = [float(cost) for cost, _ in workers]
    allowed = [flag for _, flag in workers]
    columns = picked(costs, count, allowed, seed)
    assert len(columns) == len(set(columns)) == min(count, sum(allowed))
    assert all(allowed[column] for column in columns)
    chosen = [costs[column] for column in columns]
    assert chosen == sorted(cost for cost, flag in workers if flag)[:count]
