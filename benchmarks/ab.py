"""``kvgate bench ab``: the old and the new policy on two clusters, with the same traffic.

Arms take turns, a b b a, so that what drifts hits both alike. Every turn sends the same plan in
words of its own: two clusters, or two routes to one, never find each other's prompts cached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.ab_figures import (
    LATE,
    TTFT_P50,
    Compared,
    Criteria,
    Interval,
    Verdict,
    columns,
    compare,
)
from benchmarks.load import plots
from benchmarks.load.client import Wire
from benchmarks.load.driver import Drive
from benchmarks.load.figures import as_json, figures, hit_ratio_over_time
from benchmarks.load.run import describe, measure, write_samples
from benchmarks.load.sample import Budgets, Sample
from benchmarks.machine import machine_facts
from benchmarks.report import console, print_table, write_json
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.source import Source

_HIT_BIN_S = 5.0
_LATE_SHARE = 0.1
"""Of the TTFT p50: a generator later than that (p99) is worth a word."""

__all__ = ["AB", "Arm", "Criteria", "NothingToCompare", "run"]


class NothingToCompare(Exception):
    """No answer of the old policy's cluster is within the budgets: no ratio says anything."""


class Arm(msgspec.Struct, frozen=True):
    """One cluster: its name in tables, and how it is asked."""

    name: str
    wire: Wire


class AB(msgspec.Struct, frozen=True):
    """Everything the run depends on. ``drive`` but for its wire.

    ``drive.seed`` is of the first turn's words; the source has the seed of all else.
    """

    source: Source
    old: Arm
    new: Arm
    drive: Drive
    budgets: Budgets
    criteria: Criteria = Criteria()
    rounds: int = 4
    pause_s: float = 5.0
    """Between two runs, so that the answers of one do not load the next."""
    output: Path = Path(".kvgate/bench/ab")

    def turns(self) -> Iterator[tuple[Arm, Drive]]:
        """Arms in their order, each with its own words."""
        for number in range(2 * self.rounds):
            arm = self.old if number % 4 in (0, 3) else self.new
            words = self.drive.seed + number
            yield arm, msgspec.structs.replace(self.drive, wire=arm.wire, seed=words)


Runs = dict[str, list[list[Sample]]]
"""Samples of each arm, a list for each round."""


def run(settings: AB, plan: Sequence[Planned]) -> dict[str, Any]:
    """Measure both arms, print, plot and write what they showed, criterion by criterion.

    Raises:
        NothingToCompare: no answer of the old policy's cluster is within the budgets.
    """
    runs = _measure(settings, plan)
    old, new = runs[settings.old.name], runs[settings.new.name]
    compared, verdicts = compare(
        columns(old, settings.budgets),
        columns(new, settings.budgets),
        settings.rounds,
        settings.criteria,
        settings.source.seed,
    )
    result = {
        "machine": machine_facts(),
        "settings": _told(settings),
        "plan": describe(plan),
        "figures": msgspec.to_builtins(compared),
        "criteria": [
            {**msgspec.to_builtins(each), "broken": each.broken, "sure": each.sure}
            for each in verdicts
        ],
        "roll_back": any(each.broken for each in verdicts),
        "arms": {
            name: [as_json(figures(turn, settings.budgets)) for turn in turns]
            for name, turns in runs.items()
        },
    }
    _print(settings, len(plan), compared, verdicts)
    _print_counts(result["arms"])
    write_json(settings.output / "ab.json", result)
    _draw(settings.output, runs)
    return result


def _measure(settings: AB, plan: Sequence[Planned]) -> Runs:
    runs: Runs = {settings.old.name: [], settings.new.name: []}
    for number, (arm, drive) in enumerate(settings.turns()):
        if number:
            time.sleep(settings.pause_s)
        turns = runs[arm.name]
        measured = asyncio.run(measure(f"round {len(turns) + 1}, {arm.name}", drive, plan))
        turns.append(measured.samples)
        write_samples(settings.output / f"{arm.name}-{len(turns)}.jsonl", turns[-1])
        if arm is settings.old and not any(map(settings.budgets.met, turns[-1])):
            raise NothingToCompare(f"no answer of {arm.wire.url} is within the budgets")
    return runs


def _told(settings: AB) -> dict[str, Any]:
    """Settings as they are written down: of headers only the names, they may hold keys."""
    told: dict[str, Any] = msgspec.to_builtins(settings, enc_hook=str)
    wires = ((told["old"], settings.old.wire), (told["new"], settings.new.wire))
    for arm, wire in (*wires, (told["drive"], settings.drive.wire)):
        arm["wire"]["headers"] = sorted(wire.headers)
    return told


# Showing


def _print(
    settings: AB, requests: int, compared: dict[str, Compared], verdicts: Sequence[Verdict]
) -> None:
    title = f"{settings.source.title}: {settings.rounds} rounds of {requests} requests"
    rows = [
        (name, f"{each.a:,.3f}", f"{each.b:,.3f}", *_ratio(each.ratio))
        for name, each in compared.items()
    ]
    print_table(title, ("", settings.old.name, settings.new.name, "b over a", "95%"), rows)
    for each in verdicts:
        console.print(_line(each), markup=False, soft_wrap=True)
    late_ms = max(compared[LATE].a, compared[LATE].b)
    if late_ms > _LATE_SHARE * min(compared[TTFT_P50].a, compared[TTFT_P50].b):
        console.print(f"the load generator was {late_ms:,.0f} ms late: it is part of these figures")


def _ratio(found: Interval) -> tuple[str, str]:
    if found.value != found.value:
        return "-", "-"
    return f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}"


def _line(verdict: Verdict) -> str:
    """A criterion in words."""
    value, span = _ratio(verdict.found)
    bound = "at least" if verdict.at_least else "at most"
    unsure = "" if verdict.sure else "; the interval holds the limit: more rounds tell more"
    word = "ROLL BACK" if verdict.broken else "ok"
    return f"{word}: {verdict.name} {value} ({span}), {bound} {verdict.limit:g}{unsure}"


def _print_counts(arms: dict[str, list[dict[str, Any]]]) -> None:
    for name, turns in arms.items():
        outcomes: dict[str, int] = {}
        for turn in turns:
            for outcome, count in turn["outcomes"].items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
        told = ", ".join(f"{outcome}: {count}" for outcome, count in outcomes.items())
        off = sum(turn["off_plan"] for turn in turns)
        console.print(f"{name} by status: {told}; prompts off plan: {off}", markup=False)


def _draw(folder: Path, runs: Runs) -> None:
    """TTFT distribution and hit ratio over time, all rounds of an arm together."""
    if not plots.available():
        console.print("no plots: pip install 'kvgate[bench]' brings matplotlib")
        return
    pooled = {name: [each for turn in turns for each in turn] for name, turns in runs.items()}
    ttfts = {
        name: [s.ttft_s for s in samples if s.served and s.ttft_s is not None]
        for name, samples in pooled.items()
    }
    plots.ttft_distribution(folder / "ttft.png", {n: each for n, each in ttfts.items() if each})
    hits = {name: hit_ratio_over_time(samples, _HIT_BIN_S) for name, samples in pooled.items()}
    plots.over_time(folder / "hit_ratio.png", "token hit ratio", hits)
    console.print(f"plots: {folder}", soft_wrap=True, markup=False)
