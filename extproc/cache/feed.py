"""A worker's digest messages, checked and applied to its column.

A message is used only if it fits the pool and follows the one before it; anything else
leaves the column as it is, or empty when the epoch moved on, and asks for a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from extproc.cache.digest import HASH_NAME, WIRE_VERSION, DigestShape, check_packed
from extproc.cache.index import PrefixIndex
from extproc.errors import DigestError


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
    """Keys new since the message before: little-endian uint64 each."""

    epoch: int
    sequence: int
    added_keys: bytes


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
        """Add keys to the column.

        Raises:
            DigestError: a message is missing before this one, or it is malformed.
        """
        expected = None if self._sequence is None else self._sequence + 1
        if delta.epoch != self.epoch or delta.sequence != expected:
            raise DigestError(
                f"delta {delta.epoch}/{delta.sequence} does not follow {self.epoch}/{expected}"
            )
        if len(delta.added_keys) % 8:
            raise DigestError(f"delta has {len(delta.added_keys)} bytes, not a multiple of 8")
        keys = np.frombuffer(delta.added_keys, dtype="<u8")
        capacity = self._index.shape.capacity
        if self.count + len(keys) > capacity:
            raise DigestError(f"delta takes the digest over its capacity of {capacity} keys")
        self._index.add_keys(self._column, keys)
        self._sequence = delta.sequence
        self.count += len(keys)
        self.updated_at = now

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
