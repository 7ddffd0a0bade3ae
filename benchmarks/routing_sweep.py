"""Every routing profile on the Mooncake traces: cache hits, balance and waiting.

    python -m benchmarks.routing_sweep --traces ../shared/traces

The product's own pool, index, health and router choose under virtual time; workers are a
model without an engine: an LRU of 512-token blocks, prefills one after the other at 8,000
tokens a second, 20 ms an output token. It ranks profiles; it does not predict latency. The
conversation trace has clumps every 3 s, an artefact of its clock: they are spread by seed.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.progress import Progress

from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, console, percentile, print_table, write_json
from extproc.cache.digest import HASH_NAME, WIRE_VERSION, BlockDigest
from extproc.cache.feed import Snapshot
from extproc.fleet.pool import Pool
from extproc.fleet.worker import Booking, Introduction, LoadReport, Worker, WorkerState
from extproc.policy import PoolPolicy, ReportPolicy
from extproc.routing.profiles import PROFILES
from extproc.routing.router import Asked, Router
from extproc.tokens.blocks import Keys
from extproc.tokens.keyer import PromptKeys

BLOCK_TOKENS = 512
CLUMP_S = 3.0
TRACES = {"conversation": "mooncake_conversation.jsonl", "synthetic": "mooncake_synthetic.jsonl"}
_REPORT_S = 1.0
_TICK_S = 0.25
_EPOCH = 1


@dataclass(frozen=True)
class Settings:
    """What is swept. ``cache_blocks`` are a worker's, of 512 tokens; rates are its own."""

    traces: Path
    rows: int = 3_000
    workers: tuple[int, ...] = (4, 8, 16)
    digest_ages_s: tuple[float, ...] = (2.0,)
    cache_blocks: int = 1_760
    prefill_tokens_per_s: float = 8_000.0
    output_token_s: float = 0.02
    seed: int = 1
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(VARIANTS))
    output: Path = RESULTS / "routing_sweep.json"


VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"profile": name} for name in PROFILES},
    "hash without bound": {"profile": "consistent_hash", "affinity": {"hash_max_load": 1_000}},
    "longest match": {"profile": "random", "weights": {"prefix_locality": 1}},
}
"""Policies by name: the profiles, the hash that keeps every prefix in its place whatever the
load, and the routing that herds on a shared root."""


class Row(msgspec.Struct):
    """One line of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: arrival in seconds, lengths in tokens, keys of its full blocks."""

    arrives_at: float
    prompt_tokens: int
    output_tokens: int
    keys: Keys


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
        self.free_at = 0.0
        self.work_tokens = 0
        self.running = 0
        self.changed = True
        self._cache_blocks = cache_blocks
        self._cache: OrderedDict[int, None] = OrderedDict()

    def serve(self, request: Request) -> int:
        """Cached tokens of a prompt; afterwards all of it is cached, its end first to go."""
        keys = request.keys.tolist()
        hits = next((n for n, key in enumerate(keys) if key not in self._cache), len(keys))
        for key in reversed(keys):
            self._cache[key] = None
            self._cache.move_to_end(key)
        while len(self._cache) > self._cache_blocks:
            self._cache.popitem(last=False)
        self.changed = True
        return min(hits * BLOCK_TOKENS, request.prompt_tokens - 1)

    @property
    def keys(self) -> Keys:
        """What is cached."""
        return np.fromiter(self._cache, dtype=np.uint64, count=len(self._cache))


