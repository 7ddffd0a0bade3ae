"""``kvgate bench simulate``: clusters of several sizes in virtual time, and a check of it.

The check sends the same plan to the same small cluster as real processes in wall-clock time
and prints both.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import track

from benchmarks.cluster import (
    MODEL,
    Cluster,
    engines,
    kvgate_front,
    wait_until_served,
    write_policy,
)
from benchmarks.load import plots
from benchmarks.load.client import Wire
from benchmarks.load.driver import Drive
from benchmarks.load.figures import Figures, Series, as_json, figures
from benchmarks.load.run import describe, measure, print_figures, write_samples
from benchmarks.load.sample import Budgets, Sample
from benchmarks.machine import machine_facts
from benchmarks.report import console, print_table, write_json
from benchmarks.simulation.cluster import VirtualCluster
from benchmarks.simulation.growth import (
    apart,
    cpu_spread,
    memory_bytes,
    queue_cost,
    show_growth,
)
from benchmarks.simulation.policy import keyless_policy
from benchmarks.simulation.script import Trouble
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.source import Source

_TIMELINE_BINS = 12
_TRACE_WORKERS = 8
_VALIDATED_S, _VALIDATED_RATE = 120.0, 0.2
"""Load of the check where the simulation is longer: nobody waits an hour for it."""


class Simulate(msgspec.Struct, frozen=True):
    """Everything the run depends on."""

    workers: tuple[int, ...] = (8,)
    """Sizes of cluster, one after the other; the load grows with them."""
    source: str = "chats"
    """A workload's kind or YAML file, or a trace file."""
    seed: int = 1
    duration_s: float = 300.0
    rate_per_worker: float = 0.5
    """Of a workload's arrivals, conversations where it has those."""
    trace_speedup: float = 1.0
    """Of a trace on 8 workers; larger clusters get it faster still."""
    trace_spread_s: float = 3.0
    hop_s: float = 0.002
    cluster: Cluster = Cluster()
    budgets: Budgets = Budgets(ttft_s=1.0, tpot_s=0.05)
    policy: Path = Path(__file__).parents[1] / "policies" / "simulate.yaml"
    script: tuple[Trouble, ...] = ()
    queued: tuple[int, ...] = ()
    """Numbers of waiting requests at which the core's cost is measured."""
    validate: bool = False
    output: Path = Path(".kvgate/bench/simulate")

    def plan(self, workers: int) -> list[Planned]:
        """Requests for a cluster of this size.

        Raises:
            PlanError: there is no such workload or trace.
        """
        source = Source(
            self.source,
            seed=self.seed,
            duration_s=self.duration_s,
            rate_per_s=self.rate_per_worker * workers,
            speedup=self.trace_speedup * workers / _TRACE_WORKERS,
            spread_s=self.trace_spread_s,
            max_prompt_tokens=self.cluster.max_model_len // 2,
        )
        return source.requests()


def run(settings: Simulate, model_dir: Path) -> dict[str, Any]:
    """Simulate every size, print, plot and write what it showed."""
    sizes, told = {}, {}
    for workers in track(settings.workers, "simulating", console=console, transient=True):
        sizes[workers], told[workers] = apart(_size, settings, workers)
    queues = {
        queued: apart(queue_cost, settings.policy, settings.cluster, queued)
        for queued in track(settings.queued, "queues", console=console, transient=True)
    }
    result: dict[str, Any] = {
        "machine": machine_facts(),
        "settings": msgspec.to_builtins(settings, enc_hook=str),
        "sizes": {str(workers): found for workers, found in sizes.items()},
        "queues": {str(queued): found for queued, found in queues.items()},
    }
    _print(settings, sizes)
    if len(sizes) > 1:
        result["growth_with_workers"] = show_growth("workers", sizes)
    if queues:
        result["growth_with_queue"] = show_growth("requests waiting", queues)
    if settings.script:
        for workers, samples in told.items():
            _timeline(settings, workers, samples)
    if settings.validate:
        result["validation"] = _validate(settings, model_dir)
    write_json(settings.output / "simulate.json", result)
    return result


def _size(settings: Simulate, workers: int) -> tuple[dict[str, Any], list[Sample]]:
    """Figures of one size; samples only where a script's effect on them is to be shown."""
    before = memory_bytes("VmRSS")
    plan = settings.plan(workers)
    cluster = msgspec.structs.replace(settings.cluster, workers=workers)
    began, began_cpu = time.perf_counter(), time.process_time()
    virtual = VirtualCluster(
        keyless_policy(settings.policy), cluster, settings.hop_s, settings.script
    )
    virtual.run(plan)
    took, took_cpu = time.perf_counter() - began, time.process_time() - began_cpu
    found = {
        "plan": describe(plan),
        "figures": as_json(figures(virtual.samples, settings.budgets)),
        "simulated_s": virtual.clock.now,
        "wall_s": took,
        "cpu_s": took_cpu,
        "decision_cpu_ms": cpu_spread(virtual.decision_ms),
        "end_cpu_ms": cpu_spread(virtual.end_ms),
        "waiting_most": virtual.waiting_most,
        "peak_memory_mb": memory_bytes("VmHWM") / 1e6,
        "memory_mb": (memory_bytes("VmHWM") - before) / 1e6,
    }
    write_samples(settings.output / f"{workers}-workers.jsonl", virtual.samples)
    return found, virtual.samples if settings.script else []


