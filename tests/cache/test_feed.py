from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.cache.digest import MAX_CAPACITY_BLOCKS
from extproc.cache.feed import Delta, DigestFeed
from extproc.cache.index import PrefixIndex
from extproc.errors import DigestError
from extproc.tokens.blocks import Keys
from tests.support.builders import (
    BLOCK,
    CAPACITY,
    delta,
    keys_of,
    no_keys,
    shape,
    snapshot,
    text_blocks,
)

X = keys_of(text_blocks(1, 6))
Y = keys_of(text_blocks(2, 6))


class Column:
    """A worker's column and its feed."""

    def __init__(self) -> None:
        self.index = PrefixIndex(shape(), 1_000)
        self.number = self.index.add_column()
        self.feed = DigestFeed(self.index, self.number, BLOCK)

    def held(self, keys: Keys) -> int:
        return int(self.index.longest_runs(keys)[self.number])

    @property
    def empty(self) -> bool:
        state = (self.feed.count, self.feed.updated_at, self.index.digest_fill(self.number))
        return state == (0, None, 0.0)


@pytest.fixture
def column() -> Column:
    return Column()


class TestSnapshots:
    def test_a_snapshot_fills_the_column(self, column: Column) -> None:
        assert column.empty
        column.feed.apply_snapshot(snapshot(X, epoch=7), now=3.0)
        assert column.held(X) == 6
        assert (column.feed.epoch, column.feed.count, column.feed.updated_at) == (7, 6, 3.0)

    def test_a_newer_one_takes_its_place(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        column.feed.apply_snapshot(snapshot(Y, sequence=2), now=2.0)
        assert (column.held(X), column.held(Y)) == (0, 6)

    def test_a_clear_is_a_new_epoch_with_an_empty_digest(self, column: Column) -> None:
        """CI1: digest and credit of the former engine life are gone, whatever its sequence."""
        column.feed.apply_snapshot(snapshot(X, sequence=9), now=1.0)
        column.index.overlay(column.number, Y)
        column.feed.apply_snapshot(snapshot(epoch=2, sequence=1), now=2.0)
        assert (column.held(X), column.held(Y)) == (0, 0)
        assert (column.feed.epoch, column.feed.count) == (2, 0)

    def test_the_same_epoch_keeps_what_was_just_routed(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        column.index.overlay(column.number, Y)
        column.feed.apply_snapshot(snapshot(X, sequence=2), now=2.0)
        assert (column.held(X), column.held(Y)) == (6, 6)

    @pytest.mark.parametrize(("epoch", "sequence"), [(5, 5), (5, 4), (4, 9), (0, 0)])
    def test_one_that_is_not_newer_is_ignored(
        self, column: Column, epoch: int, sequence: int
    ) -> None:
        """CI1."""
        column.feed.apply_snapshot(snapshot(X, epoch=5, sequence=5), now=1.0)
        column.feed.apply_snapshot(snapshot(Y, epoch=epoch, sequence=sequence), now=2.0)
        assert (column.held(X), column.held(Y)) == (6, 0)
        assert (column.feed.epoch, column.feed.updated_at) == (5, 1.0)

    def test_a_new_stream_numbers_afresh(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(X, epoch=5, sequence=5), now=1.0)
        column.feed.open_stream()
        assert column.held(X) == 6
        column.feed.apply_snapshot(snapshot(Y, epoch=5, sequence=1), now=2.0)
        assert (column.held(X), column.held(Y)) == (0, 6)


class TestRefusedSnapshots:
    """BL1, reader side: refused whole, the column empty, no memory taken."""

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ({"version": 2}, "parameters"),
            ({"hash_name": "md5"}, "parameters"),
            ({"block_size_tokens": 16}, "parameters"),
            ({"capacity": CAPACITY + 1}, "parameters"),
            ({"capacity": 2**40}, "parameters"),
            ({"capacity": MAX_CAPACITY_BLOCKS}, "parameters"),
            ({"error_rate": 0.002}, "parameters"),
            ({"error_rate": float("nan")}, "parameters"),
            ({"num_slices": 3}, "parameters"),
            ({"bits_per_slice": 2**60}, "parameters"),
            ({"bits": snapshot(Y).bits[:-1]}, "bytes"),
            ({"bits": b""}, "bytes"),
            ({"count": CAPACITY + 1}, "claims"),
            ({"checksum": 1}, "checksum"),
            ({"bits": snapshot(Y).bits[:-1] + b"\xff"}, "past its end"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    def test_any_mismatch_is_refused_and_empties_the_column(
        self, column: Column, fault: dict[str, Any], message: str
    ) -> None:
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        wrong = snapshot(Y, sequence=2, **fault)
        tracemalloc.start()
        try:
            with pytest.raises(DigestError, match=message):
                column.feed.apply_snapshot(wrong, now=2.0)
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()
        assert column.empty
        assert (column.held(X), column.held(Y)) == (0, 0)

    def test_after_a_refusal_only_a_snapshot_helps(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        with pytest.raises(DigestError):
            column.feed.apply_snapshot(snapshot(Y, sequence=2, version=9), now=2.0)
        with pytest.raises(DigestError, match="does not follow"):
            column.feed.apply_delta(delta(Y, sequence=3), now=3.0)
        column.feed.apply_snapshot(snapshot(Y, sequence=4), now=4.0)
        assert column.held(Y) == 6


class TestDeltas:
    def test_keys_are_added_in_order(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(X[:2]), now=1.0)
        column.feed.apply_delta(delta(X[2:4]), now=2.0)
        column.feed.apply_delta(delta(X[4:], sequence=3), now=3.0)
        assert column.held(X) == 6
        assert (column.feed.count, column.feed.updated_at) == (6, 3.0)

    def test_an_empty_one_is_a_sign_of_life(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        column.feed.apply_delta(delta(no_keys()), now=5.0)
        assert (column.held(X), column.feed.updated_at) == (6, 5.0)

    @pytest.mark.parametrize(("epoch", "sequence"), [(1, 1), (1, 3), (2, 2), (0, 2)])
    def test_a_gap_or_another_epoch_is_refused(
        self, column: Column, epoch: int, sequence: int
    ) -> None:
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        with pytest.raises(DigestError, match=f"{epoch}/{sequence} does not follow 1/2"):
            column.feed.apply_delta(delta(Y, epoch=epoch, sequence=sequence), now=2.0)
        assert (column.held(X), column.held(Y), column.feed.updated_at) == (6, 0, 1.0)

    def test_none_comes_before_a_snapshot(self, column: Column) -> None:
        with pytest.raises(DigestError, match="does not follow 0/None"):
            column.feed.apply_delta(delta(X, epoch=0, sequence=1), now=1.0)
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        column.feed.open_stream()
        with pytest.raises(DigestError, match="does not follow 1/None"):
            column.feed.apply_delta(delta(Y), now=2.0)

    def test_half_a_key_is_refused(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        with pytest.raises(DigestError, match="delta has 15 bytes"):
            column.feed.apply_delta(Delta(1, 2, bytes(15)), now=2.0)

    def test_keys_that_left_are_gone_with_their_bits(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(np.concatenate([X, Y])), now=1.0)
        bits = set(column.index.shape.positions(X).reshape(-1).tolist())
        bits -= set(column.index.shape.positions(Y).reshape(-1).tolist())
        cleared = np.array(sorted(bits), dtype="<u4").tobytes()
        column.feed.apply_delta(Delta(1, 2, b"", cleared, len(X)), now=2.0)
        assert (column.held(X), column.held(Y), column.feed.count) == (0, 6, 6)

    @pytest.mark.parametrize(
        ("cleared", "removed", "why"),
        [
            (bytes(3), 0, "delta clears 3 bytes"),
            (b"\xff\xff\xff\xff", 0, "delta clears bit 4294967295 of"),
            (b"", 7, "delta removes 7 keys of 6"),
        ],
    )
    def test_an_impossible_removal_is_refused(
        self, column: Column, cleared: bytes, removed: int, why: str
    ) -> None:
        column.feed.apply_snapshot(snapshot(X), now=1.0)
        with pytest.raises(DigestError, match=why):
            column.feed.apply_delta(Delta(1, 2, b"", cleared, removed), now=2.0)
        assert (column.held(X), column.feed.count) == (6, 6)

    def test_a_digest_is_not_filled_past_its_capacity(self, column: Column) -> None:
        column.feed.apply_snapshot(snapshot(count=CAPACITY - 6), now=1.0)
        column.feed.apply_delta(delta(X), now=2.0)
        with pytest.raises(DigestError, match=f"over its capacity of {CAPACITY} keys"):
            column.feed.apply_delta(delta(Y[:1], sequence=3), now=3.0)
        assert column.feed.count == CAPACITY


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("snapshot"), st.integers(1, 3), st.integers(1, 9)),
            st.tuples(st.just("delta"), st.integers(1, 3), st.integers(1, 9)),
            st.tuples(st.just("open"), st.just(0), st.just(0)),
        ),
        max_size=12,
    )
)
def test_a_column_is_never_a_mix_of_epochs(steps: list[tuple[str, int, int]]) -> None:
    """CI1: under any order of messages, only keys of the feed's own epoch are held."""
    column = Column()
    texts = {epoch: keys_of(text_blocks(epoch, 6)) for epoch in (1, 2, 3)}
    for kind, epoch, sequence in steps:
        if kind == "open":
            column.feed.open_stream()
        elif kind == "snapshot":
            made = snapshot(texts[epoch], epoch=epoch, sequence=sequence)
            column.feed.apply_snapshot(made, now=1.0)
        else:
            with suppress(DigestError):
                column.feed.apply_delta(delta(texts[epoch], epoch, sequence), now=1.0)
        held = {number for number, keys in texts.items() if column.held(keys)}
        assert held <= {column.feed.epoch}