class Replay:
    """One policy on one trace, from the first arrival to the last token."""

    def __init__(
        self, routing: dict[str, Any], requests: list[Request], workers: int, settings: Settings
    ) -> None:
        self._settings = settings
        self._requests = requests
        digest = {"capacity_blocks": max(1_000, settings.cache_blocks * 2), "error_rate": 0.01}
        policy = PoolPolicy.model_validate(
            {
                "model": "trace",
                "block_size_tokens": BLOCK_TOKENS,
                "digest": digest,
                "routing": {"max_engine_queue": 1_000_000, **routing},
            }
        )
        self._pool = Pool(policy, ReportPolicy(), 0.0)
        self._router = Router(self._pool, random.Random(settings.seed))
        self._events: list[tuple[float, int, int, Any]] = []
        self._order = count()
        self._workers: dict[int, ModelWorker] = {}
        self._waits: list[float] = []
        self._cached = 0
        self._routing_s = 0.0
        for number in range(workers):
            hello = Introduction(f"10.0.0.{number + 1}:8000", ("trace",), max_running=256)
            worker = self._pool.hello(hello, 0.0)
            assert worker is not None
            self._workers[worker.column] = ModelWorker(worker, settings.cache_blocks)
        self._sequence = count(1)

    def run(self, digest_age_s: float) -> dict[str, Any]:
        """Replay everything.

        Returns:
            Token hit ratio, max/mean uncached tokens, TTFT percentiles in seconds, switches
            of conversations, and CPU milliseconds a decision.
        """
        end = self._requests[-1].arrives_at + 60.0
        for model in self._workers.values():
            self._at(0.0, Kind.REPORT, model)
        for kind, every_s in ((Kind.TICK, _TICK_S), (Kind.DIGEST, digest_age_s)):
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
        settings = self._settings
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
        model = self._workers[column]
        self._pool.credit(model.worker, request.keys)
        self._routing_s += time.process_time() - began
        cached = model.serve(request)
        uncached = request.prompt_tokens - cached
        self._cached += cached
        model.work_tokens += uncached
        model.running += 1
        model.free_at = max(model.free_at, now) + uncached / settings.prefill_tokens_per_s
        self._waits.append(model.free_at - now)
        self._at(model.free_at, Kind.FIRST_TOKEN, booking)
        ends_at = model.free_at + settings.output_token_s * request.output_tokens
        self._at(ends_at, Kind.FINISH, booking)

    def _finish(self, booking: Booking) -> None:
        self._pool.release(booking)
        self._workers[booking.worker.column].running -= 1

    def _report(self, model: ModelWorker, now: float) -> None:
        signals = {"generation_tokens_per_s": float(model.running)}
        load = LoadReport(
            WorkerState.READY,
            running=float(model.running),
            waiting=0.0,
            leases=frozenset(),
            signals=signals,
        )
        self._pool.report(model.worker, load, now)
        self._pool.table.foreign[model.worker.column] = 0
        self._at(now + _REPORT_S, Kind.REPORT, model)

    def _send_digests(self, now: float) -> None:
        policy = self._pool.policy.digest
        for model in self._workers.values():
            if not model.changed:
                continue
            model.changed = False
            digest = BlockDigest(policy.capacity_blocks, policy.error_rate)
            digest.add_keys(model.keys)
            snapshot = Snapshot(
                version=WIRE_VERSION,
                epoch=_EPOCH,
                sequence=next(self._sequence),
                block_size_tokens=BLOCK_TOKENS,
                capacity=digest.shape.capacity,
                error_rate=digest.shape.error_rate,
                num_slices=digest.shape.num_slices,
                bits_per_slice=digest.shape.bits_per_slice,
                hash_name=HASH_NAME,
                count=digest.count,
                bits=digest.packed(),
                checksum=digest.checksum(),
            )
            self._pool.snapshot(model.worker, snapshot, now)

    def _at(self, when: float, kind: Kind, subject: object) -> None:
        heapq.heappush(self._events, (when, kind, next(self._order), subject))

    def _result(self) -> dict[str, Any]:
        work = [model.work_tokens for model in self._workers.values()]
        asked = sum(request.prompt_tokens for request in self._requests)
        conversations = self._router.conversations
        return {
            "hit_ratio": self._cached / asked,
            "max_mean_work": max(work) * len(work) / sum(work),
            "ttft_p50_s": percentile(self._waits, 0.5),
            "ttft_p99_s": percentile(self._waits, 0.99),
            "switch_ratio": conversations.switches / max(1, conversations.repeats),
            "decision_ms": 1_000 * self._routing_s / len(self._requests),
        }


def load_trace(path: Path, rows: int, seed: int) -> list[Request]:
    """The first rows of a trace, clumps spread over their 3 s, in order of arrival."""
    rng = random.Random(seed)
    decoder = msgspec.json.Decoder(Row)
    with path.open("rb") as lines:
        read = [decoder.decode(line) for _, line in zip(range(rows), lines, strict=False)]
    stamps = {row.timestamp for row in read}
    clumped = 2 * len(stamps) < len(read)
    return sorted(
        (_request(row, rng.random() * CLUMP_S if clumped else 0.0) for row in read),
        key=lambda request: request.arrives_at,
    )


