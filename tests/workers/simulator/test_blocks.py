from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.simulator.blocks import BlockManager


def taken(manager: BlockManager, count: int, hits: list[int] | None = None) -> list[int]:
    allocation = manager.allocate(count, hits or [])
    assert allocation is not None
    return allocation.blocks


def stored(manager: BlockManager, hashes: list[int]) -> list[int]:
    blocks = taken(manager, len(hashes))
    manager.store(blocks, hashes)
    return blocks


def test_a_freed_block_still_hits() -> None:
    manager = BlockManager(4)
    blocks = stored(manager, [1, 2])
    manager.release(blocks)
    assert repr(manager) == "<BlockManager used=0 free=4 cached=2>"
    assert manager.lookup([1, 2, 3]) == blocks
    assert taken(manager, 0, blocks) == []
    assert manager.usage == 0.5


def test_only_an_unbroken_run_from_the_first_block_hits() -> None:
    manager = BlockManager(4)
    stored(manager, [1, 2])
    assert manager.lookup([9, 2]) == []
    assert len(manager.lookup([1, 9, 2])) == 1


def test_the_tail_of_a_chain_is_evicted_first_and_the_oldest_chain_before_the_newer() -> None:
    manager = BlockManager(4)
    older, newer = stored(manager, [1, 2]), stored(manager, [3, 4])
    manager.release(older)
    manager.release(newer)
    evicted = [manager.allocate(1) for _ in range(4)]
    assert [allocation.evicted for allocation in evicted if allocation] == [[2], [1], [4], [3]]


def test_a_revived_block_is_not_evicted() -> None:
    manager = BlockManager(2)
    blocks = stored(manager, [1, 2])
    manager.release(blocks)
    taken(manager, 0, blocks[:1])
    allocation = manager.allocate(1)
    assert allocation is not None
    assert allocation.evicted == [2]
    assert manager.allocate(1) is None


def test_a_shared_block_stays_until_its_last_holder_leaves() -> None:
    manager = BlockManager(2)
    blocks = stored(manager, [1])
    taken(manager, 0, blocks)
    manager.release(blocks)
    assert manager.free == 1
    manager.release(blocks)
    assert manager.free == 2


def test_a_hash_stored_twice_is_removed_once_for_each_copy() -> None:
    manager = BlockManager(2)
    first, second = stored(manager, [7]), stored(manager, [7])
    manager.release(first)
    manager.release(second)
    allocation = manager.allocate(1)
    assert allocation is not None
    assert allocation.evicted == [7]
    assert manager.lookup([7]) == second
    allocation = manager.allocate(1)
    assert allocation is not None
    assert allocation.evicted == [7]
    assert manager.lookup([7]) == []


def test_hits_count_as_needed_when_they_wait_in_the_free_queue() -> None:
    manager = BlockManager(2)
    blocks = stored(manager, [1])
    manager.release(blocks)
    assert manager.allocate(2, blocks) is None
    assert repr(manager) == "<BlockManager used=0 free=2 cached=1>"


def test_a_block_that_is_not_held_cannot_be_released() -> None:
    manager = BlockManager(1)
    blocks = taken(manager, 1)
    manager.release(blocks)
    with pytest.raises(ValueError, match="is not held"):
        manager.release(blocks)


def test_the_cache_is_cleared_only_while_nobody_holds_a_block() -> None:
    manager = BlockManager(2)
    blocks = stored(manager, [1])
    assert not manager.clear()
    manager.release(blocks)
    assert manager.clear()
    assert manager.lookup([1]) == []
    allocation = manager.allocate(2)
    assert allocation is not None
    assert allocation.evicted == []


@given(
    size=st.integers(1, 6),
    moves=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 4), max_size=5)), max_size=40),
)
def test_no_order_of_moves_loses_or_shares_a_block(
    size: int, moves: list[tuple[bool, list[int]]]
) -> None:
    manager = BlockManager(size)
    live: list[list[int]] = []
    known: Counter[int] = Counter()
    for start, hashes in moves:
        if start:
            hits = manager.lookup(hashes)
            allocation = manager.allocate(len(hashes) - len(hits), hits)
            if allocation is not None:
                known.subtract(allocation.evicted)
                manager.store(allocation.blocks, hashes[len(hits) :])
                known.update(hashes[len(hits) :])
                live.append(hits + allocation.blocks)
        elif live:
            manager.release(live.pop(len(hashes) % len(live)))
        held = {block for blocks in live for block in blocks}
        assert manager.free == size - len(held)
        assert min(known.values(), default=0) >= 0
        assert manager.cached == sum(count > 0 for count in known.values())
    for blocks in live:
        manager.release(blocks)
    everything = manager.allocate(size)
    assert everything is not None
    assert sorted(everything.blocks) == list(range(size))
    assert Counter(everything.evicted) == +known
