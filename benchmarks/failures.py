"""Workers that die, stand still, restart and join, while clients go on asking the real Envoy.

Every arm gets the same arrivals on a fresh cluster. Trouble comes at a fixed time of the run;
latency, errors and broken answers are told for the time before it, during it and after it.
Envoy's round robin under the same kill and freeze is the measure. It knows of no drain and of
no worker that is not in its list, so it has no arms for these.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import (
    MODEL,
    Cluster,
    envoy_front,
    kvgate_front,
    wait_until_served,
    write_policy,
)
from benchmarks.failure_events import EVENTS, Live, Step
from benchmarks.load import plots
from benchmarks.load.client import Wire
from benchmarks.load.driver import Drive, drive
from benchmarks.load.figures import Series, as_json, figures
from benchmarks.load.run import describe, write_samples
from benchmarks.load.sample import BROKEN, Budgets, Sample
from benchmarks.machine import machine_facts
from benchmarks.report import console, print_table, write_json
from benchmarks.rig import RigFailure
from benchmarks.workloads.catalog import workload
from benchmarks.workloads.plan import PlanError, Planned

KVGATE, ENVOY = "kvgate", "envoy round robin"
ARMS = (
    *(f"{KVGATE}: {event}" for event in EVENTS),
    *(f"{ENVOY}: {event}" for event in ("calm", "kill", "freeze")),
)
_LB_POLICY = "ROUND_ROBIN"


class Failures(msgspec.Struct, frozen=True):
    """Everything the run depends on."""

    arms: tuple[str, ...] = ARMS
    seed: int = 1
    seconds: float = 75.0
    """Of arrivals, for each arm."""
    at_s: float = 15.0
    """When trouble begins."""
    down_s: float = 8.0
    """How long a killed worker stays away and a frozen one still."""
    drain_s: float = 30.0
    """Longest time that a worker gets to finish what it has before a restart."""
    rate_per_s: float = 2.0
    """Conversations that begin."""
    added: int = 2
    cluster: Cluster = Cluster(workers=4)
    budgets: Budgets = Budgets(ttft_s=1.0, tpot_s=0.05)
    policy: Path = Path(__file__).parent / "policies" / "balanced.yaml"
    bin_s: float = 2.5
    output: Path = Path(".kvgate/bench/failures")


class Seen(msgspec.Struct, frozen=True):
    """One arm: its samples, and what was done when."""

    samples: list[Sample]
    steps: list[Step]


def run(settings: Failures, model_dir: Path) -> dict[str, Any]:
    """Measure every arm, print, plot and write what it showed; one that fails is left out.

    Raises:
        PlanError: there is no such arm.
    """
    for name in settings.arms:
        if name not in ARMS:
            raise PlanError(f"no arm {name!r}; there are {', '.join(ARMS)}")
    plan = workload(
        "chats", seed=settings.seed, rate_per_s=settings.rate_per_s, duration_s=settings.seconds
    ).requests()
    runs = {}
    for name in settings.arms:
        try:
            with console.status(name):
                runs[name] = _arm(name, settings, plan, model_dir)
        except* RigFailure as failed:
            console.print(f"{name} failed: {failed.exceptions[0]}", markup=False, soft_wrap=True)
    found = {name: _told(seen, settings) for name, seen in runs.items()}
    _print(found, settings)
    for name, seen in runs.items():
        write_samples(settings.output / f"{_file(name)}.jsonl", seen.samples)
    _draw(settings, runs)
    result = {
        "machine": machine_facts(),
        "settings": msgspec.to_builtins(settings, enc_hook=str),
        "plan": describe(plan),
        "arms": found,
    }
    write_json(settings.output / "failures.json", result)
    return result


# One arm


def _arm(name: str, settings: Failures, plan: Sequence[Planned], model_dir: Path) -> Seen:
    router, _, event = name.partition(": ")
    with _system(router, event, settings, model_dir) as (url, live):
        sending = Drive(Wire(url, MODEL), model_dir, settings.seed)
        return asyncio.run(_measured(event, live, settings, sending, plan))


@contextmanager
def _system(
    router: str, event: str, settings: Failures, model_dir: Path
) -> Iterator[tuple[str, Live]]:
    """A fresh system; workers that are to join are in Envoy's list, and neither up nor known."""
    later = settings.added if event == "add" else 0
    cluster = msgspec.structs.replace(settings.cluster, workers=settings.cluster.workers + later)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-failures-")))
        live = Live(cluster, model_dir, folder, stack)
        if router == KVGATE:
            policy = write_policy(settings.policy, model_dir, folder)
            front = stack.enter_context(kvgate_front(cluster, live.workers, policy, folder))
            live.follow(front)
        else:
            front = stack.enter_context(envoy_front(live.workers, _LB_POLICY, folder))
        wait_until_served(front)
        for number in range(settings.cluster.workers, cluster.workers):
            live.take_out(number)
        yield front.url, live


