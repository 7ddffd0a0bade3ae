"""``kvgate bench load``: one run against any OpenAI-compatible URL, shown and written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.load import plots
from benchmarks.load.driver import Drive, drive
from benchmarks.load.engines import EngineWatch
from benchmarks.load.figures import (
    Figures,
    Series,
    as_json,
    figures,
    hit_ratio_over_time,
    imbalance,
    in_flight_over_time,
)
from benchmarks.load.sample import Budgets, Sample
from benchmarks.machine import machine_facts
from benchmarks.report import console, print_table, write_json
from benchmarks.workloads.ceiling import ceiling_hit_ratio
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.source import Source

_LOAD_STEP_S = 0.25
_HIT_BINS = 30


class LoadRun(msgspec.Struct, frozen=True):
    """Everything that one run depends on. ``source``: where the plan is from."""

    source: Source
    drive: Drive
    budgets: Budgets
    output: Path
    engines: tuple[str, ...] = ()
    """Base URLs of engines to watch."""


class Measured(msgspec.Struct, frozen=True):
    """A run's samples and what the engines said meanwhile (None: not asked)."""

    samples: list[Sample]
    watch: EngineWatch | None


def run(settings: LoadRun, plan: Sequence[Planned]) -> dict[str, Any]:
    """Send the plan, print and plot what it showed, and write it to the output folder."""
    measured = asyncio.run(measure(settings.source.title, settings.drive, plan, settings.engines))
    found = figures(measured.samples, settings.budgets)
    result = {
        "machine": machine_facts(),
        "settings": _told(settings),
        "plan": describe(plan),
        "figures": as_json(found),
        "lanes": {lane: as_json(part) for lane, part in by_lane(measured, settings).items()},
        "imbalance": _imbalance(measured),
    }
    print_figures(settings.source.title, {"": found})
    write_samples(settings.output / "samples.jsonl", measured.samples)
    write_json(settings.output / "load.json", result)
    draw(settings.output, {settings.source.title: measured})
    return result


def _told(settings: LoadRun) -> dict[str, Any]:
    """Settings as they are written down: of headers only the names, they may hold keys."""
    told: dict[str, Any] = msgspec.to_builtins(settings, enc_hook=str)
    told["drive"]["wire"]["headers"] = sorted(settings.drive.wire.headers)
    return told


