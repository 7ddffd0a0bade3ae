"""Tiers, ranks, groups and partial events of the block ledger."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.agent.test_block_ledger import (
    CHAINS,
    SIZE,
    keys_of,
    ledger_for,
    live,
    stored,
    tokens,
)
from workers.agent.block_ledger import BlockLedger, Left
from workers.agent.kv_events import BlockHash, Cleared, Removed, Stored
from workers.agent.tiers import Tier


def host(ledger: BlockLedger) -> set[int]:
    return set(ledger.live_keys(Tier.HOST).tolist())


def offloaded(hashes: list[BlockHash], **fields: Any) -> Stored:
    """As vLLM's offloading tells blocks: without tokens and parents."""
    return Stored(hashes, medium="CPU", **fields)


class TestTiers:
    def test_an_offloaded_block_takes_its_key_from_the_device(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1, 2], [1, 2], extra_keys=[["salt"], None]))
        changes = ledger.apply(offloaded([1, 2]))
        assert changes.tier is Tier.HOST
        assert set(changes.added) == host(ledger) == live(ledger) == keys_of(1, 2, salt="salt")

    def test_each_tier_forgets_on_its_own(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]))
        ledger.apply(offloaded([1]))
        assert set(ledger.apply(Removed([1], "GPU")).removed) == keys_of(1)
        assert (live(ledger), host(ledger)) == (set(), keys_of(1))
        ledger.apply(Removed([1], "CPU"))
        assert host(ledger) == set()

    def test_a_chain_goes_on_from_a_parent_that_only_the_host_has(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]))
        ledger.apply(offloaded([1]))
        ledger.apply(Removed([1], "GPU"))
        ledger.apply(stored([2], [2], parent_hash=1))
        assert live(ledger) == keys_of(1, 2) - keys_of(1)

    def test_an_offloaded_block_that_nobody_knows_is_left_out(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]))
        ledger.apply(offloaded([1, 9]))
        assert host(ledger) == keys_of(1)
        assert ledger.left == {Left.MALFORMED: 1}

    def test_one_that_tells_its_tokens_and_extra_keys_is_known_by_them(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1, 2], [1, 2], medium="cpu_pinned", extra_keys=[None, None]))
        assert (host(ledger), live(ledger)) == (keys_of(1, 2), set())

    def test_one_that_may_hide_a_salt_is_left_out(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1], medium="CPU"))
        assert host(ledger) == set()
        assert ledger.left == {Left.EXTRA_KEYS: 1}

    def test_storage_and_memory_are_copies_of_one_tier(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]))
        ledger.apply(offloaded([1]))
        ledger.apply(Stored([1], medium="STORAGE", locality="LOCAL"))
        ledger.apply(Removed([1], "CPU"))
        assert host(ledger) == keys_of(1)

    def test_what_another_machine_stores_is_nobodys(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]))
        ledger.apply(Stored([1], medium="STORAGE", locality="REMOTE"))
        ledger.apply(Removed([1], "STORAGE", locality="REMOTE"))
        assert (host(ledger), live(ledger)) == (set(), keys_of(1))

    def test_each_tier_is_kept_within_the_capacity(self) -> None:
        ledger = ledger_for(capacity=2)
        for block in (1, 2, 3):
            ledger.apply(stored([block], [block]))
            ledger.apply(offloaded([block]))
        assert live(ledger) == host(ledger) == keys_of(2) | keys_of(3)


class TestRanks:
    def test_the_same_hash_of_two_ranks_is_two_blocks(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]), rank=0)
        ledger.apply(stored([1], [2]), rank=1)
        assert live(ledger) == keys_of(1) | keys_of(2)
        ledger.apply(Removed([1]), rank=1)
        assert live(ledger) == keys_of(1)

    def test_a_key_lives_while_one_rank_holds_it(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]), rank=0)
        assert ledger.apply(stored([7], [1]), rank=1).added == []
        assert ledger.apply(Removed([1]), rank=0).removed == []
        assert live(ledger) == keys_of(1)

    def test_a_parent_of_another_rank_is_unknown(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]), rank=0)
        ledger.apply(stored([2], [2], parent_hash=1), rank=1)
        assert ledger.left == {Left.UNKNOWN_PARENT: 1}

    def test_a_clear_of_one_rank_keeps_the_others_in_a_new_epoch(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1, 2], [1, 2]), rank=0)
        ledger.apply(offloaded([1]), rank=0)
        ledger.apply(stored([3], [3]), rank=1)
        before = ledger.epoch
        ledger.apply(Cleared(), rank=0)
        assert (live(ledger), host(ledger), ledger.epoch) == (keys_of(3), set(), before + 1)
        ledger.clear()
        assert live(ledger) == set()


