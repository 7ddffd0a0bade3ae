"""``WorkerCache``: one engine's KV events, kept as one ledger for each way of keying.

Schedulers normally agree on a pool's settings and share one ledger; while a changed
policy rolls out there are two. Every change is passed on to the reports that tell it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from workers.agent.block_ledger import BlockLedger, Changes, Left
from workers.agent.kv_events import Batch, KvEvent


class Epochs:
    """Epoch numbers that grow, also from one agent process to the next."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._last = 0

    def __call__(self) -> int:
        """A number above all before: Unix time in milliseconds where the clock allows."""
        self._last = max(self._last + 1, int(self._wall_clock() * 1000))
        return self._last


class LedgerKind(NamedTuple):
    """What makes two ledgers differ."""

    namespace: int
    block_size_tokens: int
    capacity: int


class Listener(Protocol):
    """Who hears of changes."""

    def note(self, changes: Changes) -> None:
        """Keys of the listener's ledger were added or removed."""


class WorkerCache:
    """All ledgers of one engine, fed by the same events."""

    def __init__(self, next_epoch: Callable[[], int]) -> None:
        self.unreadable = 0
        """Events that could not be decoded since start."""
        self._next_epoch = next_epoch
        self._ledgers: dict[LedgerKind, BlockLedger] = {}
        self._holders: dict[object, LedgerKind] = {}
        self._listeners: dict[Listener, BlockLedger] = {}

    def open(self, kind: LedgerKind, holder: object) -> tuple[BlockLedger, bool]:
        """The ledger of that kind, and whether it is new and so lacks the past.

        A holder holds one ledger at a time; a ledger that nobody holds goes.
        """
        self._holders[holder] = kind
        for unused in self._ledgers.keys() - self._holders.values():
            del self._ledgers[unused]
        is_new = kind not in self._ledgers
        if is_new:
            self._ledgers[kind] = BlockLedger(*kind, self._next_epoch)
        return self._ledgers[kind], is_new

    def listen(self, listener: Listener, ledger: BlockLedger) -> None:
        """Tell ``listener`` of every change of ``ledger`` from now on."""
        self._listeners[listener] = ledger

    def unlisten(self, listener: Listener) -> None:
        """Tell it no more; harmless if it never listened."""
        self._listeners.pop(listener, None)

    def apply(self, batch: Batch, rank: int | None = None) -> None:
        """Take a batch in; ``rank`` where the caller knows better than the batch."""
        self.unreadable += batch.unreadable
        for event in batch.events:
            self._apply(event, batch.rank if rank is None else rank)

    def clear(self, rank: int | None = None) -> None:
        """The engine's cache, or that of one rank, is empty or unknown: new epochs."""
        for ledger in self._ledgers.values():
            ledger.clear(rank)

    def left(self) -> Counter[Left]:
        """Blocks left out in the present epochs, by reason."""
        return sum((ledger.left for ledger in self._ledgers.values()), Counter())

    def _apply(self, event: KvEvent, rank: int) -> None:
        for ledger in self._ledgers.values():
            changes = ledger.apply(event, rank)
            if not changes:
                continue
            for listener, heard in self._listeners.items():
                if heard is ledger:
                    listener.note(changes)
