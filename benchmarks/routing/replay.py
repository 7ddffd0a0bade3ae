"""``Replay``: one routing policy on one trace under virtual time.

The product's own pool, index, health and router choose; workers are a model without an
engine: an LRU of 512-token blocks, prefills one after the other, 20 ms an output token.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any

import msgspec

from benchmarks.fleet import snapshot_of
from benchmarks.report import percentile
from benchmarks.routing.displacement import DisplacingRouter, Regret
from benchmarks.routing.requests import BLOCK_TOKENS, BlockCache, Request
from extproc.cache.digest import BlockDigest
from extproc.fleet.pool import Pool
from extproc.fleet.worker import Booking, Introduction, LoadReport, Worker, WorkerState
from extproc.policy import PoolPolicy, ReportPolicy
from extproc.routing.router import Asked, Router
from extproc.tokens.keyer import PromptKeys

_REPORT_S = 1.0
_TICK_S = 0.25


@dataclass(frozen=True)
class Model:
    """The model's workers. ``cache_blocks`` are of 512 tokens; rates are a worker's own."""

    workers: int = 8
    cache_blocks: int = 1_760
    prefill_tokens_per_s: float = 8_000.0
    output_token_s: float = 0.02
    digest_age_s: float = 2.0
    seed: int = 1


class Replayed(msgspec.Struct, frozen=True):
    """Token hit ratio, most over mean of workers' uncached tokens, TTFT, share of the
    conversations' requests that changed their worker, CPU of a decision."""

    hit_ratio: float
    max_mean_work: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    switch_ratio: float
    decision_ms: float


class Kind(IntEnum):
    """Events; at the same time the lowest goes first."""

    FINISH = 0
    FIRST_TOKEN = 1
    DIGEST = 2
    REPORT = 3
    TICK = 4
    ARRIVE = 5


class ModelWorker:
    """One worker of the model: its cache, what it has to do and what it did."""

    def __init__(self, worker: Worker, cache_blocks: int) -> None:
        self.worker = worker
        self.cache = BlockCache(cache_blocks)
        self.regret = Regret(cache_blocks)
        self.free_at = 0.0
        self.work_tokens = 0
        self.running = 0
        self.changed = True

    def serve(self, request: Request) -> int:
        """Cached tokens of a prompt; afterwards all of it is cached."""
        keys = request.keys.tolist()
        found, evicted = self.cache.serve(keys)
        self.regret.take(keys[found:], evicted)
        self.changed = True
        return min(found * BLOCK_TOKENS, request.prompt_tokens - 1)