async def measure(
    name: str, settings: Drive, plan: Sequence[Planned], engines: Sequence[str] = ()
) -> Measured:
    """Send a plan under a progress bar, and watch engines meanwhile."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[bad]} not served"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=len(plan), bad=0)
        bad = 0

        def on_end(sample: Sample) -> None:
            nonlocal bad
            bad += not sample.served
            progress.update(task, advance=1, bad=bad)

        async with AsyncExitStack() as stack:
            watch = EngineWatch(engines) if engines else None
            if watch is not None:
                await stack.enter_async_context(watch)
            samples = await drive(settings, plan, on_end)
    return Measured(samples, watch)


def describe(plan: Sequence[Planned]) -> dict[str, float]:
    """Size of a plan, and how much of it a router could find cached at most."""
    return {
        "requests": len(plan),
        "prompt_tokens": sum(request.prompt_tokens for request in plan),
        "output_tokens": sum(request.output_tokens for request in plan),
        "span_s": plan[-1].at_s if plan else 0.0,
        "ceiling_hit_ratio": ceiling_hit_ratio(plan),
    }


def by_lane(measured: Measured, settings: LoadRun) -> dict[str, Figures]:
    """Figures of each lane, if there are any."""
    whole = figures(measured.samples, settings.budgets)
    lanes = sorted({sample.lane for sample in measured.samples} - {""})
    return {
        lane: figures(
            [sample for sample in measured.samples if sample.lane == lane],
            settings.budgets,
            whole.seconds,
        )
        for lane in lanes
    }


# Showing


def print_figures(title: str, runs: dict[str, Figures]) -> None:
    """One column for each run."""
    rows = [(label, *(tell(found) for found in runs.values())) for label, tell in _ROWS.items()]
    print_table(title, ("", *runs), rows)
    for name, found in runs.items():
        for what, counts in (("by status", found.outcomes), ("by worker", found.workers)):
            if counts:
                console.print(f"{name or 'requests'} {what}: {_counts(counts)}", markup=False)


def _ms(field: str, rank: str) -> Callable[[Figures], str]:
    """How a percentile in seconds is shown."""

    def tell(found: Figures) -> str:
        value = getattr(getattr(found, field), rank)
        return f"{1_000 * value:,.1f}" if value == value else "-"

    return tell


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


_ROWS: dict[str, Callable[[Figures], str]] = {
    "requests": lambda f: str(f.requests),
    "answered": lambda f: str(f.served),
    "answers/s": lambda f: f"{f.requests_per_s:.2f}",
    "output tokens/s": lambda f: f"{f.output_tokens_per_s:,.0f}",
    "within the budgets, a second": lambda f: f"{f.good}, {f.goodput_per_s:.2f}",
    "TTFT p50 ms": _ms("ttft_s", "p50"),
    "TTFT p90 ms": _ms("ttft_s", "p90"),
    "TTFT p99 ms": _ms("ttft_s", "p99"),
    "TPOT p50 ms": _ms("tpot_s", "p50"),
    "TPOT p99 ms": _ms("tpot_s", "p99"),
    "end to end p50 ms": _ms("e2e_s", "p50"),
    "end to end p99 ms": _ms("e2e_s", "p99"),
    "held by the gateway p50 ms": _ms("queue_s", "p50"),
    "held by the gateway p99 ms": _ms("queue_s", "p99"),
    "token hit ratio": lambda f: f"{f.hit_ratio:.3f}",
    "refused, told to wait": lambda f: f"{f.refused_tries}, {f.told_to_wait}",
    "came back, then served": lambda f: f"{f.returned}, {f.returned_served}",
    "prompts off plan": lambda f: str(f.off_plan),
    "generator late p99 ms": _ms("lag_s", "p99"),
}


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Every sample as a JSON line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.Encoder().encode_lines(samples))


def draw(folder: Path, runs: dict[str, Measured]) -> None:
    """TTFT distribution, hit ratio over time and, for each run, the workers' load over time."""
    if not plots.available():
        console.print("no plots: pip install 'kvgate[bench]' brings matplotlib")
        return
    ttfts = {
        name: [s.ttft_s for s in each.samples if s.served and s.ttft_s is not None]
        for name, each in runs.items()
    }
    plots.ttft_distribution(folder / "ttft.png", ttfts)
    hits = {name: _hits(each.samples) for name, each in runs.items()}
    plots.over_time(folder / "hit_ratio.png", "token hit ratio", hits)
    for number, each in enumerate(runs.values()):
        file = "worker_load.png" if len(runs) == 1 else f"worker_load_{number + 1}.png"
        plots.over_time(folder / file, "requests on each worker", _loads(each))
    console.print(f"plots: {folder}", soft_wrap=True, markup=False)


def _hits(samples: Sequence[Sample]) -> Series:
    last_s = max((sample.sent_s for sample in samples), default=0.0)
    return hit_ratio_over_time(samples, max(1.0, last_s / _HIT_BINS))


def _loads(measured: Measured) -> dict[str, Series]:
    """Load as the engines told it, else as the gateway named workers."""
    watch = measured.watch
    if watch is None:
        return in_flight_over_time(measured.samples, _LOAD_STEP_S)
    times = [look.at_s for look in watch.looks]
    engines = range(len(watch.looks[0].running))
    return {
        f"worker {number + 1}": (
            times,
            [look.running[number] + look.waiting[number] for look in watch.looks],
        )
        for number in engines
    }


def _imbalance(measured: Measured) -> float:
    if measured.watch is not None:
        return imbalance(look.load for look in measured.watch.looks)
    series = in_flight_over_time(measured.samples, _LOAD_STEP_S).values()
    return imbalance(list(zip(*(values for _, values in series), strict=True)))