def _request(row: Row, spread_s: float) -> Request:
    full = (row.input_length - 1) // BLOCK_TOKENS
    ids = np.array(row.hash_ids[:full], dtype=np.uint64) + np.uint64(1)
    keys = ids * np.uint64(0x9E3779B97F4A7C15)
    keys ^= keys >> np.uint64(32)
    keys *= np.uint64(0xD6E8FEB86659FD93)
    return Request(row.timestamp / 1_000 + spread_s, row.input_length, row.output_length, keys)


def run(settings: Settings) -> dict[str, Any]:
    """Replay everything, print a table for each trace and size, and write the JSON."""
    results: list[dict[str, Any]] = []
    traces = {
        name: load_trace(settings.traces / file, settings.rows, settings.seed)
        for name, file in TRACES.items()
        if (settings.traces / file).exists()
    }
    if not traces:
        raise typer.BadParameter(f"no trace in {settings.traces}")
    runs = [
        (trace, workers, age_s, variant)
        for trace in traces
        for workers in settings.workers
        for age_s in settings.digest_ages_s
        for variant in settings.variants
    ]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=len(runs))
        for trace, workers, age_s, variant in runs:
            progress.update(task, description=f"{trace}, {workers} workers, {variant}")
            replay = Replay(settings.variants[variant], traces[trace], workers, settings)
            facts = {"trace": trace, "workers": workers, "digest_age_s": age_s, "policy": variant}
            results.append(facts | replay.run(age_s))
            progress.advance(task)
    _print(settings, results)
    result = {
        "machine": machine_facts(),
        "seed": settings.seed,
        "rows": settings.rows,
        "cache_blocks": settings.cache_blocks,
        "block_tokens": BLOCK_TOKENS,
        "prefill_tokens_per_s": settings.prefill_tokens_per_s,
        "output_token_s": settings.output_token_s,
        "policies": settings.variants,
        "results": results,
    }
    write_json(settings.output, result)
    return result


def _print(settings: Settings, results: list[dict[str, Any]]) -> None:
    columns = ("policy", "hits", "max/mean work", "TTFT p50 s", "p99 s", "switches", "CPU ms")
    groups: dict[tuple[str, int, float], list[dict[str, Any]]] = {}
    for each in results:
        key = (each["trace"], each["workers"], each["digest_age_s"])
        groups.setdefault(key, []).append(each)
    for (trace, workers, age_s), group in groups.items():
        title = (
            f"{trace}, {settings.rows} rows, {workers} workers of {settings.cache_blocks} blocks"
            f" of {BLOCK_TOKENS}, digests every {age_s:g} s, seed {settings.seed}"
        )
        print_table(
            title,
            columns,
            (
                (
                    each["policy"],
                    f"{each['hit_ratio']:.3f}",
                    f"{each['max_mean_work']:.2f}",
                    f"{each['ttft_p50_s']:.2f}",
                    f"{each['ttft_p99_s']:.1f}",
                    f"{each['switch_ratio']:.0%}",
                    f"{each['decision_ms']:.2f}",
                )
                for each in group
            ),
        )


def main(
    traces: Annotated[Path, typer.Option(help="Folder of the Mooncake traces.")] = Path(
        __file__
    ).parents[2]
    / "shared"
    / "traces",
    rows: Annotated[int, typer.Option(help="Rows of each trace.")] = 3_000,
    workers: Annotated[list[int], typer.Option(help="Sizes of the pool.")] = [4, 8, 16],  # noqa: B006
    digest_age_s: Annotated[list[float], typer.Option(help="Seconds between digests.")] = [2.0],  # noqa: B006
    cache_blocks: Annotated[int, typer.Option(help="A worker's cache.")] = 1_760,
    seed: int = 1,
    output: Path = RESULTS / "routing_sweep.json",
) -> None:
    """Replay the traces with every profile."""
    settings = Settings(traces, rows, tuple(workers), tuple(digest_age_s), cache_blocks)
    run(replace(settings, seed=seed, output=output))


if __name__ == "__main__":
    typer.run(main)
