from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.tokens.blocks import block_keys, root_key
from workers.agent.block_ledger import BlockLedger, Left
from workers.agent.kv_events import Cleared, Removed, Stored

NAMESPACE = 7
SIZE = 4


def ledger_for(capacity: int = 100) -> BlockLedger:
    return BlockLedger(NAMESPACE, SIZE, capacity, count(1).__next__)


def tokens(*blocks: int) -> list[int]:
    return [block * 10 + index for block in blocks for index in range(SIZE)]


def stored(hashes: list[int | bytes], blocks: list[int], **fields: Any) -> Stored:
    return Stored(hashes, token_ids=tokens(*blocks), block_size=SIZE, **fields)


def keys_of(*blocks: int, adapter: str = "", salt: str = "") -> set[int]:
    """What the scheduler derives for a prompt of these blocks and one token more."""
    root = root_key(NAMESPACE, SIZE, adapter, salt)
    return set(block_keys(root, [*tokens(*blocks), 1], SIZE).tolist())


def live(ledger: BlockLedger) -> set[int]:
    return set(ledger.live_keys().tolist())


def test_keys_are_those_that_the_scheduler_derives_from_the_same_tokens() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1, 2], [1, 2]))
    changes = ledger.apply(stored([b"3"], [3], parent_hash=2))
    assert live(ledger) == keys_of(1, 2, 3)
    assert set(changes.added) == keys_of(1, 2, 3) - keys_of(1, 2)
    assert ledger.live_keys().dtype == np.uint64


def test_a_block_stored_four_times_is_gone_after_four_removals() -> None:
    ledger = ledger_for()
    for _ in range(4):
        ledger.apply(stored([1], [1]))
    removed = [len(ledger.apply(Removed([1])).removed) for _ in range(4)]
    assert removed == [0, 0, 0, 1]
    assert len(ledger) == 0


def test_a_key_lives_while_one_of_its_hashes_does() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1], [1]))
    assert ledger.apply(stored([2], [1])).added == []
    assert ledger.apply(Removed([1])).removed == []
    assert live(ledger) == keys_of(1)
    assert set(ledger.apply(Removed([2])).removed) == keys_of(1)


def test_adapter_and_salt_give_disjoint_keys() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1, 2], [1, 2]))
    ledger.apply(stored([3, 4], [1, 2], lora_name="ad1", extra_keys=[["ad1"], ["ad1"]]))
    ledger.apply(stored([5, 6], [1, 2], extra_keys=[["zz"], None]))
    ledger.apply(stored([7, 8], [1, 2], lora_name="ad1", extra_keys=[["ad1", "zz"], ["ad1"]]))
    wanted = [
        keys_of(1, 2),
        keys_of(1, 2, adapter="ad1"),
        keys_of(1, 2, salt="zz"),
        keys_of(1, 2, adapter="ad1", salt="zz"),
    ]
    assert live(ledger) == set().union(*wanted)
    assert len(ledger) == sum(map(len, wanted)) == 8


def test_a_salt_that_equals_the_adapters_name_is_still_a_salt() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1], [1], lora_name="ad1", extra_keys=[["ad1", "ad1"]]))
    assert live(ledger) == keys_of(1, adapter="ad1", salt="ad1")


@pytest.mark.parametrize("extra", [["a", "b"], [["image", 3]], [7], [None]])
def test_a_first_block_with_unknown_extra_keys_is_left_out_with_its_chain(extra: list[Any]) -> None:
    ledger = ledger_for()
    ledger.apply(stored([1, 2], [1, 2], extra_keys=[extra, None]))
    ledger.apply(stored([3], [3], parent_hash=2))
    assert len(ledger) == 0
    assert ledger.left == {Left.EXTRA_KEYS: 2, Left.UNKNOWN_PARENT: 1}


def test_an_image_in_the_middle_ends_the_chain_before_it() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1, 2, 3], [1, 2, 3], extra_keys=[None, ["image"], None]))
    ledger.apply(stored([4], [4], parent_hash=3))
    assert live(ledger) == keys_of(1)
    assert ledger.left == {Left.EXTRA_KEYS: 2, Left.UNKNOWN_PARENT: 1}


def test_a_string_on_a_continuing_block_is_no_salt() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1], [1]))
    ledger.apply(stored([2], [2], parent_hash=1, extra_keys=[["image"]]))
    assert live(ledger) == keys_of(1)


def test_an_adapter_known_only_by_number_is_left_out() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1], [1], lora_id=3))
    assert ledger.left == {Left.EXTRA_KEYS: 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"medium": "MOON"}, Left.MEDIUM),
        ({"medium": "CPU", "locality": "REMOTE"}, Left.MEDIUM),
        ({"group_idx": 1}, Left.GROUP),
        ({"spec_kind": "sliding_window"}, Left.GROUP),
    ],
)
def test_only_full_attention_blocks_on_the_accelerator_count(
    fields: dict[str, Any], reason: Left
) -> None:
    ledger = ledger_for()
    ledger.apply(stored([1], [1], **fields))
    assert len(ledger) == 0
    assert ledger.left == {reason: 1}


