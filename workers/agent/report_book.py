"""``ReportBook``: what to tell one scheduler next, on one stream.

The stream asks for the next message when the one before has been written, so a slow
scheduler makes nothing pile up: only the newest load exists, and changes of the cache and
finished requests kept for it are bounded. Pure: time is handed in.
"""

from __future__ import annotations

import math
from collections import deque

from extproc.generated.kvgate.v1 import agent_pb2
from workers.agent.block_ledger import BlockLedger, Changes
from workers.agent.digest_pace import DigestPace
from workers.agent.hot_prefixes import HotPrefixes
from workers.agent.pool_terms import DEFAULT_REPORT_INTERVAL_S, PoolTerms
from workers.agent.tiers import Tier
from workers.agent.worker_report import WorkerReport

FORGETS_CACHE = frozenset(
    {
        agent_pb2.WORKER_STATE_STARTING,
        agent_pb2.WORKER_STATE_ASLEEP,
        agent_pb2.WORKER_STATE_DOWN,
    }
)
"""A scheduler that is told one of these empties the worker's digest: it needs a new snapshot
if the cache has outlived the state, as that of an engine that was only stopped."""
SOONEST, LATEST = 0.5, 1.25
"""A load goes out with each look at the engine, so that its numbers are new: of the report
interval, how soon after the one before, and how long it waits for a look that is late."""
FINISHED_DELAY_S = 0.02
"""Finished requests wait this long for others, so that bursts share a message."""
MAX_FINISHED = 4_096
"""Kept for a slow scheduler; it frees the leases of older ones by what is in flight."""


class ReportBook:
    """State of one stream; ``next_message`` says what to write now."""

    def __init__(self, worker: WorkerReport, interval_s: float = DEFAULT_REPORT_INTERVAL_S) -> None:
        self._worker = worker
        self._interval_s = interval_s
        self._load_at_s = -math.inf
        self._told_state: agent_pb2.WorkerState | None = None
        self._digests: list[DigestPace] = []
        self._hot = HotPrefixes()
        self._hot_at_s = -math.inf
        self._finished: deque[agent_pb2.Outcome] = deque(maxlen=MAX_FINISHED)
        self._finished_due_s = math.inf

    def settle(self, terms: PoolTerms, ledger: BlockLedger) -> None:
        """The scheduler told the pool's terms: tell the digests of ``ledger`` by them.

        The stream's sequences go on if there were terms before.
        """
        sequences = [digest.sequence for digest in self._digests] or [0 for _ in Tier]
        self._digests = [
            DigestPace(terms, ledger, sequence, tier)
            for tier, sequence in zip(Tier, sequences, strict=True)
        ]
        self._hot.clear()
        self._interval_s = terms.report_interval_s

    def resync(self) -> None:
        """The scheduler asks for snapshots."""
        for digest in self._digests:
            digest.resync()

    def note(self, changes: Changes) -> None:
        """Keys of the ledger changed."""
        for digest in self._digests:
            digest.note(changes)
        if changes.continued is not None:
            self._hot.note(changes.continued)

    def heed(self, advice: agent_pb2.ReplicaAdvice, now_s: float) -> int:
        """The scheduler has enough holders of these prefixes; how many it had not told before."""
        return self._hot.hush(advice.surplus_keys, now_s)

    def finished(self, outcome: agent_pb2.Outcome, now_s: float) -> None:
        """A request ended on the engine."""
        self._finished.append(outcome)
        self._finished_due_s = min(self._finished_due_s, now_s + FINISHED_DELAY_S)

    @property
    def pending_keys(self) -> int:
        """Changed keys not yet told; bounded by the size of a snapshot."""
        return sum(digest.pending_keys for digest in self._digests)

    def next_message(self, now_s: float) -> agent_pb2.AgentMessage | None:
        """The message to write now, or None before ``due_at_s``. It counts as written."""
        if now_s >= self._finished_due_s:
            return agent_pb2.AgentMessage(finished=self._take_finished())
        if now_s >= self._load_due_s():
            return agent_pb2.AgentMessage(load=self._load(now_s))
        for digest in self._digests:
            if now_s >= digest.due_at_s():
                return digest.next_message(now_s)
        if now_s >= self._hot_due_s():
            self._hot_at_s = now_s
            return agent_pb2.AgentMessage(hot=self._hot.take(now_s))
        return None

    def last_words(self, now_s: float) -> list[agent_pb2.AgentMessage]:
        """What must still be written before the stream closes."""
        words = []
        if self._finished:
            words.append(agent_pb2.AgentMessage(finished=self._take_finished()))
        if self._worker.state != self._told_state:
            words.append(agent_pb2.AgentMessage(load=self._load(now_s)))
        return words

    def due_at_s(self) -> float:
        """When the next message is due, as things stand."""
        digests_due_s = min((digest.due_at_s() for digest in self._digests), default=math.inf)
        return min(self._load_due_s(), self._finished_due_s, digests_due_s, self._hot_due_s())

    def _load_due_s(self) -> float:
        if self._worker.state != self._told_state:
            return -math.inf
        news = self._worker.engine.looked_at_s > self._load_at_s
        return self._load_at_s + self._interval_s * (SOONEST if news else LATEST)

    def _hot_due_s(self) -> float:
        return self._hot_at_s + self._interval_s if self._hot else math.inf

    def _load(self, now_s: float) -> agent_pb2.Load:
        self._load_at_s = now_s
        load = self._worker.load(now_s, self._interval_s)
        if self._told_state in FORGETS_CACHE and load.state not in FORGETS_CACHE:
            self.resync()
        self._told_state = load.state
        return load

    def _take_finished(self) -> agent_pb2.Finished:
        outcomes = list(self._finished)
        self._finished.clear()
        self._finished_due_s = math.inf
        return agent_pb2.Finished(outcomes=outcomes)
