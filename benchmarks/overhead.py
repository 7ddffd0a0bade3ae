"""What an external processor adds to a request, against Envoy alone, in one run.

    python -m benchmarks.overhead

Three arms take turns, round by round, with the same requests: Envoy alone, Envoy with a bare
``grpc.aio`` processor, Envoy with ``kvgate serve``. Envoy and processor share one core, load
and upstream the other. kvgate has static workers: it renders, tokenises, makes keys, looks
them up and routes as always, and its index holds what it has routed itself (no digests).

Then the costs of waiting (``benchmarks.standing``): idle with agents, and requests held.

The JSON: ``workloads[]`` with ``workload``, ``medians`` and ``rounds`` of :class:`Figures` by
arm, ``above_bare_cpu_ms`` (``median``, ``low``, ``high`` over the rounds) and ``shares`` of
kvgate's CPU by step (:func:`_shares`); ``idle`` and ``held`` as :func:`standing.idle` and
:func:`standing.hold` say.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import Progress

from benchmarks import standing
from benchmarks.arms import (
    ALONE,
    ARMS,
    BARE,
    KVGATE,
    Arm,
    Buckets,
    arm,
    envoy_in_front,
    kvgate,
    module,
    quantile_s,
)
from benchmarks.hot_path import steps_by_kind
from benchmarks.http_load import Order, Result, Workload
from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, console, median, percentile, print_table, write_json
from benchmarks.rig import HOST, Running, Usage, cores, free_ports, running

WORKLOADS = (
    Workload("8 KB chats, 1 connection", "chat", connections=1, requests=800),
    Workload("8 KB chats, 16 connections", "chat", connections=16, requests=3_200),
    Workload("400 KB chats, 4 connections", "long", 4, requests=80, size_bytes=400_000),
    Workload("small prompts, 500/s", "small", connections=64, requests=2_560, rate_per_s=500.0),
)
TARGETS_MS = {"chat": 0.25}
"""CPU of kvgate above the bare processor, milliseconds a request (DESIGN.md, section 11)."""


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    seed: int = 1
    rounds: int = 5
    workers: int = 8
    workloads: tuple[Workload, ...] = WORKLOADS
    agents: int = 100
    held_requests: int = 5_000
    standing_s: float = 10.0
    """How long CPU is measured while nothing happens."""
    output: Path = RESULTS / "overhead.json"


@dataclass(frozen=True)
class Figures:
    """One round of one arm: latency, CPU a request and context switches a request.

    ``decision_p50_ms`` and ``decision_p95_ms`` are from kvgate's own histogram, NaN for others.
    """

    p50_ms: float
    p95_ms: float
    p99_ms: float
    requests_per_s: float
    envoy_cpu_ms: float
    processor_cpu_ms: float
    processor_cores: float
    envoy_switches: float
    processor_switches: float
    body_bytes: float
    decision_p50_ms: float
    decision_p95_ms: float


def run(settings: Settings) -> dict[str, Any]:
    """Measure everything, print it, write the JSON and return what it holds."""
    console.print(f"seed {settings.seed}, {settings.rounds} rounds, {settings.workers} workers")
    core, load_core = cores()
    if core is None:
        console.print("one core only: nothing is pinned, load and proxy disturb each other")
    with _rig(settings, core, load_core) as (arms, load):
        measured = {each.name: _measure(each, arms, load, settings) for each in settings.workloads}
    steps = steps_by_kind(settings.seed, settings.workers)
    result: dict[str, Any] = {
        "machine": machine_facts(),
        "seed": settings.seed,
        "rounds": settings.rounds,
        "workers": settings.workers,
        "cores": {"envoy and processor": core, "load and upstream": load_core},
        "workloads": [
            _result(each, measured[each.name], steps[each.kind]) for each in settings.workloads
        ],
        "idle": _idle(settings, core),
        "held": _held(settings, core, load_core),
    }
    for workload, found in zip(settings.workloads, result["workloads"], strict=True):
        _print(workload, measured[workload.name], found["shares"])
    _print_standing(result)
    write_json(settings.output, result)
    return result


# Processes


@contextmanager
def _rig(
    settings: Settings, core: int | None, load_core: int | None
) -> Iterator[tuple[list[Arm], Running]]:
    """Every process of the benchmark, up and waiting."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-bench-")))
        ports = free_ports(settings.workers)
        workers = tuple(f"{HOST}:{port}" for port in ports)
        upstream = stack.enter_context(
            running("upstream", module("upstream", *map(str, ports)), folder, load_core)
        )
        for port in ports:
            upstream.wait_for_port(port)
        arms = [stack.enter_context(arm(name, workers, folder, core)) for name in ARMS]
        load = running("load", module("http_load"), folder, load_core, talks=True)
        yield arms, stack.enter_context(load)