class TestShapes:
    @pytest.mark.parametrize("kind", ["mla_attention", "sink_full_attention"])
    def test_other_kinds_of_full_attention_count(self, kind: str) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1], spec_kind=kind))
        assert live(ledger) == keys_of(1)

    def test_of_a_hybrid_model_the_first_full_attention_group_counts(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1], group_idx=0, spec_kind="sliding_window"))
        ledger.apply(stored([1], [1], group_idx=2, spec_kind="full_attention"))
        ledger.apply(stored([2], [2], group_idx=3, spec_kind="full_attention"))
        ledger.apply(Removed([1], "GPU", 0))
        assert live(ledger) == keys_of(1)
        ledger.apply(Removed([1], "GPU", 2))
        assert live(ledger) == set()
        assert ledger.left == {Left.GROUP: 3}

    def test_fewer_tokens_than_blocks_cannot_be_placed(self) -> None:
        ledger = ledger_for()
        ledger.apply(Stored([1, 3], token_ids=tokens(1, 2, 3), block_size=SIZE))
        assert live(ledger) == set()
        assert ledger.left == {Left.MALFORMED: 2}

    def test_a_block_cut_short_is_left_out_and_the_rest_stays(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1], [1]))
        ledger.apply(Stored([2], 1, token_ids=[1, 2], block_size=2))
        assert (live(ledger), ledger.mismatched) == (keys_of(1), False)
        assert ledger.left == {Left.BLOCK_SIZE: 1}

    def test_one_hash_twice_in_an_event_is_two_copies(self) -> None:
        ledger = ledger_for()
        ledger.apply(stored([1, 1], [1, 1]))
        ledger.apply(Removed([1]))
        assert len(ledger) == 1
        ledger.apply(Removed([1]))
        assert len(ledger) == 0

    def test_a_continuation_of_an_earlier_block_is_told_and_a_repeat_is_not(self) -> None:
        ledger = ledger_for()
        assert ledger.apply(stored([1, 2], [1, 2])).continued is None
        (end,) = keys_of(1, 2) - keys_of(1)
        assert ledger.apply(stored([3], [3], parent_hash=2)).continued == end
        assert ledger.apply(stored([4], [4], parent_hash=2)).continued == end
        assert ledger.apply(stored([4], [4], parent_hash=2)).continued is None


MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear"]),
        st.sampled_from([*CHAINS]),
        st.sampled_from(list(Tier)),
        st.sampled_from([0, 1]),
    ),
    max_size=60,
)


@given(STEPS)
def test_a_key_is_live_in_a_tier_while_any_rank_has_a_copy_there(
    steps: list[tuple[str, int, Tier, int]],
) -> None:
    ledger = ledger_for()
    copies: Counter[tuple[Tier, int, int]] = Counter()
    told: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    epoch = ledger.epoch
    for step, block, tier, rank in steps:
        parent, path = CHAINS[block]
        known = any(copies[each, rank, block] for each in Tier)
        if step == "store":
            event = stored(
                [block], [path[-1]], parent_hash=parent, medium=MEDIA[tier], extra_keys=[None]
            )
            if known or parent is None or any(copies[each, rank, parent] for each in Tier):
                copies[tier, rank, block] += 1
            changes = ledger.apply(event, rank)
        elif step == "remove":
            copies[tier, rank, block] = max(0, copies[tier, rank, block] - 1)
            changes = ledger.apply(Removed([block], MEDIA[tier]), rank)
        else:
            for name in [name for name in copies if name[1] == rank]:
                del copies[name]
            changes = ledger.apply(Cleared(), rank)
        told[changes.tier] |= set(changes.added)
        assert told[changes.tier].issuperset(changes.removed)
        told[changes.tier] -= set(changes.removed)
        for each in Tier:
            wanted = {
                max(keys_of(*CHAINS[name][1]) - keys_of(*CHAINS[name][1][:-1]))
                for (place, _, name), number in copies.items()
                if number and place is each
            }
            assert set(ledger.live_keys(each).tolist()) == wanted
            if ledger.epoch == epoch:
                assert told[each] == wanted
            else:
                told[each] = set(wanted)
        epoch = ledger.epoch
