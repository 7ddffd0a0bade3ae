"""``DigestPace``: when a snapshot or a delta of one tier is due on one stream.

A snapshot opens the stream and every epoch, answers a resync and comes at least every
``snapshot_interval_s``. In between deltas tell new keys, and the bits that fell with keys
that left, so the reader is never further behind than ``delta_interval_s``. What outgrows a
snapshot becomes one. Pure: time is handed in.
"""

from __future__ import annotations

import math

import numpy as np

from extproc.cache.digest import HASH_NAME, WIRE_VERSION, DigestShape
from extproc.generated.kvgate.v1 import agent_pb2
from extproc.tokens.blocks import Keys
from workers.agent.block_ledger import BlockLedger, Changes
from workers.agent.counted_digest import CountedDigest, checksum_of
from workers.agent.pool_terms import PoolTerms
from workers.agent.tiers import Tier

MIN_PENDING_KEYS = 1_024
CHANGE_BYTES = 16
"""About what a key costs in a delta: 8 as it comes, up to 4 for each bit that it leaves."""


class DigestPace:
    """When one tier of one ledger is told on one stream."""

    def __init__(
        self, terms: PoolTerms, ledger: BlockLedger, sequence: int, tier: Tier = Tier.DEVICE
    ) -> None:
        self.sequence = sequence
        self.tier = tier
        self._terms = terms
        self._ledger = ledger
        self._shape = DigestShape(terms.kind.capacity, terms.error_rate)
        # A delta with more changes than this has more bytes than a snapshot.
        self._max_pending = max(MIN_PENDING_KEYS, self._shape.num_bytes // CHANGE_BYTES)
        self._added: set[int] = set()
        self._removed: set[int] = set()
        self._overflow = False
        # What has been told; None before the first snapshot.
        self._told: CountedDigest | None = None
        self._epoch: int | None = None
        self._resync = False
        self._resyncs = 0
        self._snapshot_at_s = -math.inf
        self._delta_at_s = -math.inf

    @property
    def pending_keys(self) -> int:
        """Changes not yet told."""
        return len(self._added) + len(self._removed)

    def resync(self) -> None:
        """The scheduler asks for a snapshot."""
        self._resyncs += not self._resync
        self._resync = True

    def note(self, changes: Changes) -> None:
        """Keys of the ledger changed."""
        if changes.tier is not self.tier or self._overflow or self._is_new_epoch():
            return
        # A key that comes and goes between two messages is not told at all.
        _move(changes.added, self._removed, self._added)
        _move(changes.removed, self._added, self._removed)
        if self.pending_keys > self._max_pending:
            self._overflow = True
            self._drop_pending()

    def due_at_s(self) -> float:
        """When to call ``next_message``."""
        if self._is_untold():
            return math.inf
        if self._must_not_send_delta() or not self.pending_keys:
            return self._snapshot_due_s()
        return min(self._snapshot_due_s(), self._delta_at_s + self._terms.delta_interval_s)

    def next_message(self, now_s: float) -> agent_pb2.AgentMessage:
        """The snapshot or delta that is due; it counts as sent."""
        self.sequence += 1
        if now_s >= self._snapshot_due_s():
            return agent_pb2.AgentMessage(snapshot=self._snapshot(now_s))
        return agent_pb2.AgentMessage(delta=self._delta(now_s))

    def _is_untold(self) -> bool:
        """Nothing is said of a host tier that never held anything."""
        never = self._epoch is None and self.tier is not Tier.DEVICE
        return never and not self._ledger.count(self.tier)

    def _is_new_epoch(self) -> bool:
        return self._epoch != self._ledger.epoch

    def _must_not_send_delta(self) -> bool:
        return self._is_new_epoch() or self._resync or self._overflow

    def _snapshot_due_s(self) -> float:
        return self._snapshot_at_s + self._snapshot_gap_s()

    def _snapshot_gap_s(self) -> float:
        terms = self._terms
        if self._is_new_epoch():
            return terms.delta_interval_s
        if self._resync:
            # Backs off from a scheduler that refuses every snapshot, as one whose pool has
            # another block size than the engine does.
            backoff_s = terms.report_interval_s * 2.0 ** min(self._resyncs - 1, 16)
            return min(backoff_s, terms.snapshot_interval_s)
        if self._overflow:
            return min(terms.report_interval_s, terms.snapshot_interval_s)
        return terms.snapshot_interval_s

    def _drop_pending(self) -> None:
        self._added.clear()
        self._removed.clear()

    def _snapshot(self, now_s: float) -> agent_pb2.DigestSnapshot:
        self._snapshot_at_s = self._delta_at_s = now_s
        self._epoch = self._ledger.epoch
        self._resync = self._overflow = False
        self._drop_pending()
        self._told = CountedDigest(self._shape, self._ledger.live_keys(self.tier))
        return _snapshot_message(self._ledger, self._told, self.sequence, self.tier)

    def _delta(self, now_s: float) -> agent_pb2.DigestDelta:
        self._delta_at_s = now_s
        self._resyncs = 0
        # Never without a snapshot before it.
        assert self._told is not None  # noqa: S101
        added, removed = _keys(self._added), _keys(self._removed)
        self._drop_pending()
        return agent_pb2.DigestDelta(
            epoch=self._ledger.epoch,
            sequence=self.sequence,
            added_keys=added.astype("<u8").tobytes(),
            cleared_bits=self._told.change(added, removed).tobytes(),
            removed_keys=len(removed),
            tier=self.tier.value,  # type: ignore[arg-type]  # the enum's numbers
        )


def _move(keys: list[int], out_of: set[int], into: set[int]) -> None:
    for key in keys:
        if key in out_of:
            out_of.remove(key)
        else:
            into.add(key)


def _keys(keys: set[int]) -> Keys:
    return np.fromiter(keys, dtype=np.uint64, count=len(keys))


def snapshot_of(ledger: BlockLedger, error_rate: float, sequence: int) -> agent_pb2.DigestSnapshot:
    """Every live key on the device as a message.

    Its block size is the engine's: of another size than the pool's, it is empty.
    """
    digest = CountedDigest(DigestShape(ledger.capacity, error_rate), ledger.live_keys())
    return _snapshot_message(ledger, digest, sequence, Tier.DEVICE)


def _snapshot_message(
    ledger: BlockLedger, digest: CountedDigest, sequence: int, tier: Tier
) -> agent_pb2.DigestSnapshot:
    bits = digest.packed()
    shape = digest.shape
    return agent_pb2.DigestSnapshot(
        version=WIRE_VERSION,
        epoch=ledger.epoch,
        sequence=sequence,
        block_size_tokens=ledger.engine_block_size_tokens,
        capacity=shape.capacity,
        error_rate=shape.error_rate,
        num_slices=shape.num_slices,
        bits_per_slice=shape.bits_per_slice,
        hash_name=HASH_NAME,
        count=digest.count,
        bits=bits,
        checksum=checksum_of(bits),
        tier=tier.value,  # type: ignore[arg-type]  # the enum's numbers
    )
