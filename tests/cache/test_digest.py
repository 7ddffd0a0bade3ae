from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pybloom_live import BloomFilter
from xxhash import xxh3_64_intdigest

from extproc.cache.digest import (
    MAX_CAPACITY_BLOCKS,
    BlockDigest,
    DigestShape,
    check_packed,
    set_bits,
)
from extproc.cache.digest import test_bits as bits_at
from extproc.errors import DigestError
from extproc.tokens.blocks import Keys

ROUND_CAPACITY = next(
    capacity for capacity in range(100, 200) if DigestShape(capacity, 0.01).num_bits % 8 == 0
)
KEY = st.integers(0, 2**64 - 1)
KEYS = st.lists(KEY, unique=True, max_size=50)


def keys(values: list[int]) -> Keys:
    return np.array(values, dtype=np.uint64)


def random_keys(count: int, seed: int = 1) -> Keys:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def filled(values: Keys, capacity: int = 100, error_rate: float = 0.01) -> BlockDigest:
    digest = BlockDigest(capacity, error_rate)
    digest.add_keys(values)
    return digest


class TestMembership:
    @given(values=KEYS)
    def test_no_key_is_ever_forgotten(self, values: list[int]) -> None:
        digest = filled(keys(values))
        assert digest.contains_keys(keys(values)).all()
        assert digest.count == len(values)

    @given(values=KEYS, probe=KEY)
    def test_one_key_and_many_keys_get_the_same_answer(self, values: list[int], probe: int) -> None:
        """pybloom-live's own methods and the vectorised ones work on the same bits."""
        digest = filled(keys(values))
        probes = [*values, probe]
        assert digest.contains_keys(keys(probes)).tolist() == [key in digest for key in probes]
        one_by_one = BlockDigest(100, 0.01)
        for key in values:
            one_by_one.add(key)
        assert one_by_one.packed() == digest.packed()

    def test_false_positives_stay_near_the_promised_rate(self) -> None:
        digest = filled(random_keys(20_000), 20_000, 0.01)
        wrong = digest.contains_keys(random_keys(50_000, seed=2)).mean()
        assert 0.005 < wrong < 0.015
        assert digest.false_positive_rate == pytest.approx(wrong, rel=0.3)

    def test_an_empty_filter_holds_nothing(self) -> None:
        digest = BlockDigest(100, 0.01)
        assert not digest.contains_keys(random_keys(1_000)).any()
        assert (digest.fill, digest.false_positive_rate) == (0.0, 0.0)

    def test_a_full_filter_takes_no_more(self) -> None:
        digest = filled(random_keys(100))
        assert 0.4 < digest.fill < 0.6
        before = digest.packed()
        with pytest.raises(DigestError, match="101 keys in a digest for 100"):
            digest.add_keys(random_keys(1, seed=3))
        assert (digest.packed(), digest.count) == (before, 100)

    def test_copies_are_independent(self) -> None:
        digest = filled(random_keys(10))
        other = copy.deepcopy(digest)
        other.add_keys(random_keys(10, seed=2))
        assert other.packed() != digest.packed()


class TestShape:
    @pytest.mark.parametrize(
        ("capacity", "error_rate"), [(1, 0.5), (100, 0.01), (10_001, 0.01), (65_536, 1e-6)]
    )
    def test_it_is_that_of_pybloom_live(self, capacity: int, error_rate: float) -> None:
        shape, theirs = DigestShape(capacity, error_rate), BloomFilter(capacity, error_rate)
        ours = (shape.num_slices, shape.bits_per_slice, shape.num_bits)
        assert ours == (theirs.num_slices, theirs.bits_per_slice, theirs.num_bits)
        assert shape.num_bytes == len(theirs.bitarray.tobytes())

    @pytest.mark.parametrize(
        ("capacity", "error_rate"),
        [(0, 0.1), (-1, 0.1), (MAX_CAPACITY_BLOCKS + 1, 0.1), (2**40, 0.1), (10, 0.0),
         (10, 0.9e-6), (10, 0.51), (10, float("nan"))],
    )  # fmt: skip
    def test_absurd_sizes_are_refused_before_anything_is_allocated(
        self, capacity: int, error_rate: float
    ) -> None:
        """BL1: a claim of 2^40 keys costs no memory."""
        with pytest.raises(DigestError, match="is not in"):
            DigestShape(capacity, error_rate)
        with pytest.raises(DigestError, match="is not in"):
            BlockDigest(capacity, error_rate)

    def test_shapes_are_equal_by_their_parameters(self) -> None:
        shape = DigestShape(100, 0.01)
        assert shape == DigestShape(100, 0.01)
        assert hash(shape) == hash(DigestShape(100, 0.01))
        assert shape not in (DigestShape(101, 0.01), DigestShape(100, 0.02), (100, 0.01))
        assert repr(shape) == "DigestShape(capacity=100, error_rate=0.01)"

    @given(values=KEYS)
    def test_every_slice_has_one_position_of_every_key(self, values: list[int]) -> None:
        shape = DigestShape(100, 0.001)
        positions = shape.positions(keys(values))
        assert positions.shape == (len(values), shape.num_slices)
        slices = positions // shape.bits_per_slice
        assert (slices == np.arange(shape.num_slices)).all()


