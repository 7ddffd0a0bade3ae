"""``Source``: a trace file or a workload, and how much of it at which pace."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.workloads.catalog import workload
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.traces import cut, read_trace

TRACE_SUFFIXES = (".jsonl", ".csv")


class Source(msgspec.Struct, frozen=True):
    """Where requests come from. A name with a trace's suffix is a trace file.

    ``rate_per_s`` is a workload's; ``speedup``, ``skip``, ``limit``, ``spread_s`` and
    ``max_prompt_tokens`` are a trace's.
    """

    name: str
    seed: int = 1
    duration_s: float | None = None
    rate_per_s: float | None = None
    speedup: float = 1.0
    skip: int = 0
    limit: int | None = None
    spread_s: float = 0.0
    max_prompt_tokens: int | None = None

    @property
    def title(self) -> str:
        """Short name for tables."""
        return Path(self.name).stem

    @property
    def is_trace(self) -> bool:
        """Whether it is a trace file."""
        return self.name.endswith(TRACE_SUFFIXES)

    def requests(self) -> list[Planned]:
        """All requests in order of time.

        Raises:
            PlanError: there is no such file or kind, or it is wrong.
        """
        if not self.is_trace:
            made = workload(
                self.name, seed=self.seed, rate_per_s=self.rate_per_s, duration_s=self.duration_s
            )
            return made.requests()
        plan = cut(
            read_trace(Path(self.name), spread_s=self.spread_s, seed=self.seed),
            skip=self.skip,
            limit=self.limit,
            speedup=self.speedup,
            max_prompt_tokens=self.max_prompt_tokens,
        )
        if self.duration_s is None:
            return plan
        return [request for request in plan if request.at_s < self.duration_s]
