from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.tokens.cache import ByteBoundedLru


def lru(max_bytes: int = 10) -> ByteBoundedLru[str, int]:
    return ByteBoundedLru(max_bytes)


def test_a_kept_value_is_found_and_counted() -> None:
    cache = lru()
    cache.put("a", 1, 4)
    assert (cache.get("a"), cache.get("b")) == (1, None)
    assert (cache.hits, cache.misses, cache.bytes, len(cache)) == (1, 1, 4, 1)


def test_the_least_recently_used_leaves_first() -> None:
    cache = lru(10)
    for name in "abc":
        cache.put(name, 0, 3)
    cache.get("a")
    cache.put("d", 0, 3)
    assert [name for name in "abcd" if cache.get(name) is not None] == ["a", "c", "d"]
    assert cache.evictions == 1


def test_one_large_value_can_push_out_many() -> None:
    cache = lru(10)
    for name in "abc":
        cache.put(name, 0, 3)
    cache.put("d", 0, 10)
    assert (len(cache), cache.evictions, cache.bytes) == (1, 3, 10)


def test_a_value_as_large_as_the_cache_fits_and_a_larger_one_does_not() -> None:
    cache = lru(10)
    cache.put("a", 1, 10)
    cache.put("b", 2, 11)
    assert (cache.get("a"), cache.get("b")) == (1, None)


def test_a_value_replaced_by_one_too_large_is_gone() -> None:
    cache = lru(10)
    cache.put("a", 1, 5)
    cache.put("a", 2, 11)
    assert (cache.get("a"), cache.bytes, len(cache)) == (None, 0, 0)


def test_a_replaced_value_counts_once() -> None:
    cache = lru(10)
    cache.put("a", 1, 6)
    cache.put("a", 2, 7)
    assert (cache.get("a"), cache.bytes, len(cache)) == (2, 7, 1)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12), st.booleans())))
def test_the_bound_holds_under_any_order(steps: list[tuple[str, int, bool]]) -> None:
    """MM1: bytes are the sum of what is kept and never over the bound."""
    cache = lru(10)
    sizes: dict[str, int] = {}
    for name, size, write in steps:
        if write:
            cache.put(name, size, size)
            sizes[name] = size
        else:
            assert cache.get(name) in (None, sizes.get(name))
        kept = [sizes[key] for key in sizes if key in cache._entries]
        assert cache.bytes == sum(kept) <= 10
        assert len(cache) == len(kept)
