from __future__ import annotations

from workers.agent.hot_prefixes import HUSHED_S, MAX_COUNTED, HotPrefixes


def noted(*keys: int) -> HotPrefixes:
    hot = HotPrefixes()
    for key in keys:
        hot.note(key)
    return hot


def test_the_most_continued_come_first() -> None:
    hot = noted(1, 2, 2, 3, 3, 3)
    assert hot
    told = hot.take(0.0)
    assert (list(told.keys), list(told.counts)) == ([3, 2], [3, 2])
    assert not hot


def test_one_continuation_is_not_hot() -> None:
    assert not noted(1, 2, 3)


def test_no_more_than_32_are_told() -> None:
    hot = noted(*range(1, 101), *range(1, 101))
    assert len(hot.take(0.0).keys) == 32


def test_the_table_is_bounded_and_keeps_what_came_twice() -> None:
    hot = noted(7, 7, *range(100, 100 + 3 * MAX_COUNTED))
    assert len(hot._counts) <= MAX_COUNTED
    assert list(hot.take(0.0).keys) == [7]


def test_what_enough_others_hold_is_not_told_for_a_while() -> None:
    hot = noted(1, 1, 2, 2)
    assert hot.hush([1], 0.0) == 1
    assert list(hot.take(1.0).keys) == [2]
    assert hot.hush([1, 3], 1.0) == 1, "one of them is new"
    hot.note(1)
    hot.note(1)
    assert list(hot.take(HUSHED_S).keys) == []
    hot.note(1)
    hot.note(1)
    assert list(hot.take(1.0 + HUSHED_S).keys) == [1]


def test_hushed_prefixes_are_bounded_and_forgotten() -> None:
    hot = HotPrefixes()
    assert hot.hush(range(2 * MAX_COUNTED), 0.0) == MAX_COUNTED
    assert hot.hush([1], HUSHED_S) == 1
