"""``ReportBook``: what to tell one scheduler next, on one stream.

The stream asks for the next message when the one before has been written, so a slow
scheduler makes nothing pile up: only the newest load exists, and the new keys kept for it
are bounded. Pure: time is handed in.
"""

from __future__ import annotations

import math

from extproc.generated.kvgate.v1 import agent_pb2
from workers.block_ledger import BlockLedger, Changes
from workers.digest_pace import DigestPace
from workers.engine_state import EngineState
from workers.pool_terms import DEFAULT_REPORT_INTERVAL_S, PoolTerms


class ReportBook:
    """State of one stream; ``next_message`` says what to write now."""

    def __init__(self, engine: EngineState, interval_s: float = DEFAULT_REPORT_INTERVAL_S) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._load_at_s = -math.inf
        self._told_ready: bool | None = None
        self._digests: DigestPace | None = None

    def settle(self, terms: PoolTerms, ledger: BlockLedger) -> None:
        """The scheduler told the pool's terms: tell the digest of ``ledger`` by them.

        The stream's sequence goes on if there were terms before.
        """
        sequence = self._digests.sequence if self._digests else 0
        self._digests = DigestPace(terms, ledger, sequence)
        self._interval_s = terms.report_interval_s

    def resync(self) -> None:
        """The scheduler asks for a snapshot."""
        if self._digests:
            self._digests.resync()

    def note(self, changes: Changes) -> None:
        """Keys of the ledger changed."""
        if self._digests:
            self._digests.note(changes)

    @property
    def pending_keys(self) -> int:
        """New keys not yet told; bounded by the size of a snapshot."""
        return self._digests.pending_keys if self._digests else 0

    def next_message(self, now_s: float) -> agent_pb2.AgentMessage | None:
        """The message to write now, or None before ``due_at_s``. It counts as written."""
        if now_s >= self._load_due_s():
            return agent_pb2.AgentMessage(load=self._load(now_s))
        if self._digests is None or now_s < self._digests.due_at_s():
            return None
        return self._digests.next_message(now_s)

    def due_at_s(self) -> float:
        """When the next message is due, as things stand."""
        digest_due_s = self._digests.due_at_s() if self._digests else math.inf
        return min(self._load_due_s(), digest_due_s)

    def _load_due_s(self) -> float:
        if self._engine.ready is not self._told_ready:
            return -math.inf
        return self._load_at_s + self._interval_s

    def _load(self, now_s: float) -> agent_pb2.Load:
        self._load_at_s = now_s
        numbers = self._engine.load(now_s, self._interval_s)
        self._told_ready = numbers.ready
        # None leaves an optional field absent.
        return agent_pb2.Load(
            ready=numbers.ready,
            running=numbers.running,
            waiting=numbers.waiting,
            kv_usage=numbers.kv_usage,
            age_s=numbers.age_s,
            kv_blocks=numbers.kv_blocks,
        )