async def _measured(
    event: str, live: Live, settings: Failures, sending: Drive, plan: Sequence[Planned]
) -> Seen:
    began: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_end(sample: Sample) -> None:
        if not began.done():
            # The driver's own start: its first answer ended just now.
            began.set_result(time.monotonic() - sample.sent_s - sample.e2e_s)

    async def trouble() -> None:
        live.started_at = await began
        await asyncio.sleep(live.started_at + settings.at_s - time.monotonic())
        await EVENTS[event](live, settings.down_s, settings.drain_s)

    async with asyncio.TaskGroup() as group:
        group.create_task(trouble())
        samples = await drive(sending, plan, on_end)
    return Seen(samples, live.steps)


# What it showed


def _told(seen: Seen, settings: Failures) -> dict[str, Any]:
    """Latency by time of arrival, failures by the time at which a client saw them."""
    first = settings.at_s
    last = max((step.at_s for step in seen.steps), default=first)
    spans = {"before": (0.0, first), "during": (first, last), "after": (last, float("inf"))}
    end = settings.seconds
    edges = [number * settings.bin_s for number in range(int(end / settings.bin_s) + 1)]
    return {
        "steps": msgspec.to_builtins(seen.steps),
        "spans": {name: _span(seen.samples, *span) for name, span in spans.items()},
        "bins": [
            {"at_s": edge, **_span(seen.samples, edge, edge + settings.bin_s)} for edge in edges
        ],
        "figures": as_json(figures(seen.samples, settings.budgets, settings.seconds)),
    }


def _span(samples: Sequence[Sample], start_s: float, end_s: float) -> dict[str, Any]:
    arrived = [sample for sample in samples if start_s <= sample.due_s < end_s]
    failed = [
        sample
        for sample in samples
        if not sample.served and start_s <= sample.sent_s + sample.e2e_s < end_s
    ]
    broken = sum(sample.code == BROKEN for sample in failed)
    ttft_s = figures(arrived, Budgets(), 1.0).ttft_s
    return {
        "requests": len(arrived),
        "ttft_p50_s": ttft_s.p50,
        "ttft_p99_s": ttft_s.p99,
        "errors": len(failed) - broken,
        "broken": broken,
    }


def _print(found: dict[str, dict[str, Any]], settings: Failures) -> None:
    rows = [
        (
            f"{name}, {span}",
            told["requests"],
            _ms(told["ttft_p50_s"]),
            _ms(told["ttft_p99_s"]),
            told["errors"],
            told["broken"],
        )
        for name, arm in found.items()
        for span, told in arm["spans"].items()
        if told["requests"] or told["errors"] or told["broken"]
    ]
    title = (
        f"chats, {settings.rate_per_s:g} conversations/s, {settings.cluster.workers} workers, "
        f"trouble at {settings.at_s:g} s"
    )
    columns = ("", "requests", "TTFT p50 ms", "p99 ms", "errors", "broken answers")
    print_table(title, columns, rows)
    for name, arm in found.items():
        steps = ", ".join(f"{step['at_s']:.1f} s {step['what']}" for step in arm["steps"])
        if steps:
            console.print(f"{name}: {steps}", soft_wrap=True, markup=False)


def _ms(seconds: float) -> str:
    return f"{1_000 * seconds:,.0f}" if seconds == seconds else "-"


def _draw(settings: Failures, runs: dict[str, Seen]) -> None:
    """TTFT p99 over the time of arrival: an event's arms beside kvgate's without trouble."""
    if not plots.available():
        return
    calm = f"{KVGATE}: calm"
    for event in EVENTS:
        names = [name for name in runs if name.endswith(f": {event}") or name == calm]
        if event != "calm" and any(name != calm for name in names):
            lines = {name: _line(runs[name].samples, settings) for name in names}
            path = settings.output / f"{event}.png"
            plots.over_time(path, f"TTFT p99 (s), {event} at {settings.at_s:g} s", lines)


def _line(samples: Sequence[Sample], settings: Failures) -> Series:
    times, values = [], []
    for number in range(int(settings.seconds / settings.bin_s) + 1):
        start_s = number * settings.bin_s
        p99_s = _span(samples, start_s, start_s + settings.bin_s)["ttft_p99_s"]
        if p99_s == p99_s:
            times.append(start_s + settings.bin_s / 2)
            values.append(p99_s)
    return times, values


def _file(name: str) -> str:
    return name.replace(": ", "-").replace(" ", "-")
