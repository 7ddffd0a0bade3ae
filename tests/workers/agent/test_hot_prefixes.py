from __future__ import annotations

from workers.agent.hot_prefixes import MAX_COUNTED, HotPrefixes


def noted(*keys: int) -> HotPrefixes:
    hot = HotPrefixes()
    for key in keys:
        hot.note(key)
    return hot


def test_the_most_continued_come_first() -> None:
    hot = noted(1, 2, 2, 3, 3, 3)
    assert hot
    told = hot.take()
    assert (list(told.keys), list(told.counts)) == ([3, 2], [3, 2])
    assert not hot


def test_one_continuation_is_not_hot() -> None:
    assert not noted(1, 2, 3)


def test_no_more_than_32_are_told() -> None:
    hot = noted(*range(1, 101), *range(1, 101))
    assert len(hot.take().keys) == 32


def test_the_table_is_bounded_and_keeps_what_came_twice() -> None:
    hot = noted(7, 7, *range(100, 100 + 3 * MAX_COUNTED))
    assert len(hot._counts) <= MAX_COUNTED
    assert list(hot.take().keys) == [7]
