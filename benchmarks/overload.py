"""Three times what the workers can do, with admission on and off, in one run.

First a closed loop with as many requests in flight as there are slots finds the sustainable
rate. Then each arm, on a fresh cluster behind the real Envoy, is warmed by a closed loop over
half the slots, so that it has learned rates and lengths of answers as one in production has,
and gets the same arrivals at a multiple of that rate: tenants with lanes, one in five clients
waiting and coming back as told.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import (
    MODEL,
    Cluster,
    Engine,
    Front,
    engines,
    kvgate_front,
    wait_until_served,
    write_policy,
)
from benchmarks.load.client import Wire
from benchmarks.load.driver import Drive, drive
from benchmarks.load.figures import Figures, as_json, figures, spread
from benchmarks.load.run import Measured, draw, measure, print_figures, write_samples
from benchmarks.load.sample import Budgets, Sample
from benchmarks.machine import machine_facts
from benchmarks.report import console, print_table, write_json
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.shapes import Spread
from benchmarks.workloads.tenants import ONLINE, Tenants

POLICIES = Path(__file__).parent / "policies"
ON, OFF = "admission on", "admission off"
GOODPUT_TARGET = 1.5
FACTOR_TARGET = 2.0
"""Retry-After and the wait then seen may differ by this much."""


class Overload(msgspec.Struct, frozen=True):
    """Everything the run depends on."""

    seed: int = 1
    seconds: float = 60.0
    """Of arrivals, for each arm."""
    factor: float = 3.0
    """Times the sustainable rate."""
    rate_per_s: float | None = None
    """The sustainable rate where it is known; None: calibrate."""
    calibration_rounds: int = 12
    """Requests a slot in the calibration."""
    warm_rounds: int = 2
    """Requests a slot before the arrivals, over half the slots, not counted; 0: none."""
    tries: int = 10
    patient_every: int = 5
    cluster: Cluster = Cluster(workers=3, max_num_seqs=8)
    budgets: Budgets = Budgets(ttft_s=1.0, tpot_s=0.05)
    on: Path = POLICIES / "overload-on.yaml"
    off: Path = POLICIES / "overload-off.yaml"
    tenants: int = 12
    prompt_tokens: Spread = Spread(300, 1_200, 3_000)
    answer_tokens: Spread = Spread(80, 200, 400)
    processes: int = 1
    output: Path = Path(".kvgate/bench/overload")

    @property
    def slots(self) -> int:
        """Requests that all workers can run at once."""
        return self.cluster.workers * self.cluster.max_num_seqs

    def cluster_of(self, policy: Path) -> Cluster:
        """An engine without admission before it is not spared by slots that agents tell of."""
        return msgspec.structs.replace(self.cluster, tell_slots=policy == self.on)

    def plan(self, rate_per_s: float, seconds: float, seed: int | None = None) -> list[Planned]:
        """Requests of all tenants."""
        return Tenants(
            rate_per_s=rate_per_s,
            duration_s=seconds,
            seed=self.seed if seed is None else seed,
            tenants=self.tenants,
            cv=1.5,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
        ).requests()


def run(settings: Overload, model_dir: Path) -> dict[str, Any]:
    """Calibrate, measure both arms, print, plot and write what they showed."""
    sustainable = settings.rate_per_s or calibrate(
        settings, model_dir, _some(settings, settings.calibration_rounds, settings.seed)
    )
    console.print(f"sustainable: {sustainable:.1f} requests/s; sent: {settings.factor:g} times")
    plan = settings.plan(settings.factor * sustainable, settings.seconds)
    warm = _some(settings, settings.warm_rounds, settings.seed + 1)
    runs = {
        name: run_arm(name, settings, policy, model_dir, plan, warm)
        for name, policy in ((ON, settings.on), (OFF, settings.off))
    }
    found = {name: _arm_result(each, settings) for name, each in runs.items()}
    result = {
        "machine": machine_facts(),
        "settings": msgspec.to_builtins(settings, enc_hook=str),
        "sustainable_per_s": sustainable,
        "requests": len(plan),
        "arms": found,
        "goodput_ratio": _ratio(found[ON]["figures"]["good"], found[OFF]["figures"]["good"]),
    }
    _print(settings, runs, result)
    for name, each in runs.items():
        write_samples(settings.output / f"{name.replace(' ', '-')}.jsonl", each.samples)
    write_json(settings.output / "overload.json", result)
    draw(settings.output, runs)
    return result


def _some(settings: Overload, rounds: int, seed: int) -> list[Planned]:
    """So many requests a slot, for a closed loop."""
    wanted = settings.slots * rounds
    return settings.plan(2.0 * max(1, wanted), 1.0, seed)[:wanted]


def calibrate(settings: Overload, model_dir: Path, plan: Sequence[Planned]) -> float:
    """Answers a second with every slot in use and nobody waiting."""
    with _system(settings, settings.off, model_dir) as (_, front):
        closed = _drive(settings, front, model_dir, in_flight=settings.slots)
        samples = asyncio.run(measure("calibration", closed, plan)).samples
    return middle_rate(samples)


def middle_rate(samples: Sequence[Sample]) -> float:
    """Answers a second between the first and the last quarter of them."""
    ends = sorted(sample.sent_s + sample.e2e_s for sample in samples if sample.served)
    if len(ends) < 4:
        raise ValueError(f"{len(ends)} answers are too few to tell a rate")
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def run_arm(
    name: str,
    settings: Overload,
    policy: Path,
    model_dir: Path,
    plan: Sequence[Planned],
    warm: Sequence[Planned],
) -> Measured:
    """A fresh system, warmed by one plan and measured with another."""
    with _system(settings, policy, model_dir) as (workers, front):
        if warm:
            closed = _drive(settings, front, model_dir, in_flight=max(1, settings.slots // 2))
            with console.status(f"{name}: warming"):
                asyncio.run(drive(closed, warm, lambda _: None))
        urls = [engine.url for engine in workers]
        return asyncio.run(measure(name, _drive(settings, front, model_dir), plan, urls))


@contextmanager
def _system(
    settings: Overload, policy: Path, model_dir: Path
) -> Iterator[tuple[list[Engine], Front]]:
    cluster = settings.cluster_of(policy)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-overload-")))
        workers = stack.enter_context(engines(cluster, model_dir, folder))
        written = write_policy(policy, model_dir, folder)
        front = stack.enter_context(kvgate_front(cluster, workers, written, folder))
        wait_until_served(front)
        yield workers, front


def _drive(
    settings: Overload, front: Front, model_dir: Path, in_flight: int | None = None
) -> Drive:
    wire = Wire(
        front.url,
        MODEL,
        max_tries=1 if in_flight else settings.tries,
        patient_every=settings.patient_every,
    )
    return Drive(wire, model_dir, settings.seed, in_flight, 1 if in_flight else settings.processes)


# What an arm showed


def told_against_seen(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """How well the announced waits were chosen, of requests that came back and were served.

    Returns:
        the first announced wait over the time from that refusal until the request ran, and the
        last announced wait over the time it was then held (only where it was held at all).
    """
    whole, held = [], []
    for sample in samples:
        if not sample.refused or not sample.served:
            continue
        first, last = sample.refused[0], sample.refused[-1]
        queue_s = sample.queue_s or 0.0
        waited_s = sample.sent_s + queue_s - sample.due_s - first.after_s
        if first.announced_s and waited_s > 0:
            whole.append(first.announced_s / waited_s)
        if last.announced_s and queue_s > 0:
            held.append(last.announced_s / queue_s)
    return whole, held


def patient_clients(samples: Sequence[Sample], every: int) -> dict[str, dict[str, int]]:
    """Of the clients that come back as told: how many there are in each lane, how many of them
    were answered in the end, and how many had come back for it."""
    told: dict[str, dict[str, int]] = {}
    for sample in samples:
        if sample.number % every == 0:
            lane = told.setdefault(sample.lane, {"clients": 0, "answered": 0, "returned": 0})
            lane["clients"] += 1
            lane["answered"] += sample.served
            lane["returned"] += bool(sample.refused)
    return told


def _arm_result(measured: Measured, settings: Overload) -> dict[str, Any]:
    samples = measured.samples
    whole, held = told_against_seen(samples)
    within = [1 / FACTOR_TARGET <= ratio <= FACTOR_TARGET for ratio in whole]
    watch = measured.watch
    return {
        "figures": as_json(figures(samples, settings.budgets, settings.seconds)),
        "lanes": {
            lane: as_json(_of_lane(samples, lane, settings))
            for lane in sorted({sample.lane for sample in samples})
        },
        "patient": patient_clients(samples, settings.patient_every),
        "engine_waiting_most": watch.waiting_most if watch else None,
        "told_over_waited": msgspec.to_builtins(spread(whole)),
        "told_over_held": msgspec.to_builtins(spread(held)),
        "told_within_factor_2": _ratio(sum(within), len(within)),
    }


def _of_lane(samples: Sequence[Sample], lane: str, settings: Overload) -> Figures:
    own = [sample for sample in samples if sample.lane == lane]
    return figures(own, settings.budgets, settings.seconds)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _print(settings: Overload, runs: dict[str, Measured], result: dict[str, Any]) -> None:
    columns: dict[str, Figures] = {}
    for name, each in runs.items():
        columns[name] = figures(each.samples, settings.budgets, settings.seconds)
        columns[f"{name}: {ONLINE}"] = _of_lane(each.samples, ONLINE, settings)
    print_figures(f"{settings.factor:g} times the sustainable rate", columns)
    arms = result["arms"]
    rows = [(label, *(tell(arms[name]) for name in runs)) for label, tell in _ROWS.items()]
    rows += [
        (f"patient clients answered: {lane}", *(_answered(arms[name], lane) for name in runs))
        for lane in sorted(arms[ON]["patient"])
    ]
    print_table("admission", ("", *runs), rows)
    p99 = arms[ON]["lanes"].get(ONLINE, arms[ON]["figures"])["ttft_s"]["p99"]
    refused = arms[ON]["figures"]["refused_tries"]
    told = arms[ON]["figures"]["told_to_wait"]
    broken = [name for name in arms[ON]["figures"]["outcomes"] if name.startswith(("0", "5"))]
    checks = {
        f"online TTFT p99 {p99:.3f} s, budget {settings.budgets.ttft_s} s": (
            settings.budgets.ttft_s is None or p99 <= settings.budgets.ttft_s
        ),
        f"goodput {result['goodput_ratio']:.2f} times that without admission, "
        f"target {GOODPUT_TARGET}": not result["goodput_ratio"] < GOODPUT_TARGET,
        f"{told} of {refused} refusals have Retry-After": told == refused,
        f"failed: {', '.join(broken) or 'none'}": not broken,
    }
    for what, met in checks.items():
        console.print(f"{'met' if met else 'MISSED'}: {what}")


def _answered(arm: dict[str, Any], lane: str) -> str:
    told = arm["patient"][lane]
    share = _ratio(told["answered"], told["clients"])
    return f"{share:.2f} of {told['clients']}, {told['returned']} came back"


def _spread(values: dict[str, float]) -> str:
    if values["p50"] != values["p50"]:
        return "-"
    return f"{values['p50']:.2f} / {values['p90']:.2f} / {values['p99']:.2f}"


_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "longest queue inside an engine": lambda arm: f"{arm['engine_waiting_most']:.0f}",
    "told / waited until run, p50/p90/p99": lambda arm: _spread(arm["told_over_waited"]),
    "within a factor of 2": lambda arm: f"{arm['told_within_factor_2']:.2f}",
    "told / held on return, p50/p90/p99": lambda arm: _spread(arm["told_over_held"]),
}