def _idle(settings: Settings, core: int | None) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
        kvgate({}, Path(folder), core) as scheduler,
    ):
        seconds, seed = settings.standing_s, settings.seed
        return asyncio.run(standing.idle(scheduler, settings.agents, seconds, seed))


def _held(settings: Settings, core: int | None, load_core: int | None) -> dict[str, Any]:
    [port] = free_ports(1)
    worker = f"{HOST}:{port}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-bench-")))
        upstream = module("upstream", str(port))
        stack.enter_context(running("upstream", upstream, folder, load_core)).wait_for_port(port)
        scheduler = stack.enter_context(kvgate(standing.HELD_POLICY, folder, core))
        listen_port, _ = stack.enter_context(
            envoy_in_front([worker], scheduler.extproc_port, folder, core)
        )
        count, seconds = settings.held_requests, settings.standing_s
        held = standing.hold(scheduler, worker, listen_port, count, seconds, settings.seed)
        return asyncio.run(held)


# Measuring

Rounds = dict[str, list[Figures]]
"""Figures of each arm, one a round."""


def _measure(workload: Workload, arms: list[Arm], load: Running, settings: Settings) -> Rounds:
    rounds: Rounds = {arm.name: [] for arm in arms}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(workload.name, total=settings.rounds * len(arms))
        for number in range(settings.rounds):
            # Every other round backwards, so that drift of the machine hits all alike.
            for arm in arms if number % 2 == 0 else arms[::-1]:
                order = Order(arm.port, workload, settings.seed, number, settings.rounds)
                rounds[arm.name].append(_round(arm, load, order))
                progress.advance(task)
    return rounds


def _round(arm: Arm, load: Running, order: Order) -> Figures:
    ready = load.ask(msgspec.json.encode(order).decode())
    if ready != "ready":
        raise load.failure(f"is not ready: {ready}")
    decided = _decisions(arm)
    before = _usage(arm)
    result = msgspec.json.decode(load.ask("go"), type=Result)
    after = _usage(arm)
    envoy, processor = (late - early for early, late in zip(before, after, strict=True))
    decisions = [1_000 * quantile_s(decided, _decisions(arm), share) for share in (0.5, 0.95)]
    return _figures(result, envoy, processor, decisions)


def _decisions(arm: Arm) -> Buckets:
    return arm.scheduler.decisions() if arm.scheduler else {}


def _usage(arm: Arm) -> tuple[Usage, Usage]:
    return arm.envoy.usage(), arm.processor.usage() if arm.processor else Usage(0.0, 0)


def _figures(result: Result, envoy: Usage, processor: Usage, decisions: list[float]) -> Figures:
    count = len(result.latencies_ms)
    return Figures(
        p50_ms=percentile(result.latencies_ms, 0.50),
        p95_ms=percentile(result.latencies_ms, 0.95),
        p99_ms=percentile(result.latencies_ms, 0.99),
        requests_per_s=count / result.seconds,
        envoy_cpu_ms=1_000 * envoy.cpu_s / count,
        processor_cpu_ms=1_000 * processor.cpu_s / count,
        processor_cores=processor.cpu_s / result.seconds,
        envoy_switches=envoy.switches / count,
        processor_switches=processor.switches / count,
        body_bytes=float(result.body_bytes),
        decision_p50_ms=decisions[0],
        decision_p95_ms=decisions[1],
    )


# Reporting


def _medians(rounds: list[Figures]) -> dict[str, float]:
    each = [asdict(figures) for figures in rounds]
    return {name: median(figures[name] for figures in each) for name in each[0]}


