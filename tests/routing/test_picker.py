from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.table import Bools
from extproc.routing.picker import Picker

PICKER = Picker(random.Random(1))


def flags(values: list[bool]) -> Bools:
    return np.array(values, dtype=bool)


def picked(
    costs: list[float],
    count: int = 3,
    first: list[bool] | None = None,
    others: list[bool] | None = None,
    picker: Picker = PICKER,
) -> list[int]:
    everywhere = [True] * len(costs)
    leaders, followers = flags(first or everywhere), flags(others or everywhere)
    return picker.pick(np.array(costs, dtype=float), leaders, followers, count)


def test_the_cheapest_come_first() -> None:
    assert picked([5, 1, 3, 2]) == [1, 3, 2]
    assert picked([5, 1, 3, 2], count=1) == [1]


def test_only_allowed_columns_are_picked() -> None:
    assert picked([1, 2, 3], first=[False, True, True], others=[False, True, True]) == [1, 2]
    assert picked([1, 2, 3], first=[False] * 3) == []


def test_the_leader_needs_a_slot_and_the_others_do_not() -> None:
    assert picked([1, 2, 3], first=[False, False, True]) == [2, 0, 1]


def test_the_costs_stay_as_they_were() -> None:
    costs = np.array([1.0, 1.0, 2.0])
    PICKER.pick(costs, flags([True] * 3), flags([True] * 3), 3)
    assert costs.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("count", [1, 3])
def test_each_of_equal_columns_leads_about_as_often(count: int) -> None:
    """LD5: ties are broken at random, over the equal ones only."""
    picker = Picker(random.Random(5))
    costs = [7.0, 2.0, 2.0, 9.0, 2.0]
    leaders = Counter(picked(costs, count, picker=picker)[0] for _ in range(3_000))
    assert set(leaders) == {1, 2, 4}
    assert all(900 < times < 1_100 for times in leaders.values())


def test_later_places_are_shared_by_equals_too() -> None:
    """LD5, RT1: the second and third choice of a pool of equals is not always the same."""
    picker = Picker(random.Random(5))
    lists = [picked([0.0] * 5, picker=picker) for _ in range(3_000)]
    for place in range(3):
        times = Counter(columns[place] for columns in lists)
        assert set(times) == set(range(5))
        assert all(500 < count < 700 for count in times.values())


def test_a_pool_wider_than_the_table_is_picked_from_in_whole() -> None:
    picker = Picker(random.Random(5))
    leaders = Counter(picked([0.0] * 9_000, 1, picker=picker)[0] // 3_000 for _ in range(300))
    assert all(60 < leaders[third] < 140 for third in range(3))


@given(
    workers=st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=12
    ),
    count=st.integers(1, 6),
)
def test_the_list_is_distinct_allowed_and_in_order(
    workers: list[tuple[int, bool, bool]], count: int
) -> None:
    """RT1."""
    costs = [float(cost) for cost, _, _ in workers]
    others = [usable for _, usable, _ in workers]
    first = [usable and has_slot for _, usable, has_slot in workers]
    columns = picked(costs, count, first, others)
    if not any(first):
        assert columns == []
        return
    assert len(columns) == len(set(columns)) == min(count, sum(others))
    leader, *rest = columns
    assert first[leader]
    assert costs[leader] == min(cost for cost, flag in zip(costs, first, strict=True) if flag)
    assert all(others[column] for column in rest)
    left = [costs[c] for c in range(len(costs)) if others[c] and c != leader]
    assert [costs[column] for column in rest] == sorted(left)[: count - 1]
