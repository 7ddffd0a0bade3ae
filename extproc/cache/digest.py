"""``BlockDigest``: a pybloom-live filter over block keys, readable in any process.

pybloom-live hashes ``str(key)`` once a slice in Python. Block keys are uniform 64-bit
hashes already, so positions come from double hashing of the key's two halves (Kirsch and
Mitzenmacher 2006), which numpy does for many keys at once on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from bitarray import bitarray
from pybloom_live import BloomFilter
from xxhash import xxh3_64_intdigest

from extproc.errors import DigestError
from extproc.tokens.blocks import Keys

WIRE_VERSION = 1
HASH_NAME = "kvgate-double-xxh3-64"
MAX_CAPACITY_BLOCKS = 16_777_216
"""Largest filter that is ever allocated (20 MB at 1%), whatever a message claims."""

Positions = npt.NDArray[np.int64]
"""Bit positions, shape (keys, slices)."""
PackedBits = npt.NDArray[np.uint8]
"""Bits packed little-endian: bit p is bit p & 7 of byte p >> 3."""


class DigestShape:
    """Size of a pool's filters: all columns of one index share it.

    The formulas are pybloom-live's own (Almeida et al., "Scalable Bloom Filters", 2007):
    ``slices = ceil(log2(1/p))``, ``bits a slice = ceil(n*|ln p| / (slices*ln(2)^2))``.

    Raises:
        DigestError: capacity or error rate out of range.
    """

    __slots__ = ("_offsets", "_steps", "bits_per_slice", "capacity", "error_rate", "num_slices")

    def __init__(self, capacity: int, error_rate: float) -> None:
        if not 0 < capacity <= MAX_CAPACITY_BLOCKS:
            raise DigestError(f"digest capacity {capacity} is not in 1..{MAX_CAPACITY_BLOCKS}")
        if not 1e-6 <= error_rate <= 0.5:
            raise DigestError(f"digest error rate {error_rate} is not in 1e-6..0.5")
        self.capacity = capacity
        self.error_rate = error_rate
        self.num_slices = math.ceil(math.log2(1.0 / error_rate))
        self.bits_per_slice = math.ceil(
            capacity * abs(math.log(error_rate)) / (self.num_slices * math.log(2) ** 2)
        )
        self._steps = np.arange(self.num_slices, dtype=np.uint32)
        self._offsets = self._steps.astype(np.int64) * self.bits_per_slice

    @property
    def num_bits(self) -> int:
        """Bits of one filter."""
        return self.num_slices * self.bits_per_slice

    @property
    def num_bytes(self) -> int:
        """Bytes of one filter on the wire."""
        return (self.num_bits + 7) // 8

    def positions(self, keys: Keys) -> Positions:
        """Bit position of every key in every slice, slice offsets included."""
        halves = np.ascontiguousarray(keys, dtype="<u8").view("<u4").reshape(-1, 2)
        low, high = self._modulo(halves[:, 0]), self._modulo(halves[:, 1] | np.uint32(1))
        # Both below 2**25 and at most 20 steps, so uint32 never wraps.
        hashes = np.multiply.outer(self._steps, high)
        hashes += low
        positions = self._modulo(hashes).astype(np.int64)
        positions += self._offsets[:, None]
        return positions.T

    def _modulo(self, numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """``numbers % bits_per_slice``; numpy divides by a constant ten times faster."""
        bits = np.uint32(self.bits_per_slice)
        return numbers - numbers // bits * bits

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DigestShape)
            and self.capacity == other.capacity
            and self.error_rate == other.error_rate
        )

    def __hash__(self) -> int:
        return hash((self.capacity, self.error_rate))

    def __repr__(self) -> str:
        return f"DigestShape(capacity={self.capacity}, error_rate={self.error_rate})"


class BlockDigest(BloomFilter):  # type: ignore[misc]  # pybloom-live has no types
    """Bloom filter of one worker's block keys; never a false negative."""

    def __init__(self, capacity: int, error_rate: float) -> None:
        self.shape = DigestShape(capacity, error_rate)
        super().__init__(capacity, error_rate)

    def _setup(self, *args: Any) -> None:
        super()._setup(*args)
        self.make_hashes = self._make_hashes

    def _make_hashes(self, key: int) -> Iterator[int]:
        low, high = key & 0xFFFFFFFF, (key >> 32) | 1
        return ((low + i * high) % self.bits_per_slice for i in range(self.num_slices))

    @property
    def fill(self) -> float:
        """Share of bits set, 0 to 1."""
        return float(self.bitarray.count()) / float(self.num_bits)

    @property
    def false_positive_rate(self) -> float:
        """Chance that a key never added answers yes, from the live fill."""
        rate: float = self.fill**self.num_slices
        return rate

    def add_keys(self, keys: Keys) -> None:
        """Insert many keys. ``count`` grows by all of them: callers pass new keys only.

        Raises:
            DigestError: the filter would hold more than its capacity.
        """
        if self.count + len(keys) > self.capacity:
            raise DigestError(f"{self.count + len(keys)} keys in a digest for {self.capacity}")
        set_bits(self._bytes(), self.shape.positions(keys).reshape(-1))
        self.count += len(keys)

    def contains_keys(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Membership of each key, shape (keys,)."""
        found: npt.NDArray[np.bool_] = test_bits(self._bytes(), self.shape.positions(keys))
        held: npt.NDArray[np.bool_] = np.logical_and.reduce(found, axis=1)
        return held

    def _bytes(self) -> PackedBits:
        # Shares memory with the bitarray; made per call so that copies stay independent.
        return np.frombuffer(self.bitarray, dtype=np.uint8)

    def packed(self) -> bytes:
        """The bits as they go over the wire, ``shape.num_bytes`` long."""
        return bytes(self.bitarray.tobytes())

    def checksum(self) -> int:
        """xxh3_64 of the packed bits."""
        return xxh3_64_intdigest(self.packed())

    @classmethod
    def from_packed(cls, shape: DigestShape, bits: bytes, count: int, checksum: int) -> BlockDigest:
        """Rebuild a filter from the wire.

        Raises:
            DigestError: length, padding, count or checksum do not fit.
        """
        check_packed(shape, bits, count, checksum)
        digest = cls(shape.capacity, shape.error_rate)
        loaded = bitarray(endian="little")
        loaded.frombytes(bits)
        digest.bitarray = loaded[: shape.num_bits]
        digest.count = count
        return digest


def check_packed(shape: DigestShape, bits: bytes, count: int, checksum: int) -> None:
    """Check everything about packed bits that can be checked without using them.

    Raises:
        DigestError: length, padding, count or checksum do not fit.
    """
    if len(bits) != shape.num_bytes:
        raise DigestError(f"digest has {len(bits)} bytes, {shape!r} needs {shape.num_bytes}")
    if count > shape.capacity:
        raise DigestError(f"digest claims {count} keys, capacity is {shape.capacity}")
    if xxh3_64_intdigest(bits) != checksum:
        raise DigestError("digest checksum differs")
    padding = shape.num_bytes * 8 - shape.num_bits
    if padding and bits[-1] >> (8 - padding):
        raise DigestError("digest has bits set past its end")


def set_bits(packed: PackedBits, positions: npt.NDArray[np.int64]) -> None:
    """Set flat bit positions in place; repeated positions are fine."""
    np.bitwise_or.at(packed, positions >> 3, (1 << (positions & 7)).astype(np.uint8))


def clear_bits(packed: PackedBits, positions: npt.NDArray[np.int64]) -> None:
    """Clear flat bit positions in place; repeated positions are fine."""
    np.bitwise_and.at(packed, positions >> 3, (~(1 << (positions & 7))).astype(np.uint8))


def test_bits(packed: PackedBits, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which positions are set, same shape as ``positions``."""
    found: npt.NDArray[np.bool_] = ((packed[positions >> 3] >> (positions & 7)) & 1).astype(bool)
    return found
