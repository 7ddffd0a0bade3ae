"""Every figure that kvgate promises, the JSON field that it is read from, and whether it is kept.

Fixed targets are ``TARGETS``; those against other routers are what the best of them reached in
the same run (``leads``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from benchmarks.report_page.comparison import COMPARISON, contests
from benchmarks.report_page.fields import Json, number


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A figure at most (or at least) ``limit``.

    ``field`` is a path (:mod:`benchmarks.report_page.fields`) in the JSON of ``source``;
    ``per``, if given, is the field that it is divided by.
    """

    what: str
    source: str
    field: str
    limit: float
    unit: str = ""
    at_least: bool = False
    per: str = ""

    @property
    def read_from(self) -> str:
        """Where the figure stands, in words."""
        return f"{self.field} / {self.per}" if self.per else self.field


class Checked(msgspec.Struct, frozen=True):
    """A target and what was measured; None: it was not."""

    target: Target
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over target."""
        if self.measured is None or not self.target.limit:
            return None
        return self.measured / self.target.limit

    @property
    def verdict(self) -> str:
        """``met``, ``MISSED`` or ``not measured``."""
        if self.measured is None:
            return "not measured"
        limit = self.target.limit
        kept = self.measured >= limit if self.target.at_least else self.measured <= limit
        return "met" if kept else "MISSED"


_CHATS = "workloads[workload.name=8 KB chats, 16 connections]"
_LONG = "workloads[workload.kind=long][workload.size_bytes=400000]"
_SMALL = "workloads[workload.kind=small][workload.rate_per_s=500.0]"
_HOUR = "sizes.1000"
_NEAR_LINEAR = 1.1
_REPLAYED = "results[trace=conversation][workers=8][policy=balanced]"

TARGETS = (
    Target(
        what="Scheduler CPU above a bare processor, 8 KB chats",
        source="overhead",
        field=f"{_CHATS}.above_bare_cpu_ms.median",
        limit=0.25,
        unit="ms a request",
    ),
    Target(
        what="Scheduler CPU, whole, 400 KB growing chats",
        source="overhead",
        field=f"{_LONG}.medians.kvgate.processor_cpu_ms",
        limit=6.0,
        unit="ms a request",
    ),
    Target(
        what="Scheduler CPU at 500 requests/s of 200/100 tokens",
        source="overhead",
        field=f"{_SMALL}.medians.kvgate.processor_cores",
        limit=0.6,
        unit="cores",
    ),
    Target(
        what="Decision time P50 there",
        source="overhead",
        field=f"{_SMALL}.medians.kvgate.decision_p50_ms",
        limit=1.0,
        unit="ms",
    ),
    Target(
        what="Decision time P95 there",
        source="overhead",
        field=f"{_SMALL}.medians.kvgate.decision_p95_ms",
        limit=3.0,
        unit="ms",
    ),
    Target(
        what="Scheduler CPU, idle with 100 agents",
        source="overhead",
        field="idle[agents=100].cores",
        limit=0.1,
        unit="cores",
    ),
    Target(
        what="Requests answered of 5,000 held",
        source="overhead",
        field="held[requests=5000].ended_well",
        limit=5_000,
        at_least=True,
    ),
    Target(
        what="Match of 128 blocks on 1,024 workers",
        source="hot-path",
        field="match_128_blocks[workers=1024].index_ms.median",
        limit=0.2,
        unit="ms",
    ),
    Target(
        what="Goodput at three times the sustainable rate, with over without admission",
        source="overload",
        field="goodput_ratio",
        limit=1.5,
        at_least=True,
    ),
    Target(
        what="TTFT p99 of admitted online requests at three times the sustainable rate",
        source="overload",
        field="arms.admission on.lanes.online.ttft_s.p99",
        limit=1.0,
        unit="s",
    ),
    Target(
        what="Wall-clock time of a simulated second with 1,000 workers",
        source="simulate",
        field=f"{_HOUR}.wall_s",
        per=f"{_HOUR}.simulated_s",
        limit=0.25,
        unit="s",
    ),
    *(
        Target(
            what=f"Growth of {what} with {size}: exponent",
            source="simulate",
            field=f"growth_with_{kind}.{field}",
            limit=_NEAR_LINEAR,
        )
        for kind, size in (("workers", "workers"), ("queue", "requests waiting"))
        for field, what in (
            ("decision_p50", "decision CPU p50"),
            ("decision_p99", "decision CPU p99"),
            ("end_p50", "CPU of an end p50"),
            ("memory", "memory"),
        )
    ),
    Target(
        what="Token hit ratio, Mooncake conversation, 8 workers (no clock)",
        source="routing-sweep",
        field=f"{_REPLAYED}.hit_ratio",
        limit=0.25,
        at_least=True,
    ),
    Target(
        what="Max/mean work there",
        source="routing-sweep",
        field=f"{_REPLAYED}.max_mean_work",
        limit=1.05,
    ),
)
"""Of the design and of the benchmarks' own promises, fixed before measuring."""


def check(results: Mapping[str, Json]) -> list[Checked]:
    """Every target with what the results say; ``results`` by source."""
    return [
        Checked(target, _measured(target, results.get(target.source, {})))
        for target in (*TARGETS, *leads(results))
    ]


def leads(results: Mapping[str, Json]) -> Iterator[Target]:
    """At least as good as the best other arm, in each figure that kvgate claims."""
    for each in contests(results):
        yield Target(
            what=f"{each.figure.heading} on {each.workload}, against {each.best}",
            source=COMPARISON,
            field=f"workloads.{each.workload}.arms.kvgate.medians.{each.figure.field}",
            limit=each.theirs,
            at_least=each.figure.more_is_better,
        )


def _measured(target: Target, result: Json) -> float | None:
    found = number(result, target.field)
    if found is None or not target.per:
        return found
    per = number(result, target.per)
    return found / per if per else None
