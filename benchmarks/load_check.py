"""``kvgate bench load-check``: does our load generator measure what a public one measures?

Our generator and aiperf take turns in sending the same bodies at the same times (open loop,
streamed chats) to fresh clusters with empty caches. Envoy's round robin gives every request the
same worker in every turn, so there the tools must agree; behind kvgate, which chooses by what it
sees, turns differ by themselves. Medians over the rounds are put side by side; how far the rounds
of one tool differ says how much of a difference is chance.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.aiperf import AIPERF, command, replay, write_input
from benchmarks.cluster import (
    MODEL,
    Cluster,
    engines,
    envoy_front,
    kvgate_front,
    wait_until_served,
    write_policy,
)
from benchmarks.compare import BALANCED
from benchmarks.load.client import Wire
from benchmarks.load.driver import Drive
from benchmarks.load.figures import figures
from benchmarks.load.run import describe, measure, write_samples
from benchmarks.load.sample import Budgets, Sample
from benchmarks.machine import machine_facts
from benchmarks.peers import CannotInstall, installed, version
from benchmarks.report import console, median, print_table, write_json
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.prompts import PromptMaker
from benchmarks.workloads.source import Source

OURS, THEIRS = "ours", "aiperf"
ROUND_ROBIN, KVGATE = "envoy:round_robin", "kvgate"
_ENDS = {"lowest": min, "highest": max}

_HEADINGS = {
    "requests": ("requests", "{:,.0f}"),
    "served": ("answered", "{:,.0f}"),
    "prompt_tokens": ("prompt tokens", "{:,.0f}"),
    "output_tokens": ("output tokens", "{:,.0f}"),
    "hit_ratio": ("token hit ratio", "{:.3f}"),
    "ttft_p50_ms": ("TTFT p50 ms", "{:,.1f}"),
    "ttft_p90_ms": ("TTFT p90 ms", "{:,.1f}"),
    "ttft_p99_ms": ("TTFT p99 ms", "{:,.1f}"),
    "tpot_p50_ms": ("TPOT p50 ms", "{:,.2f}"),
    "tpot_p99_ms": ("TPOT p99 ms", "{:,.2f}"),
    "e2e_p50_ms": ("end to end p50 ms", "{:,.1f}"),
    "e2e_p99_ms": ("end to end p99 ms", "{:,.1f}"),
    "output_tokens_per_s": ("output tokens/s", "{:,.1f}"),
    "late_p99_ms": ("generator late p99 ms", "{:,.1f}"),
}


class LoadCheck(msgspec.Struct, frozen=True):
    """Everything the run depends on. A rate far from what either tool can send."""

    workload: str = "shared"
    seed: int = 1
    rounds: int = 3
    duration_s: float = 30.0
    rate_per_s: float = 8.0
    cluster: Cluster = Cluster(workers=4)
    policy: Path = BALANCED
    fronts: tuple[str, ...] = (ROUND_ROBIN, KVGATE)
    """What the clusters are behind, one after the other."""
    output: Path = Path(".kvgate/bench/load-check")

    def plan(self) -> list[Planned]:
        """Requests without the headers that aiperf cannot send request by request."""
        source = Source(
            self.workload,
            seed=self.seed,
            duration_s=self.duration_s,
            rate_per_s=self.rate_per_s,
            max_prompt_tokens=self.cluster.max_model_len // 2,
        )
        return [
            msgspec.structs.replace(each, session="", tenant="", lane="")
            for each in source.requests()
        ]


Shown = dict[str, float]
"""A figure by each of the names in ``_HEADINGS``."""
Turn = Callable[[str, Path], Shown]
"""Sends the plan to a URL; the folder is for what the tool writes of each request."""


def run(settings: LoadCheck, model_dir: Path) -> dict[str, Any]:
    """Both tools' figures and their ratios, printed and written; empty without aiperf.

    Raises:
        PlanError: there is no such workload.
        RigFailure: the cluster did not come up, or aiperf did not do its part.
    """
    plan = settings.plan()
    try:
        with console.status("installing aiperf"):
            bin_dir = installed(AIPERF)
    except CannotInstall as error:
        console.print(f"load-check is skipped: aiperf: {error}", markup=False, soft_wrap=True)
        return {}
    turns: dict[str, Turn] = {
        OURS: lambda url, folder: ours(settings, plan, model_dir, url, folder),
        THEIRS: lambda url, folder: theirs(settings, plan, model_dir, url, folder, bin_dir),
    }
    fronts = {front: _rounds(front, settings, model_dir, turns) for front in settings.fronts}
    result: dict[str, Any] = {
        "machine": machine_facts(),
        "settings": msgspec.to_builtins(settings, enc_hook=str),
        "versions": {AIPERF.package: version(AIPERF)},
        "plan": describe(plan),
        "fronts": {
            front: {"figures": side_by_side(rounds), "rounds": rounds}
            for front, rounds in fronts.items()
        },
    }
    for front, found in result["fronts"].items():
        _print(front, found["figures"], result["plan"], settings)
    write_json(settings.output / "load-check.json", result)
    return result


def _rounds(
    front: str, settings: LoadCheck, model_dir: Path, turns: Mapping[str, Turn]
) -> dict[str, list[Shown]]:
    rounds: dict[str, list[Shown]] = {name: [] for name in turns}
    for number in range(settings.rounds):
        for name in turns if number % 2 == 0 else reversed(list(turns)):
            folder = settings.output.resolve() / front.replace(":", "-") / f"{name}-{number + 1}"
            folder.mkdir(parents=True, exist_ok=True)
            with _fresh_cluster(front, settings, model_dir) as url:
                rounds[name].append(turns[name](url, folder))
    return rounds


@contextmanager
def _fresh_cluster(front: str, settings: LoadCheck, model_dir: Path) -> Iterator[str]:
    """URL of what is in front of workers with empty caches."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-check-")))
        workers = stack.enter_context(engines(settings.cluster, model_dir, folder))
        if front == ROUND_ROBIN:
            way = envoy_front(workers, "ROUND_ROBIN", folder)
        else:
            policy = write_policy(settings.policy, model_dir, folder)
            way = kvgate_front(settings.cluster, workers, policy, folder)
        ready = stack.enter_context(way)
        wait_until_served(ready)
        yield ready.url


