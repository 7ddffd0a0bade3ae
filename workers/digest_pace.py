"""``DigestPace``: when a snapshot or a delta of one ledger is due on one stream.

A snapshot opens the stream and every epoch, answers a resync, follows many removals and
comes at least every ``snapshot_interval_s``. In between new keys go as deltas, unless they
outgrow a snapshot or the reader's filter: then they become one. Pure: time is handed in.
"""

from __future__ import annotations

import math

import numpy as np

from extproc.cache.digest import HASH_NAME, WIRE_VERSION, BlockDigest, DigestShape
from extproc.generated.kvgate.v1 import agent_pb2
from workers.block_ledger import BlockLedger, Changes
from workers.pool_terms import PoolTerms

MIN_STALE_KEYS = 64
STALE_SHARE = 0.1
"""A snapshot is due when removed keys, which a Bloom filter cannot forget, pass this share."""
CHURN_GAP_INTERVALS = 5
"""Delta intervals between snapshots that only churn asks for: an engine whose cache turns
over all the time costs one snapshot a second by default, not five."""
MIN_PENDING_KEYS = 1_024
KEY_BYTES = 8


class DigestPace:
    """When a snapshot or a delta of one ledger is due on one stream."""

    def __init__(self, terms: PoolTerms, ledger: BlockLedger, sequence: int) -> None:
        self.sequence = sequence
        self._terms = terms
        self._ledger = ledger
        # A delta with more keys than this has more bytes than a snapshot.
        shape = DigestShape(terms.kind.capacity, terms.error_rate)
        self._max_pending = max(MIN_PENDING_KEYS, shape.num_bytes // KEY_BYTES)
        self._pending: list[int] = []
        self._overflow = False
        self._epoch: int | None = None
        self._resync = False
        self._resyncs = 0
        self._told_keys = 0
        self._removed = 0
        self._snapshot_at_s = -math.inf
        self._delta_at_s = -math.inf

    @property
    def pending_keys(self) -> int:
        """New keys not yet told."""
        return len(self._pending)

    def resync(self) -> None:
        """The scheduler asks for a snapshot."""
        self._resyncs += not self._resync
        self._resync = True

    def note(self, changes: Changes) -> None:
        """Keys of the ledger changed."""
        self._removed += changes.removed
        room = min(self._max_pending, self._terms.kind.capacity - self._told_keys)
        if self._overflow or len(self._pending) + len(changes.added) > room:
            # Too much to tell, or more than the reader's filter is made for.
            self._overflow = True
            self._pending.clear()
        else:
            self._pending += changes.added

    def due_at_s(self) -> float:
        """When to call ``next_message``."""
        if self._must_not_send_delta() or not self._pending:
            return self._snapshot_due_s()
        return min(self._snapshot_due_s(), self._delta_at_s + self._terms.delta_interval_s)

    def next_message(self, now_s: float) -> agent_pb2.AgentMessage:
        """The snapshot or delta that is due; it counts as sent."""
        self.sequence += 1
        if now_s >= self._snapshot_due_s():
            return agent_pb2.AgentMessage(snapshot=self._snapshot(now_s))
        return agent_pb2.AgentMessage(delta=self._delta(now_s))

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
        stale = self._removed > max(MIN_STALE_KEYS, STALE_SHARE * len(self._ledger))
        if stale or self._overflow:
            churn_gap_s = CHURN_GAP_INTERVALS * terms.delta_interval_s
            return min(churn_gap_s, terms.snapshot_interval_s)
        return terms.snapshot_interval_s

    def _snapshot(self, now_s: float) -> agent_pb2.DigestSnapshot:
        self._snapshot_at_s = self._delta_at_s = now_s
        self._epoch = self._ledger.epoch
        self._resync = self._overflow = False
        self._pending.clear()
        self._removed = 0
        self._told_keys = len(self._ledger)
        return snapshot_of(self._ledger, self._terms.error_rate, self.sequence)

    def _delta(self, now_s: float) -> agent_pb2.DigestDelta:
        self._delta_at_s = now_s
        self._resyncs = 0
        self._told_keys += len(self._pending)
        added_keys = np.array(self._pending, dtype="<u8").tobytes()
        self._pending.clear()
        return agent_pb2.DigestDelta(
            epoch=self._ledger.epoch, sequence=self.sequence, added_keys=added_keys
        )


def snapshot_of(ledger: BlockLedger, error_rate: float, sequence: int) -> agent_pb2.DigestSnapshot:
    """Every live key of the ledger as a message.

    Its block size is the engine's: of another size than the pool's, it is empty.
    """
    digest = BlockDigest(ledger.capacity, error_rate)
    digest.add_keys(ledger.live_keys())
    bits = digest.packed()
    return agent_pb2.DigestSnapshot(
        version=WIRE_VERSION,
        epoch=ledger.epoch,
        sequence=sequence,
        block_size_tokens=ledger.engine_block_size_tokens,
        capacity=ledger.capacity,
        error_rate=error_rate,
        num_slices=digest.shape.num_slices,
        bits_per_slice=digest.shape.bits_per_slice,
        hash_name=HASH_NAME,
        count=digest.count,
        bits=bits,
        checksum=digest.checksum(),
    )
