"""``Pool``: the workers of one base model, their index, their load and their bookings.

Everything here is a plain method call with the time handed in. A worker is *present* from
its agent's hello until it is lost, *ready* while its engine serves, *fresh* while its
reports are recent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
from xxhash import xxh3_64_intdigest

from extproc.cache.digest import DigestShape
from extproc.cache.feed import Delta, DigestFeed, Snapshot
from extproc.cache.index import PrefixIndex, joint_runs
from extproc.errors import DigestError
from extproc.fleet.calibration import Calibration
from extproc.fleet.health import Health, error_of
from extproc.fleet.table import ALWAYS, NEVER, Bools, Floats, WorkerTable, some
from extproc.fleet.worker import (
    Booking,
    EngineError,
    Introduction,
    LoadReport,
    Outcome,
    Role,
    Tier,
    Worker,
    WorkerState,
)
from extproc.policy import PoolPolicy, ReportPolicy, parse_address
from extproc.tokens.blocks import Keys

_RECENT_S = 60.0
"""Time constant with which sent work stops being recent."""
_AGED_PER_TICK = 16
"""Overlay generations ended per tick (about 0.1 ms each), so that ticks stay short."""


class Pool:
    """One pool's live state.

    Attributes:
        aged: workers whose overlay grew older in the last tick.
    """

    def __init__(self, policy: PoolPolicy, reports: ReportPolicy, now: float) -> None:
        self._policy = policy
        self._reports = reports
        shape = DigestShape(policy.digest.capacity_blocks, policy.digest.error_rate)
        self.index = PrefixIndex(shape, policy.overlay.max_keys_per_worker)
        self.table = WorkerTable()
        self.health = Health(self.table, policy.routing.health, now)
        self.calibration = Calibration()
        self.workers: dict[str, Worker] = {}
        self._by_column: dict[int, Worker] = {}
        self._host: PrefixIndex | None = None
        self._leases: set[str] = set()
        self._hot: Counter[int] = Counter()
        self._keyed_by_text = False
        self.aged: list[Worker] = []
        self._picks = 0
        self.newest_at = now
        self._ticked_at = now
        self._fresh_until = NEVER
        self._serving: dict[str, Bools] = {}
        for address in policy.workers:
            self._add(address, reports=False, now=now)

    @property
    def policy(self) -> PoolPolicy:
        """The policy in force; another one takes effect with the next call."""
        return self._policy

    @policy.setter
    def policy(self, policy: PoolPolicy) -> None:
        self._policy = policy
        self.health.policy = policy.routing.health

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
        self._label(worker, hello.labels)
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
        if not load.state.keeps_cache or worker.last_report is None:
            self._start(column, now)
        worker.last_report = load
        worker.reported_at = now
        self.table.ready[column] = load.state is WorkerState.READY
        fresh_until = now - load.age_s + self._reports.stale_after_s
        self.table.fresh_until[column] = fresh_until
        self._fresh_until = min(self._fresh_until, fresh_until)
        if not load.state.keeps_cache:
            # An engine that is gone comes back empty; its next snapshot says what it has.
            self.forget_digest(worker)
        if load.adapters:
            self._serve(worker, (self.policy.model, *self.policy.aliases, *load.adapters))
        seen = round((load.running or 0) + (load.waiting or 0))
        ours = worker.peak_in_flight if load.leases is None else len(load.leases & self._leases)
        self.table.foreign[column] = max(0, seen - ours)
        worker.peak_in_flight = int(self.table.in_flight[column])
        self._take_room(worker, load)
        self.health.report(column, load, now)

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
        self.health.mark(self.table.suspect_until, column, until)
        if not worker.tells_ends:
            self.health.ended(column, EngineError.OTHER, now)

    def book(
        self,
        column: int,
        uncached_tokens: int,
        lease: str,
        output_tokens: int = 0,
        *,
        cached_tokens: int = 0,
        prefills: bool = True,
        now: float | None = None,
    ) -> Booking:
        """Count a request on its worker, before anybody is told of it.

        Args:
            output_tokens: what it is expected to generate.
            cached_tokens: what was predicted of its cache.
            prefills: whether it computes the uncached tokens itself.
            now: when it is sent; without, nothing is learned from when it is answered.
        """
        worker, table = self._by_column[column], self.table
        kv_blocks = self._kv_blocks(uncached_tokens + output_tokens)
        if now is not None and not table.prefilling[column]:
            table.progress_at[column] = max(table.progress_at[column], now)
        if not prefills:
            uncached_tokens = 0
        ahead = int(table.pending_prefill_tokens[column]) + uncached_tokens
        booking = Booking(
            worker,
            uncached_tokens,
            lease,
            output_tokens,
            kv_blocks,
            cached_tokens,
            ahead,
            booked_at=now,
            prefilling=prefills,
        )
        self._leases.add(lease)
        self.calibration.expect(lease, cached_tokens)
        worker.unseen[lease] = booking
        table.in_flight[column] += 1
        table.prefilling[column] += prefills
        self._picks += 1
        table.picked_at[column] = self._picks
        table.pending_prefill_tokens[column] += uncached_tokens
        table.output_tokens[column] += output_tokens
        table.recent_tokens[column] += uncached_tokens
        table.kv_booked_blocks[column] += kv_blocks
        worker.peak_in_flight = max(worker.peak_in_flight, int(table.in_flight[column]))
        return booking

    def first_token(self, booking: Booking) -> None:
        """The engine has finished this request's prefill."""
        if booking.prefilling and not booking.released:
            booking.prefilling = False
            if self._holds(booking.worker):
                column = booking.worker.column
                self.table.prefilling[column] -= 1
                self.table.pending_prefill_tokens[column] -= booking.uncached_tokens

    def response_started(
        self,
        booking: Booking,
        now: float,
        *,
        status: int = 200,
        error: EngineError | None = None,
    ) -> None:
        """A worker's response headers: the first token, where it holds them until then.

        ``error`` is the engine's own word for what went wrong, if it gave one.
        """
        worker = booking.worker
        if booking.released or not self._holds(worker):
            return
        if booking.prefilling and booking.booked_at is not None and status < 400:
            waited_s = now - booking.booked_at
            if worker.tells_ends or not worker.reports:
                self.health.first_token(worker.column, waited_s, booking.ahead_tokens, now)
        progress_at = self.table.progress_at
        progress_at[worker.column] = max(progress_at[worker.column], now)
        self.first_token(booking)
        if not worker.tells_ends:
            self.health.ended(worker.column, error or error_of(status), now)

    def outcome(self, worker: Worker, outcome: Outcome, now: float) -> None:
        """An engine's word on how a request ended, also one that Envoy took elsewhere since."""
        if not self._holds(worker):
            return
        error = outcome.error
        if error is EngineError.UNKNOWN:
            error = error_of(outcome.status)
        self.health.ended(worker.column, error, now)
        if outcome.cached_tokens is not None and self.policy.routing.calibrate:
            column = worker.column
            self.table.cache_credit[column] = self.calibration.learn(
                column, outcome.lease, outcome.cached_tokens
            )

    def release(self, booking: Booking) -> None:
        """Give a booking back; a second call does nothing."""
        if booking.released:
            return
        self.first_token(booking)
        booking.released = True
        self._leases.discard(booking.lease)
        if self._holds(booking.worker):
            column = booking.worker.column
            self.table.in_flight[column] -= 1
            self.table.output_tokens[column] -= booking.output_tokens
            if booking.worker.unseen.pop(booking.lease, None) is not None:
                self.table.kv_booked_blocks[column] -= booking.kv_blocks

    def credit(self, worker: Worker, keys: Keys, *, by_text: bool = False) -> None:
        """Expect these keys on a worker soon: a prompt was just sent to it.

        Args:
            by_text: no digest will ever tell of them.
        """
        self._keyed_by_text = self._keyed_by_text or by_text
        self.index.overlay(worker.column, keys)

    def is_base(self, name: str) -> bool:
        """Whether a name means the base model, without an adapter."""
        return name == self.policy.model or name in self.policy.aliases

    def prefillers(self, name: str | None) -> Bools:
        """Ready workers that prefill for others, with a model or adapter."""
        return self._among(self.table.prefillers(), name)

    def prefill_s(self, tokens: int) -> float:
        """Likely time to prefill so many tokens on an idle worker; 0 while no rate is known."""
        rates = self.table.prefill_tokens_per_s
        known = rates[rates > 0]  # NaN where it is not known, and where nobody is
        return tokens * len(known) / float(np.add.reduce(known)) if len(known) else 0.0

    def is_adapter(self, name: str) -> bool:
        """Whether a name is an adapter's and not one of the base model's own."""
        return name != self.policy.model and name not in self.policy.aliases

    def serves(self, name: str) -> bool:
        """Whether some worker lists this adapter."""
        return name in self._serving

    def usable(self, name: str | None) -> Bools:
        """Ready workers that serve a model or adapter, full or not."""
        return self._among(self.table.usable(), name)

    def has_slot(self, name: str | None) -> Bools:
        """Ready workers that serve a model or adapter and have room for one request more."""
        return self._among(self.table.has_slot(), name)

    def has_room(self, name: str | None, new_kv_tokens: int, over_slots: int = 0) -> Bools:
        """Ready workers that serve a model or adapter and can start this request at once.

        Beyond a slot that takes an engine queue of at most ``max_engine_queue``, free KV blocks
        for ``new_kv_tokens`` and at most ``max_prefill_s`` of prefill before it, as far as any
        of it is known.
        """
        return self._among(self._room(self._kv_blocks(new_kv_tokens), over_slots), name)

    def has_any_room(self) -> bool:
        """Whether some worker could start a small request at once."""
        return some(self._room(1))

    def _room(self, kv_blocks: int, over_slots: int = 0) -> Bools:
        table = self.table
        room = table.has_room(self.policy.routing.max_engine_queue, kv_blocks, over_slots)
        longest_s = self.policy.admission.max_prefill_s
        if longest_s is not None:
            room &= ~(table.pending_prefill_tokens > longest_s * table.prefill_tokens_per_s)
        return room

    def among(self, allowed: Collection[str]) -> Bools:
        """Workers that a list of addresses or bare ips names."""
        mask = np.zeros(len(self.table), dtype=bool)
        for worker in self.workers.values():
            address = worker.address
            mask[worker.column] = address in allowed or parse_address(address)[0] in allowed
        return mask

    def trust(self, now: float) -> Floats:
        """How far each worker's last report is to be believed: 1 when fresh, 0 when stale."""
        left: Floats = (self.table.fresh_until - now) / self._reports.stale_after_s
        return np.minimum(np.maximum(left, 0.0), 1.0)

    def all_sound(self, now: float) -> bool:
        """Whether no worker is silent, suspect or cooling down; False where that is not known.

        One comparison in place of several arrays: most of the time the answer is yes.
        """
        return now < self._fresh_until and now >= self.health.marked_until

    @property
    def zoned(self) -> bool:
        """Whether the gateway's zone matters."""
        return bool(self.policy.routing.zone)

    def column_of(self, address: str | None) -> int:
        """Column of a worker, -1 if it is not there."""
        worker = self.workers.get(address or "")
        return -1 if worker is None else worker.column

    def take_hot(self, worker: Worker, hot: tuple[tuple[int, int], ...]) -> None:
        """An agent's hottest prefixes of its last report interval, replacing those before."""
        self._hot.subtract(dict(worker.hot_prefixes))
        self._hot.update(dict(hot))
        for key, _ in worker.hot_prefixes:
            if self._hot[key] <= 0:
                del self._hot[key]
        worker.hot_prefixes = hot

    def told_hot(self, key: int) -> float:
        """Different continuations of a prefix a second, as all agents together tell."""
        return self._hot[key] / self._reports.interval_s

    def holders(self, key: int) -> Bools:
        """Workers thought to hold a block, and with it the prefix that it ends."""
        held = self.index.held(np.array([key], dtype=np.uint64), len(self.table))[0]
        holders: Bools = held.astype(bool) & self.table.present
        return holders

    def worker_at(self, column: int) -> Worker:
        """The worker of a column."""
        return self._by_column[column]

    def excuse(self, seconds: float) -> None:
        """Nobody was listened to for so long: no worker's silence counts in that time."""
        for worker in self.workers.values():
            worker.reported_at += seconds
        self.table.fresh_until += seconds

    def tick(self, now: float) -> list[Worker]:
        """Age what time ages; returns the workers that left the pool."""
        lost = [
            worker
            for worker in self.workers.values()
            if worker.reports and now - worker.reported_at > self._reports.lost_after_s
        ]
        for worker in lost:
            self._remove(worker)
        # A worker that fell silent is neither full nor empty: nobody knows.
        silent = self.table.fresh_until <= now
        self.table.engine_queue[silent] = 0
        self.table.kv_free_blocks[silent] = np.inf
        self.table.kv_usage[silent] = np.nan
        self.table.recent_tokens *= math.exp(-max(0.0, now - self._ticked_at) / _RECENT_S)
        self._ticked_at = now
        self._fresh_until = float(self.table.fresh_until[self.table.present].min(initial=ALWAYS))
        self.health.tick(now, self.trust(now))
        self._age_overlays(now)
        return lost

    def _start(self, column: int, now: float, score: float | None = None) -> None:
        """A worker with nothing in its cache and no past."""
        first = self.policy.routing.health.first_score if score is None else score
        self.health.start(column, now, score=first)
        self.calibration.forget(column)
        self.table.cache_credit[column] = 1.0
        # As if it had worked like the others: a new worker is not to catch up at once.
        self.table.recent_tokens[column] = self.table.mean(self.table.recent_tokens) or 0.0
        self.table.joined_at[column] = self.newest_at = now

    def _kv_blocks(self, tokens: int) -> int:
        return -(-tokens // self.policy.block_size_tokens)

    def _take_room(self, worker: Worker, load: LoadReport) -> None:
        """What the engine has left, and which bookings are in that number."""
        table, column = self.table, worker.column
        table.engine_queue[column] = round(load.waiting or 0)
        table.kv_free_blocks[column] = _free_blocks(load)
        table.kv_usage[column] = np.nan if load.kv_usage is None else load.kv_usage
        if load.leases is None:
            worker.unseen.clear()
        else:
            for lease in load.leases & worker.unseen.keys():
                del worker.unseen[lease]
        table.kv_booked_blocks[column] = sum(each.kv_blocks for each in worker.unseen.values())

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
        self.table.seed[column] = xxh3_64_intdigest(address.encode())
        self._start(column, now, score=100.0 if not reports else None)
        if not reports:
            self.table.ready[column] = True
            self.table.fresh_until[column] = ALWAYS
        return worker

    def _lead_by_reports(self, worker: Worker) -> None:
        """A worker of the static list got an agent: believe that from now on."""
        worker.reports = True
        self.table.ready[worker.column] = False
        self.table.fresh_until[worker.column] = self._fresh_until = NEVER

    def _remove(self, worker: Worker) -> None:
        """Bookings that outlive their worker are released against nothing."""
        self.take_hot(worker, ())
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

    def _label(self, worker: Worker, labels: Mapping[str, str]) -> None:
        """Take an operator's word on a worker's role and zone."""
        worker.labels = labels
        table, column, role = self.table, worker.column, worker.role
        table.leads[column] = role is not Role.PREFILL
        table.prefills[column] = role in (Role.PREFILL, Role.BOTH)
        table.decodes[column] = role in (Role.DECODE, Role.BOTH)
        routing = self.policy.routing
        zone = labels.get(routing.zone_label, "")
        table.elsewhere[column] = bool(routing.zone and zone and zone != routing.zone)

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
            told = worker.sends_digests and not self._keyed_by_text
            ttl_s = overlay.ttl_s if told else overlay.ttl_without_digest_s
            if now - worker.overlay_aged_at >= ttl_s:
                due.append(worker)
        due.sort(key=lambda worker: worker.overlay_aged_at)
        self.aged = due[:_AGED_PER_TICK]
        for worker in self.aged:
            self.index.age_overlay(worker.column)
            worker.overlay_aged_at = now


def _free_blocks(load: LoadReport) -> float:
    if load.kv_usage is None or not load.kv_blocks:
        return np.inf
    return load.kv_blocks * (1.0 - load.kv_usage)