class TestWire:
    """BL1, reader side: every mismatch is refused, and nothing is guessed."""

    def parts(self) -> tuple[DigestShape, bytes, int, int]:
        digest = filled(random_keys(50))
        return digest.shape, digest.packed(), digest.count, digest.checksum()

    @given(values=KEYS, capacity=st.integers(50, 130))
    def test_a_filter_reads_back_as_it_was(self, values: list[int], capacity: int) -> None:
        """Also where the number of bits is not a multiple of 8 or 32."""
        digest = filled(keys(values), capacity)
        back = BlockDigest.from_packed(
            digest.shape, digest.packed(), digest.count, digest.checksum()
        )
        assert (back.packed(), back.count, back.shape) == (
            digest.packed(),
            digest.count,
            digest.shape,
        )
        assert back.contains_keys(keys(values)).all()
        assert len(back.bitarray) == back.num_bits

    def test_a_truncated_or_longer_filter_is_refused(self) -> None:
        shape, bits, count, checksum = self.parts()
        for wrong in (bits[:-1], bits + b"\0", b""):
            with pytest.raises(DigestError, match=f"digest has {len(wrong)} bytes"):
                BlockDigest.from_packed(shape, wrong, count, checksum)

    def test_a_count_over_the_capacity_is_refused(self) -> None:
        shape, bits, _, checksum = self.parts()
        check_packed(shape, bits, 100, checksum)
        with pytest.raises(DigestError, match="claims 101 keys"):
            check_packed(shape, bits, 101, checksum)

    def test_one_flipped_bit_is_noticed(self) -> None:
        shape, bits, count, checksum = self.parts()
        flipped = bytes([bits[0] ^ 1]) + bits[1:]
        with pytest.raises(DigestError, match="checksum differs"):
            check_packed(shape, flipped, count, checksum)
        with pytest.raises(DigestError, match="checksum differs"):
            check_packed(shape, bits, count, checksum ^ 1)

    def test_bits_in_the_padding_are_refused(self) -> None:
        digest = BlockDigest(100, 0.01)
        padding = digest.shape.num_bytes * 8 - digest.shape.num_bits
        assert padding
        dirty = digest.packed()[:-1] + bytes([1 << (8 - padding)])
        with pytest.raises(DigestError, match="past its end"):
            check_packed(digest.shape, dirty, 0, xxh3_64_intdigest(dirty))

    def test_a_filter_without_padding_may_use_its_last_bit(self) -> None:
        shape = DigestShape(ROUND_CAPACITY, 0.01)
        assert shape.num_bits % 8 == 0
        full = b"\xff" * shape.num_bytes
        check_packed(shape, full, 1, xxh3_64_intdigest(full))


class TestBits:
    def test_repeated_positions_are_set_once(self) -> None:
        packed = np.zeros(2, dtype=np.uint8)
        set_bits(packed, np.array([0, 9, 9, 0, 15]))
        assert packed.tolist() == [0b1, 0b10000010]
        assert bits_at(packed, np.array([[0, 1], [9, 15]])).tolist() == [
            [True, False],
            [True, True],
        ]
