"""Several routers in front of the same simulated cluster with the same arrivals.

Each arm gets fresh workers with empty caches. Arms take turns round by round, forwards and
backwards, so that drift of the machine hits all alike; medians over the rounds are shown.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.cluster import (
    MODEL,
    Cluster,
    Engine,
    Front,
    engines,
    envoy_front,
    kvgate_front,
    wait_until_served,
    write_policy,
)
from benchmarks.load.client import Wire
from benchmarks.load.driver import Drive
from benchmarks.load.figures import as_json, figures, imbalance
from benchmarks.load.run import Measured, describe, draw, measure, write_samples
from benchmarks.load.sample import Budgets
from benchmarks.machine import machine_facts
from benchmarks.peers import PEERS, CannotInstall, installed, peer_front, version
from benchmarks.report import console, median, print_table, write_json
from benchmarks.rig import RigFailure
from benchmarks.workloads.plan import PlanError, Planned
from benchmarks.workloads.source import Source

KVGATE = "kvgate"
ENVOY_ARMS = {
    "envoy:round_robin": "ROUND_ROBIN",
    "envoy:least_request": "LEAST_REQUEST",
    "envoy:ring_hash": "RING_HASH",
}
PEER_ARMS = {peer.name: peer for peer in PEERS}
ALL_ARMS = (KVGATE, *ENVOY_ARMS, *PEER_ARMS)
BALANCED = Path(__file__).parent / "policies" / "balanced.yaml"


class Comparison(msgspec.Struct, frozen=True):
    """Everything the run depends on.

    ``arms``: ``kvgate`` (the policy), ``kvgate:PROFILE`` (the policy with another routing
    profile), ``envoy:POLICY`` or ``PACKAGE:POLICY`` of a peer.
    """

    arms: tuple[str, ...] = ALL_ARMS
    workloads: tuple[str, ...] = ("shared", "chats", "mix")
    """Kinds, YAML files or trace files."""
    seed: int = 1
    rounds: int = 1
    duration_s: float = 45.0
    rate_per_s: float | None = None
    """Of every workload; None: each its own."""
    trace_duration_s: float | None = None
    """Of traces, whose prefixes return later than those of workloads; None: ``duration_s``."""
    trace_speedup: float = 2.0
    trace_spread_s: float = 3.0
    cluster: Cluster = Cluster(stream_interval=8)
    trace_num_blocks: int | None = None
    """KV blocks of a worker for traces; None: as for workloads."""
    budgets: Budgets = Budgets(ttft_s=1.0, tpot_s=0.05)
    policy: Path = BALANCED
    processes: int = 1
    output: Path = Path(".kvgate/bench/compare")

    def source(self, name: str) -> Source:
        """A workload or a trace; prompts that engines would refuse are left out."""
        source = Source(
            name,
            seed=self.seed,
            duration_s=self.duration_s,
            rate_per_s=self.rate_per_s,
            speedup=self.trace_speedup,
            spread_s=self.trace_spread_s,
            max_prompt_tokens=self.cluster.max_model_len // 2,
        )
        if not source.is_trace or self.trace_duration_s is None:
            return source
        return msgspec.structs.replace(source, duration_s=self.trace_duration_s)

    def cluster_of(self, source: Source) -> Cluster:
        """The workers that it runs on."""
        if not source.is_trace or self.trace_num_blocks is None:
            return self.cluster
        return msgspec.structs.replace(self.cluster, num_blocks=self.trace_num_blocks)


class Turn(msgspec.Struct, frozen=True):
    """One round of one arm: a run and what the router spent on it."""

    measured: Measured
    cpu_s: float
    beside_cpu_s: float
    """CPU of kvgate's agents."""
    peak_bytes: int
    command: list[str]


Turns = dict[str, list[Turn]]


def run(settings: Comparison, model_dir: Path) -> dict[str, Any]:
    """Measure every arm with every workload, print, plot and write what they showed."""
    for name in settings.arms:
        _check_arm(name)
    arms, skipped = _available(settings.arms)
    sources = [settings.source(name) for name in settings.workloads]
    plans = [source.requests() for source in sources]
    found = {}
    for source, plan in zip(sources, plans, strict=True):
        title, cluster = source.title, settings.cluster_of(source)
        turns = _measure(title, settings, cluster, arms, plan, model_dir)
        found[title] = {
            "plan": {**describe(plan), "num_blocks": cluster.num_blocks},
            "arms": {name: _arm_result(each, settings) for name, each in turns.items()},
        }
        _print(title, found[title], settings)
        folder = settings.output / title
        draw(folder, {name: each[0].measured for name, each in turns.items() if each})
        for name, each in turns.items():
            for number, turn in enumerate(each):
                path = folder / f"{name.replace(':', '-')}-{number + 1}.jsonl"
                write_samples(path, turn.measured.samples)
    result = {
        "machine": machine_facts(),
        "settings": msgspec.to_builtins(settings, enc_hook=str),
        "versions": {PEER_ARMS[n].package: version(PEER_ARMS[n]) for n in arms if n in PEER_ARMS},
        "skipped": skipped,
        "workloads": found,
    }
    write_json(settings.output / "compare.json", result)
    return result


def _check_arm(name: str) -> None:
    if name not in ALL_ARMS and not name.startswith(f"{KVGATE}:"):
        raise PlanError(f"no arm {name!r}; there are {', '.join(ALL_ARMS)} and kvgate:PROFILE")


