from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from extproc.cache.digest import BlockDigest, DigestShape
from extproc.tokens.blocks import Keys
from workers.agent.counted_digest import CountedDigest

SHAPE = DigestShape(20, 0.05)


def keys(numbers: set[int]) -> Keys:
    return np.array(sorted(numbers), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def plain(numbers: set[int]) -> bytes:
    digest = BlockDigest(20, 0.05)
    digest.add_keys(keys(numbers))
    return digest.packed()


def test_it_packs_to_the_bytes_of_the_plain_filter() -> None:
    assert CountedDigest(SHAPE, keys({1, 2, 3})).packed() == plain({1, 2, 3})


@given(st.lists(st.sets(st.integers(1, 20)), min_size=1, max_size=20))
def test_cleared_bits_and_added_keys_bring_a_plain_filter_up_to_date(
    sets: list[set[int]],
) -> None:
    counted = CountedDigest(SHAPE, keys(sets[0]))
    reader = np.unpackbits(np.frombuffer(counted.packed(), dtype=np.uint8), bitorder="little")
    for before, after in itertools.pairwise(sets):
        added = keys(after - before)
        cleared = counted.change(added, keys(before - after))
        reader[cleared] = 0
        reader[SHAPE.positions(added)] = 1
        assert np.packbits(reader, bitorder="little").tobytes() == plain(after)
        assert counted.count == len(after)
        assert cleared.dtype == np.dtype("<u4")


def test_a_bit_under_many_keys_falls_with_the_last() -> None:
    one = keys({1})
    counted = CountedDigest(SHAPE, np.repeat(one, 1_000))
    assert len(counted.change(keys(set()), np.repeat(one, 999))) == 0
    assert len(counted.change(keys(set()), one)) == SHAPE.num_slices
