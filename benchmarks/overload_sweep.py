"""A trace at several times the sustainable rate, with admission on and off.

The sustainable rate is found by a closed loop over all slots. The sweep runs in virtual time,
where minutes of arrivals take seconds; in wall-clock time, if asked for, the same through the
real Envoy, with a sustainable rate of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import track

from benchmarks.load import plots
from benchmarks.load.figures import Series, as_json, figures
from benchmarks.load.sample import Budgets, Sample
from benchmarks.machine import machine_facts
from benchmarks.overload import OFF, ON, POLICIES, Overload, calibrate, middle_rate, run_arm
from benchmarks.report import console, print_table, write_json
from benchmarks.simulation.cluster import VirtualCluster
from benchmarks.simulation.flight import Patience
from benchmarks.simulation.policy import keyless_policy
from benchmarks.workloads.plan import PlanError, Planned
from benchmarks.workloads.traces import read_trace

_WARM_SHARE = 0.5
"""Of the sustainable rate, before the arrivals that count."""


class Sweep(msgspec.Struct, frozen=True):
    """Everything the run depends on; cluster, clients and policies are the overload's."""

    trace: Path
    factors: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)
    """Times the sustainable rate."""
    seconds: float = 120.0
    """Of arrivals in virtual time, for each arm and factor."""
    warm_s: float = 20.0
    """Of arrivals before, at half the sustainable rate, not counted."""
    hop_s: float = 0.002
    """What Envoy and the scheduler's process add in virtual time."""
    wall_clock: bool = False
    wall_seconds: float = 30.0
    arms: Overload = Overload(budgets=Budgets(ttft_s=3.0, tpot_s=0.3), on=POLICIES / "code-on.yaml")
    output: Path = Path(".kvgate/bench/overload-sweep")

    @property
    def policies(self) -> tuple[tuple[str, Path], ...]:
        """Policy file of each arm."""
        return (ON, self.arms.on), (OFF, self.arms.off)


def run(settings: Sweep, model_dir: Path) -> dict[str, Any]:
    """Calibrate, measure every arm at every factor, print, plot and write it.

    Raises:
        PlanError: the trace cannot be read, or is too short for a factor.
    """
    rows = read_trace(settings.trace)
    result: dict[str, Any] = {
        "machine": machine_facts(),
        "settings": msgspec.to_builtins(settings, enc_hook=str),
        "trace": {
            "requests": len(rows),
            "most_prompt_tokens": max(row.prompt_tokens for row in rows),
        },
        "virtual time": _virtual(settings, rows),
    }
    if settings.wall_clock:
        result["wall clock"] = _wall_clock(settings, rows, model_dir)
    for clock in ("virtual time", "wall clock"):
        if clock in result:
            _show(clock, result[clock], settings)
    write_json(settings.output / "overload-sweep.json", result)
    return result


def paced(rows: Sequence[Planned], rate_per_s: float, seconds: float) -> list[Planned]:
    """The first rows of a trace, as many as come in this time at this mean rate.

    Bursts keep their shape; only the pace differs.

    Raises:
        PlanError: there are not so many rows.
    """
    wanted = max(1, round(rate_per_s * seconds))
    if wanted > len(rows):
        raise PlanError(
            f"{wanted} requests are needed for {seconds:g} s at {rate_per_s:.1f}/s, "
            f"the trace has {len(rows)}: fewer seconds or smaller factors"
        )
    taken = rows[:wanted]
    start = taken[0].at_s
    span_s = taken[-1].at_s - start
    pace = seconds / span_s if span_s else 0.0
    return [msgspec.structs.replace(row, at_s=(row.at_s - start) * pace) for row in taken]


