"""``CacheFollower``: the engine's KV events, from their sockets into the worker's cache.

Each data-parallel rank has a socket, numbers and hashes of its own; what happens to one
rank's events never costs another's blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import zmq

from workers.agent.kv_source import Gap, Item, KvEventSource, Numbered, Reset
from workers.agent.worker_report import WorkerReport

RETRY_S = 1.0

log = logging.getLogger("kvgate.agent")


class CacheFollower:
    """Follows all ranks of one server.

    Args:
        endpoints: of events and of their replay, rank by rank.
        on_change: called when there may be something to tell.
        on_disconnect: called when the engine closed a connection.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, str]],
        worker: WorkerReport,
        *,
        on_change: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        self._endpoints = endpoints
        self._worker = worker
        self._cache = worker.cache
        self._on_change = on_change
        self._on_disconnect = on_disconnect
        self._sources: dict[int, KvEventSource] = {}
        self._has_ledger = asyncio.Event()

    def tasks(self) -> list[asyncio.Task[None]]:
        """Start following; none of them ends by itself."""
        return [
            asyncio.create_task(self._follow(number, *pair))
            for number, pair in enumerate(self._endpoints)
        ]

    def settled(self, is_new: bool) -> None:
        """There is a ledger to key events for; ``is_new`` if it lacks the past."""
        self._has_ledger.set()
        if not is_new:
            return
        for source in self._sources.values():
            if source.can_replay:
                source.rewind()
            else:
                log.warning("keys changed and there is no replay: what is cached stays unknown")

    def restarted(self) -> None:
        """Another life of the engine: its event numbers start again."""
        for source in self._sources.values():
            source.rewind()

    async def _follow(self, number: int, events: str, replay: str) -> None:
        # One socket may carry the events of several ranks, as a forwarder's does.
        rank = number if len(self._endpoints) > 1 else None
        # Without a ledger there is nothing to key; the replay then tells the past.
        await self._has_ledger.wait()
        while True:
            source = KvEventSource(events, replay, on_disconnect=self._on_disconnect)
            self._sources[number] = source
            try:
                async with contextlib.aclosing(source.items()) as items:
                    async for item in items:
                        self._take(item, rank)
            except zmq.ZMQError as error:
                log.error("KV events: %s", error)
            # A new source tells from the beginning, so nothing is known until it has.
            self._cache.clear(rank)
            await asyncio.sleep(RETRY_S)

    def _take(self, item: Item, rank: int | None) -> None:
        match item:
            case Numbered():
                self._cache.apply(item.batch, rank)
            case Gap():
                log.warning("KV events %d to %d are lost", item.first, item.last)
                # What was before the first batch heard is unknown, and not lost.
                self._worker.lost_events += item.last - item.first + 1 if item.first else 0
                self._cache.clear(rank)
            case Reset():
                if item.engine_restarted:
                    log.info("engine's cache is empty: its event numbers went back")
                    self._worker.engine.new_life_heard()
                self._cache.clear(rank)
        self._on_change()
