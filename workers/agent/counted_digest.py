"""``CountedDigest``: a Bloom filter that can forget, for the agent's side alone.

It counts the keys behind each bit, so that a removal tells exactly which bits fall. The
reader clears those bits in its plain filter and never needs counts of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from extproc.cache.digest import DigestShape
from extproc.tokens.blocks import Keys


class CountedDigest:
    """Counts per bit of one filter; the callers' keys are distinct."""

    def __init__(self, shape: DigestShape, keys: Keys) -> None:
        self.shape = shape
        self.count = len(keys)
        self._counts = np.bincount(
            shape.positions(keys).reshape(-1), minlength=shape.num_bits
        ).astype(np.uint16)

    def change(self, added: Keys, removed: Keys) -> npt.NDArray[np.uint32]:
        """Take keys in and others out; tells the bits that fell, in ascending order."""
        self.count += len(added) - len(removed)
        np.add.at(self._counts, self.shape.positions(added).reshape(-1), 1)
        leaving = self.shape.positions(removed).reshape(-1)
        np.subtract.at(self._counts, leaving, 1)
        return np.unique(leaving[self._counts[leaving] == 0]).astype("<u4")

    def packed(self) -> bytes:
        """The filter as it goes over the wire, ``shape.num_bytes`` long."""
        return np.packbits(self._counts != 0, bitorder="little").tobytes()


def checksum_of(bits: bytes) -> int:
    """xxh3_64 of packed bits."""
    return xxh3_64_intdigest(bits)