@pytest.mark.parametrize("event", [Removed([1], "CPU"), Removed([1], "GPU", 1), Removed([9])])
def test_a_removal_elsewhere_removes_nothing(event: Removed) -> None:
    ledger = ledger_for()
    ledger.apply(stored([1], [1], medium="gpu", group_idx=0, spec_kind="full_attention"))
    ledger.apply(event)
    assert live(ledger) == keys_of(1)


@pytest.mark.parametrize("ids", [[], [1, 2, 3], [-1] * 4, [2**32] * 4])
def test_blocks_with_unusable_token_ids_are_left_out(ids: list[int]) -> None:
    ledger = ledger_for()
    ledger.apply(Stored([1], token_ids=ids, block_size=SIZE))
    assert len(ledger) == 0
    assert ledger.left == {Left.MALFORMED: 1}


def test_another_block_size_empties_the_ledger_until_it_is_cleared() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1], [1]))
    first = ledger.epoch
    for block_hash in (2, 3):
        ledger.apply(Stored([block_hash], token_ids=list(range(8)), block_size=8))
    ledger.apply(stored([4], [4]))
    assert (len(ledger), ledger.mismatched, ledger.engine_block_size_tokens) == (0, True, 8)
    assert ledger.epoch == first + 1
    assert ledger.left == {Left.BLOCK_SIZE: 3}
    ledger.clear()
    ledger.apply(stored([4], [4]))
    assert (live(ledger), ledger.mismatched) == (keys_of(4), False)


def test_a_clear_empties_the_ledger_in_a_new_epoch() -> None:
    ledger = ledger_for()
    ledger.apply(stored([1, 2], [1, 2]))
    before = ledger.epoch
    ledger.apply(Cleared())
    assert len(ledger) == 0
    assert ledger.epoch == before + 1
    ledger.apply(stored([3], [3], parent_hash=2))
    assert ledger.left == {Left.UNKNOWN_PARENT: 1}


def test_over_capacity_the_oldest_chain_is_dropped_from_its_end() -> None:
    ledger = ledger_for(capacity=4)
    ledger.apply(stored([1, 2], [1, 2]))
    ledger.apply(stored([3, 4], [3, 4]))
    changes = ledger.apply(stored([5], [5], parent_hash=4))
    assert live(ledger) == keys_of(1) | keys_of(3, 4, 5)
    assert set(changes.removed) == keys_of(1, 2) - keys_of(1)
    assert ledger.left == {Left.CAPACITY: 1}


def test_over_capacity_a_shared_beginning_outlives_its_older_ends() -> None:
    ledger = ledger_for(capacity=3)
    ledger.apply(stored([1], [1]))
    for block in range(2, 20):
        ledger.apply(stored([block], [block], parent_hash=1))
    assert keys_of(1) <= live(ledger)
    assert keys_of(1, 19) <= live(ledger)
    assert len(ledger) == 3


def test_a_chain_longer_than_the_capacity_keeps_its_beginning() -> None:
    ledger = ledger_for(capacity=3)
    changes = ledger.apply(stored([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]))
    assert live(ledger) == set(changes.added) == keys_of(1, 2, 3)


# Chains 1-2-3 and 1-2-4, each block under two hashes: h and h + 100.
CHAINS = {1: (None, (1,)), 2: (1, (1, 2)), 3: (2, (1, 2, 3)), 4: (2, (1, 2, 4))}
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "clear", "junk"]), st.sampled_from([*CHAINS])),
    max_size=60,
)


@given(OPERATIONS, st.sampled_from([2, 3, 100]), st.data())
def test_live_keys_are_those_with_copies_left_and_never_more_than_fit(
    operations: list[tuple[str, int]], capacity: int, data: st.DataObject
) -> None:
    ledger = ledger_for(capacity)
    copies: Counter[int] = Counter()
    told: set[int] = set()
    for operation, block in operations:
        alias = data.draw(st.sampled_from([0, 100]))
        parent, path = CHAINS[block]
        if operation == "store":
            parent_hash = None if parent is None else parent + alias
            event = stored([block + alias], [path[-1]], parent_hash=parent_hash)
            if parent_hash is None or copies[parent_hash]:
                copies[block + alias] += 1
        elif operation == "remove":
            event = Removed([block + alias])
            copies[block + alias] = max(0, copies[block + alias] - 1)
        elif operation == "clear":
            event = Cleared()
            copies.clear()
            told.clear()
        else:
            event = Stored([block], token_ids=[1], block_size=SIZE, medium="MOON")
        before = live(ledger)
        changes = ledger.apply(event)
        told.update(changes.added)
        assert live(ledger) <= told
        if operation != "clear":
            assert len(before | set(changes.added)) >= len(live(ledger))
        assert len(ledger) <= capacity
    expected = [
        max(keys_of(*CHAINS[name % 100][1]) - keys_of(*CHAINS[name % 100][1][:-1]))
        for name, number in copies.items()
        if number
    ]
    if capacity == 100:
        assert live(ledger) == set(expected)
    else:
        assert ledger.left[Left.CAPACITY] or live(ledger) == set(expected)
