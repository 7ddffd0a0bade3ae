"""CPU of one routing decision, for every profile and size of pool, after tokens.

    python -m benchmarks.routing_cost

A decision is a lookup of the prompt's block keys, the choice, its booking and what is
remembered of it. Conversations of 128 blocks come back, workers report loads, rates and KV
use, and every eighth has a health below 100. CPU time of the process, so other processes on
the machine disturb it little.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, percentile, print_table, write_json
from extproc.fleet.pool import Pool
from extproc.fleet.worker import EngineError, Introduction, LoadReport, WorkerState
from extproc.policy import PoolPolicy, ReportPolicy
from extproc.routing.profiles import PROFILES
from extproc.routing.router import Asked, Router
from extproc.tokens.keyer import PromptKeys

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    workers: tuple[int, ...] = (10, 128, 1_024)
    prompt_blocks: int = 128
    conversations: int = 200
    decisions: int = 1_000
    seed: int = 1
    output: Path = RESULTS / "routing_cost.json"


class Deciding:
    """One profile over one pool, some traffic behind it."""

    def __init__(self, profile: str, workers: int, settings: Settings) -> None:
        self._rng = random.Random(settings.seed)
        policy = PoolPolicy.model_validate(
            {
                "model": "cost",
                "digest": {"capacity_blocks": 16_384},
                "overlay": {"ttl_s": 3_600.0, "max_keys_per_worker": 1_000_000},
                "routing": {"profile": profile},
            }
        )
        self._pool = Pool(policy, ReportPolicy(stale_after_s=1e6, lost_after_s=1e7), 0.0)
        self._router = Router(self._pool, self._rng)
        for number in range(workers):
            self._join(f"10.{number >> 8}.{number & 255}.1:8000", ill=number % 8 == 7)
        keys = np.random.default_rng(settings.seed)
        self._prompts = [
            PromptKeys(
                BLOCK_TOKENS * settings.prompt_blocks + 1,
                keys.integers(2**64, size=settings.prompt_blocks, dtype=np.uint64),
            )
            for _ in range(settings.conversations)
        ]
        self.now = 1_000.0

    def _join(self, address: str, *, ill: bool) -> None:
        pool = self._pool
        worker = pool.hello(Introduction(address, ("cost",), max_running=256), 0.0)
        assert worker is not None
        usage = self._rng.random()
        signals = {"tpot_s": 0.02, "prompt_tokens_per_s": 500.0}
        pool.report(
            worker,
            LoadReport(
                WorkerState.READY, 3.0, 0.0, usage, 10_000, leases=frozenset(), signals=signals
            ),
            0.0,
        )
        pool.health.first_token(worker.column, 0.1, self._rng.randrange(500, 2_000), 0.0)
        if ill:
            pool.health.ended(worker.column, EngineError.OTHER, 0.0)

    def decide(self, number: int) -> tuple[float, float]:
        """CPU seconds of one decision and of the lookup in it; its request ends at once."""
        prompt = self._rng.choice(self._prompts)
        asked = Asked(model="cost", output_tokens=200)
        began = time.process_time()
        self._pool.cached_blocks(prompt.keys)
        looked_up = time.process_time()
        route = self._router.route([prompt], self.now, asked)
        booking = self._pool.book(
            route.columns[0],
            route.uncached_tokens,
            str(number),
            200,
            cached_tokens=route.cached_tokens,
            now=self.now,
        )
        self._router.note(route, self.now)
        took_s = time.process_time() - looked_up
        self._pool.credit(booking.worker, prompt.keys)
        self._pool.response_started(booking, self.now + 0.1)
        self._pool.release(booking)
        self.now += 0.002
        if number % 25 == 0:
            self._pool.tick(self.now)
        return took_s, looked_up - began


def run(settings: Settings) -> dict[str, Any]:
    """Measure every profile and size, print the table and write the JSON."""
    results = []
    for workers in settings.workers:
        for profile in PROFILES:
            deciding = Deciding(profile, workers, settings)
            for number in range(settings.conversations):
                deciding.decide(number)
            samples = [deciding.decide(n) for n in range(settings.decisions)]
            took = sorted(1_000 * took_s for took_s, _ in samples)
            lookup = 1_000 * sum(lookup_s for _, lookup_s in samples) / len(samples)
            results.append(
                {
                    "workers": workers,
                    "profile": profile,
                    "mean_ms": sum(took) / len(took),
                    "p50_ms": percentile(took, 0.5),
                    "p99_ms": percentile(took, 0.99),
                    "lookup_ms": lookup,
                }
            )
    print_table(
        f"CPU of a decision, prompts of {settings.prompt_blocks} blocks",
        ("workers", "profile", "mean ms", "p50 ms", "p99 ms", "lookup in it ms"),
        (
            (
                str(each["workers"]),
                each["profile"],
                *(f"{each[name]:.3f}" for name in ("mean_ms", "p50_ms", "p99_ms", "lookup_ms")),
            )
            for each in results
        ),
    )
    result = {
        "machine": machine_facts(),
        "seed": settings.seed,
        "prompt_blocks": settings.prompt_blocks,
        "decisions": settings.decisions,
        "results": results,
    }
    write_json(settings.output, result)
    return result


def main(
    workers: Annotated[list[int], typer.Option(help="Sizes of the pool.")] = [10, 128, 1_024],  # noqa: B006
    decisions: Annotated[int, typer.Option(help="Decisions of each profile and size.")] = 1_000,
    seed: int = 1,
    output: Path = RESULTS / "routing_cost.json",
) -> None:
    """Measure what choosing a worker costs."""
    run(Settings(tuple(workers), decisions=decisions, seed=seed, output=output))


if __name__ == "__main__":
    typer.run(main)
