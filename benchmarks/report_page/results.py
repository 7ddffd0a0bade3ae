"""What the benchmarks left in the results folder."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.report_page.fields import Json, value


class Source(msgspec.Struct, frozen=True):
    """One benchmark's JSON, relative to the results folder, and what makes it."""

    name: str
    file: str
    question: str

    @property
    def target(self) -> str:
        """Of make."""
        return f"make bench-{self.name}"


SOURCES = (
    Source("compare", "compare/compare.json", "Which router is best on the same arrivals?"),
    Source(
        "load-check",
        "load-check/load-check.json",
        "Does the load generator measure what aiperf measures?",
    ),
    Source("overload", "overload/overload.json", "Three times the sustainable rate."),
    Source(
        "overload-sweep",
        "overload-sweep/overload-sweep.json",
        "One to five times the sustainable rate of the Azure code trace.",
    ),
    Source("failures", "failures/failures.json", "Workers die, freeze, restart and join."),
    Source("simulate", "simulate/simulate.json", "Hundreds of workers in virtual time."),
    Source("validate", "validate/simulate.json", "How far is virtual time from wall-clock time?"),
    Source("overhead", "overhead.json", "What does a request cost, against Envoy alone?"),
    Source("hot-path", "hot_path.json", "Which step of a decision takes how long?"),
    Source("routing-cost", "routing_cost.json", "What does choosing a worker cost?"),
    Source("queue-costs", "queue_costs.json", "What does a waiting request cost?"),
    Source("digest-build", "digest_build.json", "What does an agent cost?"),
    Source("middleware", "middleware.json", "What does the engine's middleware cost?"),
    Source("routing-sweep", "routing_sweep.json", "Profiles on the traces, without a clock."),
)
"""In the order of the report."""


class Found(msgspec.Struct, frozen=True):
    """A source with its JSON, or why there is none."""

    source: Source
    result: Json
    missing: str = ""
    date: str = ""
    """Day and time (UTC) of the measurement; of the file where the JSON does not say."""


def read(folder: Path) -> dict[str, Found]:
    """Every source by its name; a missing or broken file is no error."""
    return {source.name: _read(folder, source) for source in SOURCES}


def _read(folder: Path, source: Source) -> Found:
    path = folder / source.file
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        date = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    except FileNotFoundError:
        return Found(source, {}, f"not measured: run `{source.target}`")
    except (OSError, ValueError):
        return Found(source, {}, f"cannot be read: run `{source.target}` again")
    if not isinstance(result, dict):
        return Found(source, {}, f"is no result: run `{source.target}` again")
    return Found(source, result, date=str(value(result, "machine.date") or date))
