"""What the agent does beside an engine: digest changes and load, at the policy's pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from extproc.cache.digest import HASH_NAME, WIRE_VERSION, DigestShape
from extproc.cache.feed import Delta, Snapshot
from extproc.fleet.worker import LoadReport, WorkerState
from extproc.policy import PoolPolicy
from workers.agent.counted_digest import CountedDigest, checksum_of
from workers.simulator.engine import Engine
from workers.simulator.requests import AllBlocksCleared, BlockRemoved, BlocksStored, CacheEvent


class VirtualAgent:
    """One engine life's reports."""

    def __init__(self, pool: PoolPolicy, engine: Engine, epoch: int) -> None:
        self._pool = pool
        self._engine = engine
        self._epoch = epoch
        self._shape = DigestShape(pool.digest.capacity_blocks, pool.digest.error_rate)
        self._digest = CountedDigest(self._shape, np.empty(0, dtype=np.uint64))
        self._copies: Counter[int] = Counter()
        self._touched: dict[int, bool] = {}
        self._sequence = 0
        self._told = (0, 0)

    @property
    def has_news(self) -> bool:
        """Whether anything was cached or evicted since the last delta."""
        return bool(self._touched)

    def take(self, events: Sequence[CacheEvent]) -> None:
        """Cache events of a step."""
        for event in events:
            if isinstance(event, BlocksStored):
                for key in event.hashes:
                    self._count(key, 1)
            elif isinstance(event, BlockRemoved):
                self._count(event.block_hash, -1)
            elif isinstance(event, AllBlocksCleared):
                for key in list(self._copies):
                    self._count(key, -self._copies[key])

    def snapshot(self) -> Snapshot:
        """The whole digest, as at the beginning of a stream."""
        self._sequence += 1
        bits = self._digest.packed()
        return Snapshot(
            version=WIRE_VERSION,
            epoch=self._epoch,
            sequence=self._sequence,
            block_size_tokens=self._pool.block_size_tokens,
            capacity=self._shape.capacity,
            error_rate=self._shape.error_rate,
            num_slices=self._shape.num_slices,
            bits_per_slice=self._shape.bits_per_slice,
            hash_name=HASH_NAME,
            count=self._digest.count,
            bits=bits,
            checksum=checksum_of(bits),
        )

    def delta(self) -> Delta:
        """What changed since the message before."""
        touched, self._touched = self._touched, {}
        added = [key for key, was in touched.items() if not was and self._copies[key]]
        removed = [key for key, was in touched.items() if was and not self._copies[key]]
        added_keys, removed_keys = (np.array(keys, dtype="<u8") for keys in (added, removed))
        cleared = self._digest.change(added_keys, removed_keys)
        self._sequence += 1
        return Delta(
            self._epoch, self._sequence, added_keys.tobytes(), cleared.tobytes(), len(removed)
        )

    def load(self, state: WorkerState, interval_s: float) -> LoadReport:
        """The engine's gauges, and its rates since the last report."""
        engine, stats = self._engine, self._engine.stats
        before, self._told = self._told, (stats.prompt_tokens, stats.generation_tokens)
        prompt, generated = (now - then for now, then in zip(self._told, before, strict=True))
        return LoadReport(
            state,
            running=float(len(engine.running)),
            waiting=float(len(engine.waiting)),
            kv_usage=engine.blocks.usage,
            leases=frozenset([each.request_id for each in (*engine.running, *engine.waiting)]),
            signals={
                "prompt_tokens_per_s": prompt / interval_s,
                "generation_tokens_per_s": generated / interval_s,
            },
        )

    def _count(self, key: int, change: int) -> None:
        copies = self._copies[key]
        self._touched.setdefault(key, copies > 0)
        self._copies[key] = copies + change
        if not self._copies[key]:
            del self._copies[key]
