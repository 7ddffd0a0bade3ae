"""Prefix batching, tried here and not in the product: who of a tenant's waiting goes next.

    python -m benchmarks.routing.batching

Where the product's queue keeps a tenant's requests in order, here one that begins like the
tenant's last follows it, past at most so many older ones of the same tenant. Turns between
tenants and what they cost stay the product's. Whole clusters under virtual time, with more
asked than they can do, so that requests wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar
from unittest.mock import patch

import msgspec
import typer

from benchmarks.cluster import MODEL, Cluster
from benchmarks.load.figures import spread
from benchmarks.load.sample import Sample
from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, print_table, write_json
from benchmarks.simulation.cluster import VirtualCluster
from benchmarks.workloads.contexts import Retrieval, SharedPrompts
from benchmarks.workloads.plan import Planned, SegmentId
from extproc.admission import lane as turns
from extproc.admission.demand import Demand
from extproc.policy import Policy, parse_policy

_HOP_S = 0.002
_Prefix = tuple[SegmentId, ...]


@dataclass(frozen=True)
class Settings:
    """What is tried. ``orders``: how many older requests may be passed; 0 is the product's.

    ``shared_rate_per_s`` and ``rag_rate_per_s`` are a little more than the workers can do.
    """

    workers: int = 4
    num_blocks: int = 4_096
    duration_s: float = 60.0
    shared_rate_per_s: float = 34.0
    rag_rate_per_s: float = 12.0
    tenants: int = 4
    orders: tuple[int, ...] = (0, 4, 16)
    seeds: tuple[int, ...] = (1, 2)
    output: Path = RESULTS / "batching.json"


class BatchingFlow(turns.Flow):
    """A tenant's waiting requests, those that begin alike one after the other.

    Attributes:
        prefixes: what each request begins with, by fingerprint.
        most_passed: older requests of its kind that one may pass.
    """

    __slots__ = ("_last", "_passed")
    prefixes: ClassVar[Mapping[int, _Prefix]] = {}
    most_passed: ClassVar[int] = 0

    def __init__(self, weight: float) -> None:
        super().__init__(weight)
        self._last: _Prefix | None = None
        self._passed: dict[str, int] = {}

    def heads(self) -> list[Demand]:
        """Of each kind the eldest that begins like the last, else the eldest."""
        heads = [self._next(list(kind.values())) for kind in self.kinds.values()]
        return sorted(heads, key=lambda demand: demand.sequence)

    def remove(self, demand: Demand) -> None:
        """It runs; the eldest counts how often it was passed."""
        eldest = next(iter(self.kinds[demand.kind].values()))
        if eldest is not demand:
            self._passed[eldest.id] = self._passed.get(eldest.id, 0) + 1
        self._passed.pop(demand.id, None)
        self._last = self.prefixes[demand.fingerprint]
        super().remove(demand)

    def _next(self, waiting: Sequence[Demand]) -> Demand:
        eldest = waiting[0]
        if self._passed.get(eldest.id, 0) >= self.most_passed:
            return eldest
        alike = (each for each in waiting if self.prefixes[each.fingerprint] == self._last)
        return next(alike, eldest)


class Tried(msgspec.Struct, frozen=True):
    """One order on one workload. TTFT in seconds, from arrival.

    ``tenants_spread``: the slowest tenant's mean TTFT over the fastest's.
    """

    workload: str
    most_passed: int
    seed: int
    requests: int
    served: int
    waiting_most: int
    hit_ratio: float
    ttft_p50_s: float
    ttft_p99_s: float
    seconds: float
    tenants_spread: float


def plans(settings: Settings, seed: int) -> dict[str, tuple[list[Planned], int]]:
    """Requests by workload, and how many leading segments make their hot prefix.

    Shared: more system prompts than a worker's cache holds. Retrieval: the prefix goes to the
    end of the first document.
    """
    shared = SharedPrompts(
        rate_per_s=settings.shared_rate_per_s,
        duration_s=settings.duration_s,
        seed=seed,
        system_prompts=200,
    )
    rag = Retrieval(rate_per_s=settings.rag_rate_per_s, duration_s=settings.duration_s, seed=seed)
    made = {"shared": (shared.requests(), 1), "rag": (rag.requests(), 3)}
    return {
        name: ([_of_tenant(each, n % settings.tenants) for n, each in enumerate(plan)], depth)
        for name, (plan, depth) in made.items()
    }


def attempt(settings: Settings, name: str, most_passed: int, seed: int) -> Tried:
    """One workload with one order of the queue."""
    plan, depth = plans(settings, seed)[name]
    cluster = Cluster(workers=settings.workers, num_blocks=settings.num_blocks)
    virtual = VirtualCluster(_policy(), cluster, _HOP_S)
    BatchingFlow.prefixes = {
        number + 1: tuple(segment.id for segment in planned.prompt[:depth])
        for number, planned in enumerate(plan)
    }
    BatchingFlow.most_passed = most_passed
    if most_passed:
        with patch.object(turns, "Flow", BatchingFlow):
            virtual.run(plan)
    else:
        virtual.run(plan)
    samples = [sample for sample in virtual.samples if sample.served]
    ttft = spread(sample.ttft_s for sample in samples)
    means = _tenant_means(samples)
    return Tried(
        workload=name,
        most_passed=most_passed,
        seed=seed,
        requests=len(plan),
        served=len(samples),
        waiting_most=virtual.waiting_most,
        hit_ratio=sum(each.cached_tokens or 0 for each in samples)
        / sum(each.planned_tokens for each in samples),
        ttft_p50_s=ttft.p50,
        ttft_p99_s=ttft.p99,
        seconds=virtual.clock.now,
        tenants_spread=max(means) / min(means),
    )


def run(settings: Settings) -> dict[str, Any]:
    """Try every order on both workloads, print the table and write the JSON."""
    tried = [
        attempt(settings, name, most_passed, seed)
        for name in ("shared", "rag")
        for seed in settings.seeds
        for most_passed in settings.orders
    ]
    print_table(
        f"order of a tenant's queue, {settings.workers} workers, {settings.tenants} tenants",
        (
            "workload",
            "seed",
            "may pass",
            "hits",
            "TTFT p50 s",
            "p99 s",
            "all done after s",
            "slowest tenant",
            "waiting at most",
        ),
        (
            (
                each.workload,
                str(each.seed),
                str(each.most_passed) if each.most_passed else "nobody",
                f"{each.hit_ratio:.3f}",
                f"{each.ttft_p50_s:.2f}",
                f"{each.ttft_p99_s:.2f}",
                f"{each.seconds:.1f}",
                f"{each.tenants_spread:.2f}",
                str(each.waiting_most),
            )
            for each in tried
        ),
    )
    result = {
        "machine": machine_facts(),
        "settings": {**asdict(settings), "output": str(settings.output)},
        "results": msgspec.to_builtins(tried),
    }
    write_json(settings.output, result)
    return result


def _policy() -> Policy:
    """Nothing but the workers' room keeps a request waiting, and nobody is sent away."""
    admission = {"max_concurrency": 100_000, "max_queue": 100_000, "max_queue_time_s": 3_600}
    pool = {"model": MODEL, "digest": {"capacity_blocks": 8_192}, "admission": admission}
    return parse_policy({"pools": [pool]})


def _of_tenant(planned: Planned, number: int) -> Planned:
    return msgspec.structs.replace(planned, tenant=f"tenant-{number}")


def _tenant_means(samples: Sequence[Sample]) -> list[float]:
    waits: dict[str, list[float]] = {}
    for sample in samples:
        if sample.ttft_s is not None:
            waits.setdefault(sample.tenant, []).append(sample.ttft_s)
    return [fmean(each) for each in waits.values()]


def main(
    workers: Annotated[int, typer.Option(help="Size of the pool.")] = 4,
    duration_s: Annotated[float, typer.Option(help="Of arrivals.")] = 60.0,
    shared_rate_per_s: float = 34.0,
    rag_rate_per_s: float = 12.0,
    output: Path = RESULTS / "batching.json",
) -> None:
    """Try prefix batching in the queue."""
    run(
        Settings(
            workers,
            duration_s=duration_s,
            shared_rate_per_s=shared_rate_per_s,
            rag_rate_per_s=rag_rate_per_s,
            output=output,
        )
    )


if __name__ == "__main__":
    typer.run(main)
