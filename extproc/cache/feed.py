"""A worker's digest messages, checked and applied to its column.

A message is used only if it fits the pool and follows the one before it; anything else
leaves the column as it is, or empty when the epoch moved on, and asks for a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extproc.cache.digest import HASH_NAME, WIRE_VERSION, DigestShape, check_packed
from extproc.cache.index import PrefixIndex
from extproc.errors import DigestError
from extproc.tokens.blocks import Keys


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole digest; the fields are those of ``DigestSnapshot`` in the agent API."""

    version: int
    epoch: int
    sequence: int
    block_size_tokens: int
    capacity: int
    error_rate: float
    num_slices: int
    bits_per_slice: int
    hash_name: str
    count: int
    bits: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed since the message before.

    ``added_keys``: little-endian uint64 each. ``cleared_bits``: bits of the filter that no
    key holds any more, little-endian uint32 each. ``removed_keys``: how many keys left.
    """

    epoch: int
    sequence: int
    added_keys: bytes
    cleared_bits: bytes = b""
    removed_keys: int = 0


class DigestFeed:
    """State of one worker's digest stream.

    Attributes:
        epoch: the engine life that the column describes; 0 before the first snapshot.
        count: keys in the digest, deltas included.
        updated_at: seconds (receiver's monotonic clock) of the last good message.
    """

    def __init__(self, index: PrefixIndex, column: int, block_size_tokens: int) -> None:
        self._index = index
        self._column = column
        self._block_size_tokens = block_size_tokens
        self._sequence: int | None = None
        self.epoch = 0
        self.count = 0
        self.updated_at: float | None = None

    def open_stream(self) -> None:
        """A new stream numbers its messages afresh and starts with a snapshot."""
        self._sequence = None

    def apply_snapshot(self, snapshot: Snapshot, now: float) -> bool:
        """Replace the column; False: not newer than the last of this stream, ignored.

        Raises:
            DigestError: the snapshot does not fit the pool; the column is now empty.
        """
        latest = (self.epoch, self._sequence)
        if self._sequence is not None and (snapshot.epoch, snapshot.sequence) <= latest:
            return False
        try:
            self._check(snapshot, self._index.shape)
        except DigestError:
            self.forget()
            raise
        if snapshot.epoch != self.epoch:
            # What was routed to the former engine life is gone with it.
            self._index.clear(self._column)
        self._index.replace(self._column, snapshot.bits)
        self.epoch = snapshot.epoch
        self._sequence = snapshot.sequence
        self.count = snapshot.count
        self.updated_at = now
        return True

    def apply_delta(self, delta: Delta, now: float) -> None:
        """Add keys to the column and clear the bits of those that left.

        Raises:
            DigestError: a message is missing before this one, or it is malformed.
        """
        expected = None if self._sequence is None else self._sequence + 1
        if delta.epoch != self.epoch or delta.sequence != expected:
            raise DigestError(
                f"delta {delta.epoch}/{delta.sequence} does not follow {self.epoch}/{expected}"
            )
        keys, cleared = self._parts(delta)
        if len(cleared):
            self._index.clear_bits(self._column, cleared)
        self._index.add_keys(self._column, keys)
        self._sequence = delta.sequence
        self.count += len(keys) - delta.removed_keys
        self.updated_at = now

    def _parts(self, delta: Delta) -> tuple[Keys, npt.NDArray[np.int64]]:
        """Added keys and cleared bits, checked."""
        if len(delta.added_keys) % 8:
            raise DigestError(f"delta has {len(delta.added_keys)} bytes, not a multiple of 8")
        if len(delta.cleared_bits) % 4:
            raise DigestError(f"delta clears {len(delta.cleared_bits)} bytes, not a multiple of 4")
        keys = np.frombuffer(delta.added_keys, dtype="<u8")
        cleared = np.frombuffer(delta.cleared_bits, dtype="<u4").astype(np.int64)
        shape = self._index.shape
        if len(cleared) and cleared.max() >= shape.num_bits:
            raise DigestError(f"delta clears bit {cleared.max()} of {shape.num_bits}")
        count = self.count + len(keys) - delta.removed_keys
        if count > shape.capacity:
            raise DigestError(f"delta takes the digest over its capacity of {shape.capacity} keys")
        if count < 0:
            raise DigestError(f"delta removes {delta.removed_keys} keys of {self.count}")
        return keys, cleared

    def forget(self) -> None:
        """Empty the column: no credit until the next good snapshot."""
        self._index.clear(self._column)
        self._sequence = None
        self.count = 0
        self.updated_at = None

    def _check(self, snapshot: Snapshot, shape: DigestShape) -> None:
        theirs = (
            snapshot.version,
            snapshot.hash_name,
            snapshot.block_size_tokens,
            snapshot.capacity,
            snapshot.error_rate,
            snapshot.num_slices,
            snapshot.bits_per_slice,
        )
        ours = (
            WIRE_VERSION,
            HASH_NAME,
            self._block_size_tokens,
            shape.capacity,
            shape.error_rate,
            shape.num_slices,
            shape.bits_per_slice,
        )
        if theirs != ours:
            raise DigestError(f"digest parameters {theirs} are not the pool's {ours}")
        check_packed(shape, snapshot.bits, snapshot.count, snapshot.checksum)