def _available(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Arms that can run, and why the others cannot."""
    skipped = {}
    for name in names:
        if name not in PEER_ARMS:
            continue
        try:
            with console.status(f"installing {name}"):
                installed(PEER_ARMS[name])
        except CannotInstall as error:
            skipped[name] = str(error)
            console.print(f"{name} is skipped: {error}", markup=False, soft_wrap=True)
    return [name for name in names if name not in skipped], skipped


def _measure(
    title: str,
    settings: Comparison,
    cluster: Cluster,
    arms: Sequence[str],
    plan: Sequence[Planned],
    model_dir: Path,
) -> Turns:
    turns: Turns = {name: [] for name in arms}
    for number in range(settings.rounds):
        for name in arms if number % 2 == 0 else reversed(arms):
            try:
                turn = _turn(f"{title}, {name}", name, settings, cluster, plan, model_dir)
                turns[name].append(turn)
            except RigFailure as failure:
                console.print(f"{name} failed: {failure}", markup=False, soft_wrap=True)
    return turns


def _turn(
    title: str,
    name: str,
    settings: Comparison,
    cluster: Cluster,
    plan: Sequence[Planned],
    model_dir: Path,
) -> Turn:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-compare-")))
        workers = stack.enter_context(engines(cluster, model_dir, folder))
        front = stack.enter_context(
            _front(name, settings.policy, cluster, workers, model_dir, folder)
        )
        wait_until_served(front)
        drive = Drive(Wire(front.url, MODEL), model_dir, settings.seed, None, settings.processes)
        before, beside = front.usage(), front.beside_usage()
        urls = [engine.url for engine in workers]
        measured = asyncio.run(measure(title, drive, plan, urls))
        return Turn(
            measured,
            (front.usage() - before).cpu_s,
            (front.beside_usage() - beside).cpu_s,
            front.peak_bytes(),
            list(front.processes[0].command),
        )


@contextmanager
def _front(
    name: str,
    policy: Path,
    cluster: Cluster,
    workers: list[Engine],
    model_dir: Path,
    folder: Path,
) -> Iterator[Front]:
    if name in ENVOY_ARMS:
        front = envoy_front(workers, ENVOY_ARMS[name], folder)
    elif name in PEER_ARMS:
        front = peer_front(PEER_ARMS[name], workers, model_dir, folder)
    else:
        written = write_policy(policy, model_dir, folder)
        _set_profile(written, name.partition(":")[2])
        front = kvgate_front(cluster, workers, written, folder)
    with front as ready:
        yield ready


def _set_profile(policy: Path, profile: str) -> None:
    if profile:
        content = yaml.safe_load(policy.read_text(encoding="utf-8"))
        for pool in content["pools"]:
            pool["routing"] = {**pool.get("routing", {}), "profile": profile}
        policy.write_text(yaml.safe_dump(content), encoding="utf-8")


# What the arms showed


def _arm_result(turns: Sequence[Turn], settings: Comparison) -> dict[str, Any]:
    """Every round's figures; empty for an arm that never ran."""
    rounds = [_round(turn, settings) for turn in turns]
    return {
        "command": turns[0].command if turns else [],
        "rounds": rounds,
        "medians": {
            name: median(each["shown"][name] for each in rounds)
            for name in (*_FIVE, *_COST)
            if rounds
        },
    }


def _round(turn: Turn, settings: Comparison) -> dict[str, Any]:
    found = figures(turn.measured.samples, settings.budgets)
    watch = turn.measured.watch
    assert watch is not None
    held_s = found.queue_s.mean if found.queue_s.mean == found.queue_s.mean else 0.0
    shown = {
        "hit_ratio": found.hit_ratio,
        "ttft_p50_ms": 1_000 * found.ttft_s.p50,
        "ttft_p99_ms": 1_000 * found.ttft_s.p99,
        "load_deviation": imbalance(look.load for look in watch.looks),
        "output_tokens_per_s": found.output_tokens_per_s,
        "goodput_per_s": found.goodput_per_s,
        "queue_ms": 1_000 * (watch.engine_queue_s + held_s),
        "cpu_ms": 1_000 * turn.cpu_s / max(1, found.requests),
        "agents_cpu_ms": 1_000 * turn.beside_cpu_s / max(1, found.requests),
        "memory_mb": turn.peak_bytes / 1e6,
        "not_served": float(found.requests - found.served),
    }
    return {"shown": shown, "figures": as_json(found)}


_Column = tuple[str, Callable[[float], str]]

_FIVE: dict[str, _Column] = {
    "hit_ratio": ("hit ratio", "{:.3f}".format),
    "ttft_p50_ms": ("TTFT p50 ms", "{:,.0f}".format),
    "ttft_p99_ms": ("p99 ms", "{:,.0f}".format),
    "load_deviation": ("load sd", "{:.2f}".format),
    "output_tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "goodput_per_s": ("goodput/s", "{:.2f}".format),
    "queue_ms": ("queue ms", "{:,.0f}".format),
}
_COST: dict[str, _Column] = {
    "cpu_ms": ("router CPU ms a request", "{:.2f}".format),
    "agents_cpu_ms": ("agents' CPU ms", "{:.2f}".format),
    "memory_mb": ("router MB", "{:,.0f}".format),
    "not_served": ("not served", "{:.0f}".format),
}


def _print(title: str, found: dict[str, Any], settings: Comparison) -> None:
    plan = found["plan"]
    size = (
        f"{title}: {plan['requests']} requests in {plan['span_s']:.0f} s, "
        f"{settings.cluster.workers} workers, {settings.rounds} rounds (medians); one infinite "
        f"cache would hit {plan['ceiling_hit_ratio']:.3f}"
    )
    for heading, columns in ((size, _FIVE), (f"{title}: cost", _COST)):
        rows = [
            (name, *(form(arm["medians"][field]) for field, (_, form) in columns.items()))
            for name, arm in found["arms"].items()
            if arm["rounds"]
        ]
        print_table(heading, ("", *(column for column, _ in columns.values())), rows)
