"""Every routing profile on the Mooncake traces: cache hits, balance and waiting.

    python -m benchmarks.routing_sweep --traces ../shared/traces
    python -m benchmarks.routing_sweep --what displacement
    python -m benchmarks.routing_sweep --what weights --draws 40

It ranks policies; it does not predict latency. The conversation trace has clumps every 3 s, an
artefact of its clock: they are spread by seed. The last row of each table is one cache with
the memory of all workers: what routing could reach by keeping no block twice.
"""

from __future__ import annotations

import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.progress import track

from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, console, print_table, write_json
from benchmarks.routing.replay import Model, Replay, Replayed
from benchmarks.routing.requests import (
    BLOCK_TOKENS,
    TRACES_FOLDER,
    Request,
    load_traces,
    one_cache_hit_ratio,
)
from extproc.routing.profiles import PROFILES

_SHOWN = 5
What = Literal["profiles", "displacement", "weights"]


@dataclass(frozen=True)
class Variant:
    """A pool's routing policy, and the weight of displacement on top of it."""

    routing: dict[str, Any]
    displacement: float = 0.0


VARIANTS: dict[str, Variant] = {
    **{name: Variant({"profile": name}) for name in PROFILES},
    "hash without bound": Variant(
        {"profile": "consistent_hash", "affinity": {"hash_max_load": 1_000}}
    ),
    "longest match": Variant({"profile": "random", "weights": {"prefix_locality": 1}}),
}
"""Policies by name: the profiles, the hash that keeps every prefix in its place whatever the
load, and the routing that herds on a shared root."""

DISPLACEMENT = {
    f"balanced, displacement {weight:g}" if weight else "balanced": Variant({}, weight)
    for weight in (0.0, 1.0, 2.0, 4.0, 8.0)
}

_DRAWN: dict[str, tuple[float, ...]] = {
    "uncached": (3, 4, 6, 8, 12),
    "pending_prefill": (0.5, 1, 1, 2),
    "running": (40, 80, 160, 320),
    "recent_work": (0, 0.02, 0.05, 0.1),
    "switch": (0, 500, 1_000, 2_000, 4_000),
    "hash_rank": (0, 500, 1_000, 2_000),
}
_DRAWN_AFFINITY: dict[str, tuple[float, ...]] = {
    "max_extra_running": (16, 64),
    "sticky_s": (0, 0, 0, 30),
    "min_benefit": (0, 0, 0.3),
}
"""What the search draws from. A hash rank is what keeps equal roots on equal workers."""


@dataclass(frozen=True)
class Settings:
    """What is swept."""

    traces: Path = TRACES_FOLDER
    rows: int = 3_000
    workers: tuple[int, ...] = (4, 8, 16)
    digest_ages_s: tuple[float, ...] = (2.0,)
    cache_blocks: int = 1_760
    seed: int = 1
    processes: int = 1
    variants: dict[str, Variant] = field(default_factory=lambda: dict(VARIANTS))
    output: Path = RESULTS / "routing_sweep.json"


@dataclass(frozen=True)
class Cell:
    """One replay."""

    requests: list[Request]
    model: Model
    variant: Variant


_FEW = 1e-3


def drawn(draws: int, seed: int) -> dict[str, Variant]:
    """``balanced``, and so many of it with weights and bounds drawn by seed."""
    rng = random.Random(seed)
    variants = {"balanced": Variant({})}
    for number in range(1, draws + 1):
        weights = {name: rng.choice(values) for name, values in _DRAWN.items()}
        affinity = {name: rng.choice(values) for name, values in _DRAWN_AFFINITY.items()}
        variants[f"draw {number}"] = Variant({"weights": weights, "affinity": affinity})
    return variants


def score(found: Replayed, first: Replayed) -> float:
    """Gain over the first variant: log of hits, less half the log of mean TTFT, less ten times
    what max/mean work has over 1.05."""
    # A trace of a few rows may have no hit at all.
    hits = math.log(max(found.hit_ratio, _FEW) / max(first.hit_ratio, _FEW))
    waits = math.log(found.ttft_mean_s / first.ttft_mean_s)
    return hits - 0.5 * waits - 10 * max(0.0, found.max_mean_work - 1.05)