# Against wall-clock time


def _validate(settings: Simulate, model_dir: Path) -> dict[str, Any]:
    """The smallest size again, as real processes; two minutes of it at most."""
    if settings.duration_s > _VALIDATED_S:
        settings = msgspec.structs.replace(
            settings, duration_s=_VALIDATED_S, rate_per_worker=_VALIDATED_RATE
        )
    workers = min(settings.workers)
    plan = settings.plan(workers)
    cluster = msgspec.structs.replace(settings.cluster, workers=workers)
    virtual = VirtualCluster(keyless_policy(settings.policy), cluster, settings.hop_s)
    virtual.run(plan)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-simulate-")))
        real = stack.enter_context(engines(cluster, model_dir, folder))
        policy = write_policy(settings.policy, model_dir, folder)
        front = stack.enter_context(kvgate_front(cluster, real, policy, folder))
        wait_until_served(front)
        drive = Drive(Wire(front.url, MODEL), model_dir, settings.seed)
        measured = asyncio.run(measure("wall clock", drive, plan))
    both = {
        "virtual time": figures(virtual.samples, settings.budgets),
        "wall clock": figures(measured.samples, settings.budgets),
    }
    print_figures(f"validation: {workers} workers, {len(plan)} requests", both)
    differences = _differences(*both.values())
    for name, share in differences.items():
        console.print(f"{name}: virtual time is {100 * share:+.1f}% off")
    return {"differences": differences, **{name: as_json(found) for name, found in both.items()}}


def _differences(virtual: Figures, real: Figures) -> dict[str, float]:
    """Virtual over real, less one."""
    pairs = {
        "TTFT p50": (virtual.ttft_s.p50, real.ttft_s.p50),
        "TTFT p99": (virtual.ttft_s.p99, real.ttft_s.p99),
        "TPOT p50": (virtual.tpot_s.p50, real.tpot_s.p50),
        "end to end p50": (virtual.e2e_s.p50, real.e2e_s.p50),
        "hit ratio": (virtual.hit_ratio, real.hit_ratio),
        "output tokens/s": (virtual.output_tokens_per_s, real.output_tokens_per_s),
    }
    return {name: ours / theirs - 1 for name, (ours, theirs) in pairs.items() if theirs}


# Showing


_Column = tuple[str, Callable[[dict[str, Any]], str]]

_SHOWED: tuple[_Column, ...] = (
    ("requests", lambda f: f"{f['figures']['requests']}"),
    ("not served", lambda f: f"{f['figures']['requests'] - f['figures']['served']}"),
    ("hit ratio", lambda f: f"{f['figures']['hit_ratio']:.3f}"),
    ("TTFT p50 ms", lambda f: f"{1_000 * f['figures']['ttft_s']['p50']:,.0f}"),
    ("p99 ms", lambda f: f"{1_000 * f['figures']['ttft_s']['p99']:,.0f}"),
    ("goodput/s", lambda f: f"{f['figures']['goodput_per_s']:,.1f}"),
    ("waiting at most", lambda f: f"{f['waiting_most']}"),
)
_COST: tuple[_Column, ...] = (
    ("decision CPU ms p50", lambda f: f"{f['decision_cpu_ms']['p50']:.2f}"),
    ("p99", lambda f: f"{f['decision_cpu_ms']['p99']:.2f}"),
    ("simulated s", lambda f: f"{f['simulated_s']:,.0f}"),
    ("in CPU s", lambda f: f"{f['cpu_s']:,.0f}"),
    ("peak MB", lambda f: f"{f['peak_memory_mb']:,.0f}"),
)


def _print(settings: Simulate, sizes: dict[int, dict[str, Any]]) -> None:
    for what, columns in (("virtual time", _SHOWED), ("cost", _COST)):
        rows = [
            (f"{workers} workers", *(tell(found) for _, tell in columns))
            for workers, found in sizes.items()
        ]
        title = f"{Path(settings.source).stem}: {what}"
        print_table(title, ("", *(column for column, _ in columns)), rows)


def _timeline(settings: Simulate, workers: int, samples: Sequence[Sample]) -> None:
    """TTFT and failures by time of arrival, so that what a script did can be seen."""
    for trouble in settings.script:
        console.print(f"at {trouble.at_s:g} s: {trouble.action}")
    bin_s = settings.duration_s / _TIMELINE_BINS
    rows = []
    p99: Series = ([], [])
    for number in range(_TIMELINE_BINS):
        own = [s for s in samples if number <= s.due_s / bin_s < number + 1]
        found = figures(own, settings.budgets, bin_s)
        if not own:
            continue
        p99[0].append((number + 0.5) * bin_s)
        p99[1].append(found.ttft_s.p99)
        span = f"{number * bin_s:.0f} to {(number + 1) * bin_s:.0f} s"
        failed = found.requests - found.served
        ttft = found.ttft_s
        rows.append(
            (span, found.requests, failed, f"{1_000 * ttft.p50:,.0f}", f"{1_000 * ttft.p99:,.0f}")
        )
    title = f"{workers} workers by time of arrival"
    print_table(title, ("", "requests", "not served", "TTFT p50 ms", "p99 ms"), rows)
    if plots.available():
        path = settings.output / f"{workers}-workers-ttft-p99.png"
        plots.over_time(path, "TTFT p99 (s)", {f"{workers} workers": p99})