def ours(
    settings: LoadCheck, plan: Sequence[Planned], model_dir: Path, url: str, folder: Path
) -> Shown:
    """Figures of our generator."""
    drive = Drive(Wire(url, MODEL), model_dir, settings.seed)
    samples = asyncio.run(measure(OURS, drive, plan)).samples
    write_samples(folder / "samples.jsonl", samples)
    return shown(samples)


def shown(samples: Sequence[Sample]) -> Shown:
    """Figures of a run, by the names and in the units of this comparison."""
    found = figures(samples, Budgets())
    latency = {
        f"{name}_{rank}_ms": 1_000 * getattr(spread, rank)
        for name, spread in (("ttft", found.ttft_s), ("tpot", found.tpot_s), ("e2e", found.e2e_s))
        for rank in ("p50", "p90", "p99")
    }
    told = {
        **latency,
        "requests": float(found.requests),
        "served": float(found.served),
        "prompt_tokens": float(found.prompt_tokens),
        "output_tokens": float(found.output_tokens),
        "hit_ratio": found.hit_ratio,
        "output_tokens_per_s": found.output_tokens_per_s,
        "late_p99_ms": 1_000 * found.lag_s.p99,
    }
    return {name: told[name] for name in _HEADINGS}


def theirs(
    settings: LoadCheck,
    plan: Sequence[Planned],
    model_dir: Path,
    url: str,
    folder: Path,
    bin_dir: Path,
) -> Shown:
    """Figures of aiperf.

    Raises:
        RigFailure: it failed.
    """
    wire, file = Wire(url, MODEL), folder / "plan.jsonl"
    write_input(file, wire, PromptMaker(model_dir, settings.seed), plan)
    with console.status(THEIRS):
        return replay(command(bin_dir, wire, model_dir, file, folder), folder, plan[-1].at_s)


# Side by side


def side_by_side(rounds: Mapping[str, Sequence[Shown]]) -> list[dict[str, Any]]:
    """For every figure the medians, ours over theirs, and the ends of each tool's rounds."""
    found = []
    for name, (heading, _) in _HEADINGS.items():
        values = {tool: [shown[name] for shown in each] for tool, each in rounds.items()}
        found.append({"figure": heading, **_pair(values)})
    return found


def _pair(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    medians = {tool: median(each) for tool, each in values.items()}
    ratio = medians[OURS] / medians[THEIRS] if medians[THEIRS] else float("nan")
    ends = {f"{tool}_{end}": of(each) for tool, each in values.items() for end, of in _ENDS.items()}
    return {**medians, "ratio": ratio, **ends}


def _print(
    front: str, found: Sequence[dict[str, Any]], plan: Mapping[str, float], settings: LoadCheck
) -> None:
    rows = [
        (
            each["figure"],
            form.format(each[OURS]),
            form.format(each[THEIRS]),
            f"{each['ratio']:.3f}",
            *(
                " to ".join(form.format(each[f"{tool}_{end}"]) for end in _ENDS)
                for tool in (OURS, THEIRS)
            ),
        )
        for (_, form), each in zip(_HEADINGS.values(), found, strict=True)
    ]
    title = (
        f"{front}: {plan['requests']} requests in {plan['span_s']:.0f} s, "
        f"{settings.cluster.workers} workers, {settings.rounds} rounds (medians)"
    )
    heads = ("", OURS, THEIRS, "ratio", f"{OURS}, rounds", f"{THEIRS}, rounds")
    print_table(title, heads, rows)