class Replay:
    """One policy on one trace, from the first arrival to the last token.

    Args:
        routing: the pool's routing policy, as in YAML.
        displacement: weight of the term that is tried; 0: the product's router.
    """

    def __init__(
        self,
        routing: dict[str, Any],
        requests: Sequence[Request],
        model: Model,
        displacement: float = 0.0,
    ) -> None:
        self._model = model
        self._requests = requests
        digest = {"capacity_blocks": max(1_000, model.cache_blocks * 2), "error_rate": 0.01}
        policy = PoolPolicy.model_validate(
            {
                "model": "trace",
                "block_size_tokens": BLOCK_TOKENS,
                "digest": digest,
                "routing": {"max_engine_queue": 1_000_000, **routing},
            }
        )
        self._pool = Pool(policy, ReportPolicy(), 0.0)
        self._events: list[tuple[float, int, int, Any]] = []
        self._order = count()
        self._workers: dict[int, ModelWorker] = {}
        self._waits: list[float] = []
        self._cached = 0
        self._routing_s = 0.0
        for number in range(model.workers):
            hello = Introduction(f"10.0.0.{number + 1}:8000", ("trace",), max_running=256)
            worker = self._pool.hello(hello, 0.0)
            assert worker is not None
            self._workers[worker.column] = ModelWorker(worker, model.cache_blocks)
        rng = random.Random(model.seed)
        self._displacing = DisplacingRouter(self._pool, rng, displacement) if displacement else None
        self._router = self._displacing or Router(self._pool, rng)
        self._sequence = count(1)

    def run(self) -> Replayed:
        """Replay everything."""
        end = self._requests[-1].arrives_at + 60.0
        for worker in self._workers.values():
            self._at(0.0, Kind.REPORT, worker)
        for kind, every_s in ((Kind.TICK, _TICK_S), (Kind.DIGEST, self._model.digest_age_s)):
            for step in range(int(end / every_s)):
                self._at(every_s * step, kind, None)
        for request in self._requests:
            self._at(request.arrives_at, Kind.ARRIVE, request)
        while self._events:
            now, number, _, subject = heapq.heappop(self._events)
            kind = Kind(number)
            if kind == Kind.ARRIVE:
                self._arrive(subject, now)
            elif kind == Kind.FIRST_TOKEN:
                self._pool.response_started(subject, now)
            elif kind == Kind.FINISH:
                self._finish(subject)
            elif kind == Kind.TICK:
                self._pool.tick(now)
            elif kind == Kind.DIGEST:
                self._send_digests(now)
            elif now < end:
                self._report(subject, now)
        return self._result()

    def _arrive(self, request: Request, now: float) -> None:
        prompt = PromptKeys(request.prompt_tokens, request.keys, exact=True)
        began = time.process_time()
        asked = Asked(output_tokens=request.output_tokens)
        route = self._router.route([prompt], now, asked)
        column = route.columns[0]
        booking = self._pool.book(
            column,
            route.uncached_tokens,
            str(next(self._order)),
            request.output_tokens,
            cached_tokens=route.cached_tokens,
            now=now,
        )
        self._router.note(route, now)
        self._pool.credit(self._workers[column].worker, request.keys)
        self._routing_s += time.process_time() - began
        self._serve(self._workers[column], request, booking, now)

    def _serve(self, worker: ModelWorker, request: Request, booking: Booking, now: float) -> None:
        model = self._model
        cached = worker.serve(request)
        uncached = request.prompt_tokens - cached
        self._cached += cached
        worker.work_tokens += uncached
        worker.running += 1
        worker.free_at = max(worker.free_at, now) + uncached / model.prefill_tokens_per_s
        self._waits.append(worker.free_at - now)
        self._at(worker.free_at, Kind.FIRST_TOKEN, booking)
        ends_at = worker.free_at + model.output_token_s * request.output_tokens
        self._at(ends_at, Kind.FINISH, booking)

    def _finish(self, booking: Booking) -> None:
        self._pool.release(booking)
        self._workers[booking.worker.column].running -= 1

    def _report(self, worker: ModelWorker, now: float) -> None:
        load = LoadReport(
            WorkerState.READY,
            running=float(worker.running),
            waiting=0.0,
            leases=frozenset(),
            signals={"generation_tokens_per_s": float(worker.running)},
        )
        column = worker.worker.column
        self._pool.report(worker.worker, load, now)
        self._pool.table.foreign[column] = 0
        if self._displacing is not None:
            self._displacing.free_blocks[column] = worker.cache.blocks - len(worker.cache)
            self._displacing.regret[column] = worker.regret.share
        self._at(now + _REPORT_S, Kind.REPORT, worker)

    def _send_digests(self, now: float) -> None:
        policy = self._pool.policy.digest
        for worker in self._workers.values():
            if not worker.changed:
                continue
            worker.changed = False
            digest = BlockDigest(policy.capacity_blocks, policy.error_rate)
            digest.add_keys(worker.cache.keys)
            snapshot = snapshot_of(digest, BLOCK_TOKENS, next(self._sequence))
            self._pool.snapshot(worker.worker, snapshot, now)

    def _at(self, when: float, kind: Kind, subject: object) -> None:
        heapq.heappush(self._events, (when, kind, next(self._order), subject))

    def _result(self) -> Replayed:
        work = [worker.work_tokens for worker in self._workers.values()]
        asked = sum(request.prompt_tokens for request in self._requests)
        conversations = self._router.conversations
        return Replayed(
            hit_ratio=self._cached / asked,
            max_mean_work=max(work) * len(work) / sum(work),
            ttft_mean_s=sum(self._waits) / len(self._waits),
            ttft_p50_s=percentile(self._waits, 0.5),
            ttft_p99_s=percentile(self._waits, 0.99),
            switch_ratio=conversations.switches / max(1, conversations.repeats),
            decision_ms=1_000 * self._routing_s / len(self._requests),
        )
