"""How the core's cost grows with workers and with requests that wait.

Each size has a process of its own, so that memory is its own. The exponent is the slope of a
line through the logarithms of size and cost: 1 is linear, 0 is no growth.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from benchmarks.cluster import Cluster
from benchmarks.report import percentile, print_table
from benchmarks.simulation.cluster import VirtualCluster
from benchmarks.simulation.policy import keyless_policy
from benchmarks.workloads.plan import Planned, Segment
from extproc.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")

_COLLECT_AFTER = (100_000, 50, 100)
"""Allocations; a simulation's objects live long, looking at them costs a fifth of its time."""
_QUEUE_WORKERS = 64
_PROBES = 500
_PROBES_AT_S = 1.0
_PROMPT_TOKENS, _ANSWER_TOKENS = 200, 400
_QUEUE_TIME_S = 15.0
"""Nothing ends before the probes have arrived; what waits longer than this is refused."""


def apart(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of a function, called in a new process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=collect_rarely) as pool:
        return pool.submit(function, *args, **kwargs).result()


def collect_rarely() -> None:
    """Look for garbage in cycles now and then only."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def memory_bytes(field: str) -> int:
    """``VmRSS``, this process's memory, or ``VmHWM``, the most that it was."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in status if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1_024


def cpu_spread(times_ms: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and mean."""
    return {
        "p50": percentile(times_ms, 0.5),
        "p99": percentile(times_ms, 0.99),
        "mean": statistics.fmean(times_ms) if times_ms else float("nan"),
    }


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of log cost over log size by least squares; NaN with fewer than two points."""
    points = [
        (math.log(size), math.log(cost))
        for size, cost in zip(sizes, costs, strict=True)
        if size > 0 and cost > 0
    ]
    if len(points) < 2:
        return float("nan")
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def queue_cost(policy_file: Path, settings: Cluster, queued: int) -> dict[str, Any]:
    """CPU of arrivals and of ends while so many requests wait for 64 full workers.

    With 0 waiting there is room, and arrivals run at once. Memory is that of the waiting
    requests, the simulation's own note of each included.
    """
    cluster = msgspec.structs.replace(settings, workers=_QUEUE_WORKERS)
    virtual = VirtualCluster(_patient(keyless_policy(policy_file), queued), cluster, hop_s=0.0)
    slots = cluster.workers * cluster.max_num_seqs
    fill = slots + queued if queued else slots - _PROBES
    burst = [_request(number, 0.0) for number in range(fill)]
    probes = [_request(fill + n, _PROBES_AT_S + n / 1_000) for n in range(_PROBES)]
    seen: list[int] = []
    before = memory_bytes("VmRSS")
    virtual.clock.at(_PROBES_AT_S, lambda: seen.append(memory_bytes("VmRSS")))
    virtual.run([*burst, *probes])
    return {
        "waiting_most": virtual.waiting_most,
        "decision_cpu_ms": cpu_spread(virtual.decision_ms[-_PROBES:]),
        "end_cpu_ms": cpu_spread(virtual.end_ms[:slots]),
        "memory_mb": (seen[0] - before) / 1e6,
    }


def _request(number: int, at_s: float) -> Planned:
    return Planned(at_s, (Segment(number, _PROMPT_TOKENS),), _ANSWER_TOKENS)


def _patient(policy: Policy, queued: int) -> Policy:
    """The same policy with a queue that is long enough."""
    [pool] = policy.pools
    longer = {"max_queue": queued + _PROBES, "max_queue_time_s": _QUEUE_TIME_S}
    admission = pool.admission.model_copy(update=longer)
    return policy.model_copy(update={"pools": (pool.model_copy(update={"admission": admission}),)})


# Showing


Cost = tuple[str, str, Callable[[dict[str, Any]], float]]
"""Name in the JSON, title of the column, and how it is found."""

COSTS: tuple[Cost, ...] = (
    ("decision_p50", "decision CPU ms p50", lambda found: found["decision_cpu_ms"]["p50"]),
    ("decision_p99", "p99", lambda found: found["decision_cpu_ms"]["p99"]),
    ("end_p50", "end CPU ms p50", lambda found: found["end_cpu_ms"]["p50"]),
    ("end_p99", "p99", lambda found: found["end_cpu_ms"]["p99"]),
    ("memory", "memory MB", lambda found: found["memory_mb"]),
)


def show_growth(what: str, found: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Print costs by size, and return the exponent of each."""
    values = {name: [tell(each) for each in found.values()] for name, _, tell in COSTS}
    exponents = {name: exponent(list(found), column) for name, column in values.items()}
    rows = [
        (f"{size:,} {what}", *(f"{column[row]:.2f}" for column in values.values()))
        for row, size in enumerate(found)
    ]
    rows.append(("exponent", *map(_shown, exponents.values())))
    print_table(f"growth with {what}", ("", *(title for _, title, _ in COSTS)), rows)
    return exponents


def _shown(value: float) -> str:
    return f"{value:.2f}" if value == value else "-"
