"""``Pool``: the workers of one base model, their index, their load and their bookings.

Everything here is a plain method call with the time handed in. A worker is *present* from
its agent's hello until it is lost, *ready* while its engine serves, *fresh* while its
reports are recent.
"""

from __future__ import annotations

import numpy as np

from extproc.cache.digest import DigestShape
from extproc.cache.feed import Delta, DigestFeed, Snapshot
from extproc.cache.index import PrefixIndex, joint_runs
from extproc.errors import DigestError
from extproc.fleet.table import ALWAYS, NEVER, Bools, Floats, WorkerTable
from extproc.fleet.worker import Booking, Introduction, LoadReport, Tier, Worker, WorkerState
from extproc.policy import PoolPolicy, ReportPolicy
from extproc.tokens.blocks import Keys

_AGED_PER_TICK = 16
"""Overlay generations ended per tick (about 0.1 ms each), so that ticks stay short."""


class Pool:
    """One pool's live state."""

    def __init__(self, policy: PoolPolicy, reports: ReportPolicy, now: float) -> None:
        self.policy = policy
        self._reports = reports
        shape = DigestShape(policy.digest.capacity_blocks, policy.digest.error_rate)
        self.index = PrefixIndex(shape, policy.overlay.max_keys_per_worker)
        self.table = WorkerTable()
        self.workers: dict[str, Worker] = {}
        self._by_column: dict[int, Worker] = {}
        self._host: PrefixIndex | None = None
        self._leases: set[str] = set()
        self._serving: dict[str, Bools] = {}
        for address in policy.workers:
            self._add(address, reports=False, now=now)

    def hello(self, hello: Introduction, now: float) -> Worker | None:
        """An agent's stream begins; None when the pool has no room for another worker."""
        worker = self.workers.get(hello.address)
        if worker is None:
            if len(self.workers) >= self._reports.max_workers:
                return None
            worker = self._add(hello.address, reports=True, now=now)
        elif not worker.reports:
            self._lead_by_reports(worker)
        worker.engine = hello.engine
        worker.sends_digests = hello.sends_digests
        worker.reported_at = now
        worker.feed.open_stream()
        if worker.host_feed is not None:
            worker.host_feed.open_stream()
        self._serve(worker, hello.models)
        self.table.slots[worker.column] = (
            hello.max_running or self.policy.routing.max_in_flight_per_worker
        )
        return worker

    def report(self, worker: Worker, load: LoadReport, now: float) -> None:
        """Take a load report; its age counts from its scrape, on our own clock."""
        column = worker.column
        worker.last_report = load
        worker.reported_at = now
        self.table.ready[column] = load.state is WorkerState.READY
        self.table.fresh_until[column] = now - load.age_s + self._reports.stale_after_s
        if not load.state.keeps_cache:
            # An engine that is gone comes back empty; its next snapshot says what it has.
            self.forget_digest(worker)
        if load.adapters:
            self._serve(worker, (self.policy.model, *self.policy.aliases, *load.adapters))
        seen = round((load.running or 0) + (load.waiting or 0))
        ours = worker.peak_in_flight if load.leases is None else len(load.leases & self._leases)
        self.table.foreign[column] = max(0, seen - ours)
        worker.peak_in_flight = int(self.table.in_flight[column])

    def cached_blocks(self, keys: Keys) -> Floats:
        """Leading blocks that each worker has, those to be loaded from host memory discounted."""
        runs = self.index.longest_runs(keys).astype(np.float64)
        if self._host is not None:
            loaded = joint_runs(keys, self.index, self._host) - runs
            runs += self.policy.routing.host_hit_weight * loaded
        return runs

    def snapshot(
        self, worker: Worker, snapshot: Snapshot, now: float, tier: Tier = Tier.DEVICE
    ) -> None:
        """Replace a worker's digest of one tier.

        Raises:
            DigestError: see :meth:`DigestFeed.apply_snapshot`.
        """
        if tier is Tier.HOST:
            self._host_feed(worker).apply_snapshot(snapshot, now)
            return
        try:
            applied = worker.feed.apply_snapshot(snapshot, now)
        except DigestError:
            self.forget_digest(worker)
            raise
        if applied:
            self.table.digest_until[worker.column] = now + self.policy.digest.max_age_s

    def delta(self, worker: Worker, delta: Delta, now: float, tier: Tier = Tier.DEVICE) -> None:
        """Change a worker's digest of one tier.

        Raises:
            DigestError: see :meth:`DigestFeed.apply_delta`.
        """
        if tier is Tier.HOST:
            self._host_feed(worker).apply_delta(delta, now)
            return
        worker.feed.apply_delta(delta, now)
        self.table.digest_until[worker.column] = now + self.policy.digest.max_age_s

    def forget_digest(self, worker: Worker) -> None:
        """No cache credit until the worker's next snapshot, or what is routed from here on."""
        worker.feed.forget()
        if worker.host_feed is not None:
            worker.host_feed.forget()
        self.table.digest_until[worker.column] = ALWAYS

    def suspect(self, worker: Worker, now: float) -> None:
        """Envoy had to retry away from this worker: last resort for a while."""
        until = now + self.policy.routing.suspect_s
        column = worker.column
        self.table.suspect_until[column] = max(self.table.suspect_until[column], until)

    def book(self, column: int, uncached_tokens: int, lease: str) -> Booking:
        """Count a request on its worker, before anybody is told of it."""
        worker = self._by_column[column]
        self._leases.add(lease)
        self.table.in_flight[column] += 1
        self.table.pending_prefill_tokens[column] += uncached_tokens
        worker.peak_in_flight = max(worker.peak_in_flight, int(self.table.in_flight[column]))
        return Booking(worker, uncached_tokens, lease)

    def first_token(self, booking: Booking) -> None:
        """The engine has finished this request's prefill."""
        if booking.prefilling and not booking.released:
            booking.prefilling = False
            if self._holds(booking.worker):
                column = booking.worker.column
                self.table.pending_prefill_tokens[column] -= booking.uncached_tokens

    def release(self, booking: Booking) -> None:
        """Give a booking back; a second call does nothing."""
        if booking.released:
            return
        self.first_token(booking)
        booking.released = True
        self._leases.discard(booking.lease)
        if self._holds(booking.worker):
            self.table.in_flight[booking.worker.column] -= 1

    def credit(self, worker: Worker, keys: Keys) -> None:
        """Expect these keys on a worker soon: a prompt was just sent to it."""
        self.index.overlay(worker.column, keys)

    def serves(self, name: str) -> bool:
        """Whether some worker lists this adapter."""
        return name in self._serving

    def usable(self, name: str | None) -> Bools:
        """Ready workers that serve a model or adapter, full or not."""
        return self._among(self.table.usable(), name)

    def has_slot(self, name: str | None) -> Bools:
        """Ready workers that serve a model or adapter and have room for one request more."""
        return self._among(self.table.has_slot(), name)

    def worker_at(self, column: int) -> Worker:
        """The worker of a column."""
        return self._by_column[column]

    def tick(self, now: float) -> list[Worker]:
        """Age what time ages; returns the workers that left the pool."""
        lost = [
            worker
            for worker in self.workers.values()
            if worker.reports and now - worker.reported_at > self._reports.lost_after_s
        ]
        for worker in lost:
            self._remove(worker)
        self._age_overlays(now)
        return lost

    def _add(self, address: str, *, reports: bool, now: float) -> Worker:
        column = self.index.add_column()
        self.table.resize(self.index.width)
        self.table.reset(column)
        feed = DigestFeed(self.index, column, self.policy.block_size_tokens)
        worker = Worker(address, column, feed, reports=reports, now=now)
        self.workers[address] = self._by_column[column] = worker
        self._index_names()
        self.table.present[column] = True
        self.table.slots[column] = self.policy.routing.max_in_flight_per_worker
        self.table.digest_until[column] = ALWAYS
        if not reports:
            self.table.ready[column] = True
            self.table.fresh_until[column] = ALWAYS
        return worker

    def _lead_by_reports(self, worker: Worker) -> None:
        """A worker of the static list got an agent: believe that from now on."""
        worker.reports = True
        self.table.ready[worker.column] = False
        self.table.fresh_until[worker.column] = NEVER

    def _remove(self, worker: Worker) -> None:
        """Bookings that outlive their worker are released against nothing."""
        del self.workers[worker.address]
        del self._by_column[worker.column]
        self.index.remove_column(worker.column)
        if self._host is not None and worker.host_feed is not None:
            self._host.close_column(worker.column)
        self.table.reset(worker.column)
        self._index_names()

    def _host_feed(self, worker: Worker) -> DigestFeed:
        """The worker's host-memory digest; pools without any have no index for it."""
        if self._host is None:
            self._host = PrefixIndex(self.index.shape, max_overlay_keys=0)
        if worker.host_feed is None:
            self._host.open_column(worker.column)
            block_size = self.policy.block_size_tokens
            worker.host_feed = DigestFeed(self._host, worker.column, block_size)
        return worker.host_feed

    def _serve(self, worker: Worker, names: tuple[str, ...]) -> None:
        """Note which names a worker serves now."""
        if worker.names != frozenset(names):
            worker.names = frozenset(names)
            self._index_names()

    def _among(self, workers: Bools, name: str | None) -> Bools:
        # An adapter that no worker lists may be in the policy, and loaded on demand.
        mask = self._serving.get(name or "")
        return workers if mask is None else workers & mask

    def _index_names(self) -> None:
        """Adapters' masks from all workers' lists; names of the base model need none."""
        base = {self.policy.model, *self.policy.aliases}
        unreported = [w.column for w in self.workers.values() if not w.reports]
        self._serving = {}
        for worker in self.workers.values():
            for name in worker.names - base:
                if name not in self._serving:
                    self._serving[name] = np.zeros(len(self.table), dtype=bool)
                    self._serving[name][unreported] = True
                self._serving[name][worker.column] = True

    def _holds(self, worker: Worker) -> bool:
        return self._by_column.get(worker.column) is worker

    def _age_overlays(self, now: float) -> None:
        overlay = self.policy.overlay
        due = []
        for worker in self.workers.values():
            ttl_s = overlay.ttl_s if worker.sends_digests else overlay.ttl_without_digest_s
            if now - worker.overlay_aged_at >= ttl_s:
                due.append(worker)
        due.sort(key=lambda worker: worker.overlay_aged_at)
        for worker in due[:_AGED_PER_TICK]:
            self.index.age_overlay(worker.column)
            worker.overlay_aged_at = now
