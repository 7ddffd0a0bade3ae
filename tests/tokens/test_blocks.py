from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from extproc.tokens.blocks import block_keys, chain_keys, key_namespace, reusable_blocks, root_key

GOLDEN_ROOT = 10909697018002220269
GOLDEN_KEYS = [6694466216047661522, 2052470283595895581]
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


class TestKeys:
    def test_a_key_is_the_hash_of_its_tokens_seeded_by_the_key_before(self) -> None:
        """The chain that agents rebuild from KV events, spelled out."""
        root = root_key(1, 2)
        first = xxh3_64_intdigest(packed([10, 11]), root)
        second = xxh3_64_intdigest(packed([12, 13]), first)
        assert block_keys(root, [10, 11, 12, 13, 14], 2).tolist() == [first, second]

    def test_golden_keys_hold_in_every_process(self) -> None:
        """BL1: no seed of this interpreter, no byte order of this machine."""
        root = root_key(key_namespace("rev", "fingerprint"), 4, "lora", "salt")
        assert root == GOLDEN_ROOT
        assert block_keys(root, range(9), 4).tolist() == GOLDEN_KEYS

    @given(ids=IDS, size=st.integers(1, 6), cut=st.integers(0, 40))
    def test_a_chain_continues_from_any_block(self, ids: list[int], size: int, cut: int) -> None:
        whole = chain_keys(9, packed(ids), size)
        blocks = min(cut, len(whole))
        parent = whole[blocks - 1] if blocks else 9
        assert whole[blocks:] == chain_keys(parent, packed(ids[blocks * size :]), size)

    @given(ids=IDS, other=IDS, size=st.integers(1, 4))
    def test_keys_agree_exactly_as_far_as_the_tokens(
        self, ids: list[int], other: list[int], size: int
    ) -> None:
        ours, theirs = (chain_keys(5, packed(text), size) for text in (ids, other))
        same = 0
        while ids[same * size : (same + 1) * size] == other[same * size : (same + 1) * size]:
            if (same + 1) * size > min(len(ids), len(other)):
                break
            same += 1
        assert ours[:same] == theirs[:same]
        assert not set(ours[same:]) & set(theirs)

    def test_a_partial_block_has_no_key(self) -> None:
        assert chain_keys(1, packed([1, 2, 3]), 4) == []
        assert len(chain_keys(1, packed([1, 2, 3, 4, 5]), 4)) == 1


class TestLastToken:
    @pytest.mark.parametrize(
        ("tokens", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (96, 23)]
    )
    def test_the_engine_computes_it_always(self, tokens: int, blocks: int) -> None:
        """Observed on vLLM: a 96-token prompt at block size 32 hits 64 tokens."""
        assert reusable_blocks(tokens, 4) == blocks
        assert len(block_keys(1, range(tokens), 4)) == blocks

    def test_ids_may_come_as_an_array_of_any_kind(self) -> None:
        ids = [1, 2, 3, 4, 5]
        expected = block_keys(1, ids, 2).tolist()
        for kind in ("<u4", ">u4", np.int64):
            assert block_keys(1, np.array(ids, dtype=kind), 2).tolist() == expected


class TestRoots:
    def test_base_adapters_and_salts_have_disjoint_keys(self) -> None:
        """HA1: one 512-token prompt, five ways to run it, five disjoint key lists."""
        ways = [("", ""), ("lora-a", ""), ("lora-b", ""), ("", "s1"), ("", "s2")]
        lists = [block_keys(root_key(3, 16, *way), range(512), 16).tolist() for way in ways]
        assert [len(keys) for keys in lists] == [31] * 5
        assert len(set().union(*lists)) == 31 * 5

    def test_an_adapter_is_not_a_salt_and_names_do_not_run_together(self) -> None:
        roots = {root_key(3, 16, *way) for way in [("a", "b"), ("b", "a"), ("ab", ""), ("", "ab")]}
        assert len(roots) == 4

    def test_block_size_and_namespace_are_part_of_the_root(self) -> None:
        assert len({root_key(3, 16), root_key(3, 32), root_key(4, 16)}) == 3

    def test_revision_and_tokenizer_are_part_of_the_namespace(self) -> None:
        names = [("r", "f"), ("r2", "f"), ("r", "f2"), ("rf", ""), ("", "rf")]
        assert len({key_namespace(*name) for name in names}) == 5

    def test_lone_surrogates_make_a_root_too(self) -> None:
        assert root_key(1, 1, "", "\ud800") != root_key(1, 1, "", "\ud801")