def _all_over(rows: Sequence[Planned], wanted: int) -> Sequence[Planned]:
    """So many rows from all over a trace: its lengths change from one minute to the next."""
    return rows[:: max(1, len(rows) // wanted)][:wanted]


def _plans(
    settings: Sweep, rows: Sequence[Planned], sustainable: float, seconds: float
) -> dict[str, list[Planned]]:
    """Arrivals of every factor."""
    return {
        f"{factor:g}": paced(rows, factor * sustainable, seconds) for factor in settings.factors
    }


# In virtual time


def _virtual(settings: Sweep, rows: Sequence[Planned]) -> dict[str, Any]:
    arms = settings.arms
    closed = VirtualCluster(keyless_policy(arms.off), arms.cluster_of(arms.off), settings.hop_s)
    closed.run(_all_over(rows, arms.slots * arms.calibration_rounds), in_flight=arms.slots)
    sustainable = middle_rate(closed.samples)
    warm = paced(rows, _WARM_SHARE * sustainable, settings.warm_s) if settings.warm_s else []
    plans = _plans(settings, rows[len(warm) :], sustainable, settings.seconds)
    factors: dict[str, Any] = {}
    for factor, plan in track(plans.items(), "virtual time", console=console, transient=True):
        factors[factor] = {
            arm: _virtual_arm(settings, policy, plan, warm) for arm, policy in settings.policies
        }
    return {"sustainable_per_s": sustainable, "seconds": settings.seconds, "factors": factors}


def _virtual_arm(
    settings: Sweep, policy: Path, plan: Sequence[Planned], warm: Sequence[Planned]
) -> dict[str, Any]:
    arms = settings.arms
    patience = Patience(arms.tries, arms.patient_every)
    cluster = VirtualCluster(
        keyless_policy(policy), arms.cluster_of(policy), settings.hop_s, patience=patience
    )
    later = [msgspec.structs.replace(each, at_s=each.at_s + settings.warm_s) for each in plan]
    cluster.run([*warm, *later])
    return _told(cluster.samples[len(warm) :], settings, settings.seconds)


# In wall-clock time


def _wall_clock(settings: Sweep, rows: Sequence[Planned], model_dir: Path) -> dict[str, Any]:
    arms = settings.arms
    closed = _all_over(rows, arms.slots * arms.calibration_rounds)
    sustainable = calibrate(arms, model_dir, closed)
    warm = rows[: arms.slots * arms.warm_rounds]
    factors: dict[str, Any] = {}
    plans = _plans(settings, rows[len(warm) :], sustainable, settings.wall_seconds)
    for factor, plan in plans.items():
        factors[factor] = {
            arm: _told(
                run_arm(f"{factor} times, {arm}", arms, policy, model_dir, plan, warm).samples,
                settings,
                settings.wall_seconds,
            )
            for arm, policy in settings.policies
        }
    return {"sustainable_per_s": sustainable, "seconds": settings.wall_seconds, "factors": factors}


# What an arm showed


def _told(samples: Sequence[Sample], settings: Sweep, seconds: float) -> dict[str, Any]:
    found = figures(samples, settings.arms.budgets, seconds)
    return {
        "sent_per_s": found.requests / seconds,
        "goodput_per_s": found.goodput_per_s,
        "shed_share": 1 - found.served / found.requests,
        "ttft_p50_s": found.ttft_s.p50,
        "ttft_p99_s": found.ttft_s.p99,
        "figures": as_json(found),
    }


_Column = tuple[str, Callable[[dict[str, Any]], str]]

_COLUMNS: tuple[_Column, ...] = (
    ("sent/s", lambda told: f"{told['sent_per_s']:.1f}"),
    ("goodput/s", lambda told: f"{told['goodput_per_s']:.2f}"),
    ("shed", lambda told: f"{100 * told['shed_share']:.0f}%"),
    ("TTFT p50 ms", lambda told: f"{1_000 * told['ttft_p50_s']:,.0f}"),
    ("p99 ms", lambda told: f"{1_000 * told['ttft_p99_s']:,.0f}"),
)
_LINES = {"goodput_per_s": "answers within the budgets, a second", "ttft_p99_s": "TTFT p99 (s)"}


def _show(clock: str, found: dict[str, Any], settings: Sweep) -> None:
    budgets = settings.arms.budgets
    title = (
        f"{settings.trace.stem}, {clock}: sustainable {found['sustainable_per_s']:.1f}/s, "
        f"{found['seconds']:g} s of arrivals, budgets TTFT {budgets.ttft_s} s, "
        f"TPOT {budgets.tpot_s} s"
    )
    rows = [
        (f"{factor} times, {arm}", *(tell(told) for _, tell in _COLUMNS))
        for factor, arms in found["factors"].items()
        for arm, told in arms.items()
    ]
    print_table(title, ("", *(column for column, _ in _COLUMNS)), rows)
    if not plots.available():
        return
    for field, what in _LINES.items():
        path = settings.output / f"{field.removesuffix('_s')}-{clock.replace(' ', '-')}.png"
        lines = {arm: _line(found, arm, field) for arm, _ in settings.policies}
        with plots.Plot(path, "times the sustainable rate", what) as axes:
            for arm, (factors, values) in lines.items():
                axes.plot(factors, values, label=arm, marker="o")
            axes.set_ylim(bottom=0.0)


def _line(found: dict[str, Any], arm: str, field: str) -> Series:
    factors = found["factors"]
    return [float(factor) for factor in factors], [arms[arm][field] for arms in factors.values()]