def run(settings: Settings) -> dict[str, Any]:
    """Replay everything, print a table for each trace, size and age, and write the JSON."""
    traces = load_traces(settings.traces, settings.rows, settings.seed)
    groups = [
        (trace, Model(workers, settings.cache_blocks, digest_age_s=age_s, seed=settings.seed))
        for trace in traces
        for workers in settings.workers
        for age_s in settings.digest_ages_s
    ]
    cells = [
        Cell(traces[trace], model, variant)
        for trace, model in groups
        for variant in settings.variants.values()
    ]
    with ProcessPoolExecutor(settings.processes) as pool:
        steps = pool.map(_replay, cells)
        found = list(track(steps, "replaying", len(cells), console=console, transient=True))
    results: list[dict[str, Any]] = []
    gains: dict[str, list[float]] = {}
    for number, (trace, model) in enumerate(groups):
        own = found[number * len(settings.variants) :][: len(settings.variants)]
        named = dict(zip(settings.variants, own, strict=True))
        one_cache = one_cache_hit_ratio(traces[trace], model.workers * model.cache_blocks)
        _print(trace, model, settings.rows, named, one_cache)
        where = {
            "trace": trace,
            "workers": model.workers,
            "digest_age_s": model.digest_age_s,
            "one_cache_hit_ratio": one_cache,
        }
        for name, each in named.items():
            gains.setdefault(name, []).append(score(each, own[0]))
            results.append({**where, "policy": name, **msgspec.to_builtins(each)})
    _print_scores(gains, settings.variants)
    result = {
        "machine": machine_facts(),
        "rows": settings.rows,
        "block_tokens": BLOCK_TOKENS,
        "model": asdict(groups[0][1]),
        "policies": {name: asdict(each) for name, each in settings.variants.items()},
        "results": results,
    }
    write_json(settings.output, result)
    return result


def _replay(cell: Cell) -> Replayed:
    variant = cell.variant
    return Replay(variant.routing, cell.requests, cell.model, variant.displacement).run()


def _print(
    trace: str, model: Model, rows: int, found: dict[str, Replayed], one_cache: float
) -> None:
    title = (
        f"{trace}, {rows} rows, {model.workers} workers of {model.cache_blocks} blocks"
        f" of {BLOCK_TOKENS}, digests every {model.digest_age_s:g} s, seed {model.seed}"
    )
    columns = (
        "policy",
        "hits",
        "max/mean work",
        "TTFT mean s",
        "p50 s",
        "p99 s",
        "switches",
        "CPU ms",
    )
    table = [
        (
            name,
            f"{each.hit_ratio:.3f}",
            f"{each.max_mean_work:.2f}",
            f"{each.ttft_mean_s:.2f}",
            f"{each.ttft_p50_s:.2f}",
            f"{each.ttft_p99_s:.1f}",
            f"{each.switch_ratio:.0%}",
            f"{each.decision_ms:.2f}",
        )
        for name, each in found.items()
    ]
    print_table(title, columns, [*table, ("one cache for all", f"{one_cache:.3f}", *[""] * 6)])


def _print_scores(gains: dict[str, list[float]], variants: dict[str, Variant]) -> None:
    """Best mean gain first, and what the best few are."""
    ranked = sorted(gains.items(), key=lambda pair: -fmean(pair[1]))
    rows = [(name, f"{fmean(each):+.4f}", f"{min(each):+.4f}") for name, each in ranked]
    print_table("score against the first policy", ("policy", "mean", "worst"), rows)
    for name, _ in ranked[:_SHOWN]:
        console.print(f"{name}: {variants[name].routing}", soft_wrap=True)


def main(
    traces: Annotated[Path, typer.Option(help="Folder of the Mooncake traces.")] = TRACES_FOLDER,
    what: Annotated[What, typer.Option(help="Which policies.")] = "profiles",
    draws: Annotated[int, typer.Option(help="Of weights: policies drawn at random.")] = 20,
    rows: Annotated[int, typer.Option(help="Rows of each trace.")] = 3_000,
    workers: Annotated[list[int], typer.Option(help="Sizes of the pool.")] = [4, 8, 16],  # noqa: B006
    digest_age_s: Annotated[list[float], typer.Option(help="Seconds between digests.")] = [2.0],  # noqa: B006
    cache_blocks: Annotated[int, typer.Option(help="A worker's cache.")] = 1_760,
    seed: int = 1,
    processes: Annotated[int, typer.Option(help="Replays at once.")] = 1,
    output: Path = RESULTS / "routing_sweep.json",
) -> None:
    """Replay the traces with every profile, with displacement, or with drawn weights."""
    sets = {"profiles": VARIANTS, "displacement": DISPLACEMENT, "weights": drawn(draws, seed)}
    run(
        Settings(
            traces,
            rows,
            tuple(workers),
            tuple(digest_age_s),
            cache_blocks,
            seed,
            processes,
            sets[what],
            output,
        )
    )


if __name__ == "__main__":
    typer.run(main)