def _above_bare_ms(rounds: Rounds) -> list[float]:
    """CPU of kvgate minus that of the bare processor, milliseconds a request, round by round."""
    pairs = zip(rounds[BARE], rounds[KVGATE], strict=True)
    return [ours.processor_cpu_ms - bare.processor_cpu_ms for bare, ours in pairs]


def _shares(rounds: Rounds, steps_ms: dict[str, float]) -> dict[str, float]:
    """Share of each step in kvgate's CPU a request, adding up to 1.

    ``bare`` is the bare processor's whole cost; what is above it is divided in proportion to
    the steps' times in process (``benchmarks.hot_path``).
    """
    medians = {name: _medians(figures)["processor_cpu_ms"] for name, figures in rounds.items()}
    bare = min(1.0, medians[BARE] / medians[KVGATE]) if medians[KVGATE] else 0.0
    total_ms = sum(steps_ms.values())
    return {"bare": bare} | {step: (1 - bare) * ms / total_ms for step, ms in steps_ms.items()}


def _result(workload: Workload, rounds: Rounds, steps_ms: dict[str, float]) -> dict[str, Any]:
    above = _above_bare_ms(rounds)
    return {
        "workload": msgspec.to_builtins(workload),
        "medians": {name: _medians(figures) for name, figures in rounds.items()},
        "rounds": {name: [asdict(each) for each in figures] for name, figures in rounds.items()},
        "above_bare_cpu_ms": {"median": median(above), "low": min(above), "high": max(above)},
        "target_above_bare_cpu_ms": TARGETS_MS.get(workload.kind),
        "shares": _shares(rounds, steps_ms),
    }


_COLUMNS = ("p50 ms", "p95 ms", "p99 ms", "req/s", "Envoy CPU ms", "processor CPU ms", "cores")


def _print(workload: Workload, rounds: Rounds, shares: dict[str, float]) -> None:
    rows = []
    for name, figures in rounds.items():
        found = _medians(figures)
        shown = (
            "p50_ms",
            "p95_ms",
            "p99_ms",
            "requests_per_s",
            "envoy_cpu_ms",
            "processor_cpu_ms",
            "processor_cores",
        )
        rows.append((name, *(f"{found[field]:.2f}" for field in shown)))
    size = _medians(rounds[KVGATE])["body_bytes"] / 1_000
    print_table(f"{workload.name} ({size:.1f} KB a body)", ("", *_COLUMNS), rows)
    above = _above_bare_ms(rounds)
    target = TARGETS_MS.get(workload.kind)
    goal = f", target {target:g}" if target is not None else ""
    p50 = {name: _medians(figures)["p50_ms"] for name, figures in rounds.items()}
    console.print(
        f"kvgate above the bare processor: {median(above):.2f} ms CPU a request "
        f"(rounds {min(above):.2f} to {max(above):.2f}{goal}), "
        f"{p50[KVGATE] - p50[BARE]:.2f} ms p50; "
        f"above Envoy alone {p50[KVGATE] - p50[ALONE]:.2f} ms p50"
    )
    found = _medians(rounds[KVGATE])
    console.print(
        f"decision {found['decision_p50_ms']:.2f} ms p50, {found['decision_p95_ms']:.2f} ms p95; "
        + ", ".join(f"{step} {share:.0%}" for step, share in shares.items())
        + "\n"
    )


def _print_standing(result: dict[str, Any]) -> None:
    idle, held = result["idle"], result["held"]
    console.print(f"idle with {idle['agents']} agents: {idle['cores']:.3f} cores")
    console.print(
        f"{held['requests']:,} requests held: {held['memory_bytes_each'] / 1_000:.1f} KB each, "
        f"{held['cores_while_held']:.3f} cores; {held['ended_well']:,} ended well, "
        f"{held['left']} left behind; all held after {held['hold_s']:.1f} s, answered in "
        f"{held['drain_s']:.1f} s"
    )


def main(
    seed: Annotated[int, typer.Option(help="Of every text that is sent.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of every arm; medians are shown.")] = 5,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Static workers.")] = 8,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "overhead.json",
) -> None:
    """Added latency and CPU a request of an external processor, bare and kvgate."""
    run(Settings(seed=seed, rounds=rounds, workers=workers, output=output))


if __name__ == "__main__":
    typer.run(main)
