"""Where kvgate is ahead of every other router, where it is not, and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from benchmarks.report_page.fields import Json, find, number, value

KVGATE = "kvgate"
COMPARISON = "compare"
"""The source that has arms."""


class Figure(msgspec.Struct, frozen=True):
    """One of the figures that arms compete in."""

    field: str
    heading: str
    form: str
    more_is_better: bool = False


FIVE = (
    Figure("hit_ratio", "hit ratio", "{:.3f}", more_is_better=True),
    Figure("ttft_p50_ms", "TTFT p50 ms", "{:,.0f}"),
    Figure("ttft_p99_ms", "TTFT p99 ms", "{:,.0f}"),
    Figure("load_deviation", "load sd", "{:.2f}"),
    Figure("output_tokens_per_s", "tokens/s", "{:,.0f}", more_is_better=True),
    Figure("goodput_per_s", "goodput/s", "{:.2f}", more_is_better=True),
    Figure("queue_ms", "queue ms", "{:,.0f}"),
)
"""The five figures; throughput and goodput are one of them, and so are both TTFTs."""
CLAIMED = tuple(
    each for each in FIVE if each.field in ("ttft_p50_ms", "ttft_p99_ms", "goodput_per_s")
)
"""Those that kvgate claims to lead in, on every workload at once."""
_EXPLAIN = tuple(each for each in FIVE if each.field in ("hit_ratio", "load_deviation", "queue_ms"))
"""What latency and goodput follow from."""


class Contest(msgspec.Struct, frozen=True):
    """One figure on one workload: kvgate and the best other arm (medians of rounds)."""

    workload: str
    figure: Figure
    ours: float
    best: str
    theirs: float
    why: str
    """Of kvgate being behind; empty if it is not."""

    @property
    def ahead(self) -> bool:
        """Whether kvgate is at least as good."""
        return _not_worse(self.figure, self.ours, self.theirs)


def contests(
    results: Mapping[str, Json], figures: tuple[Figure, ...] = CLAIMED
) -> Iterator[Contest]:
    """Every figure on every workload that kvgate and another arm ran."""
    for (workload,), arms in find(results.get(COMPARISON, {}), "workloads[].arms"):
        for figure in figures:
            yield from _contest(workload, arms, figure)


def _contest(workload: str, arms: Json, figure: Figure) -> Iterator[Contest]:
    field = f"medians.{figure.field}"
    ours = number(arms.get(KVGATE), field)
    others = {
        name: told
        for name, arm in arms.items()
        if name.partition(":")[0] != KVGATE and (told := number(arm, field)) is not None
    }
    if ours is None or not others:
        return
    best = (max if figure.more_is_better else min)(others, key=lambda name: others[name])
    behind = not _not_worse(figure, ours, others[best])
    why = _why(arms[KVGATE], arms[best], figure) if behind else ""
    yield Contest(workload, figure, ours, best, others[best], why)


def _not_worse(figure: Figure, ours: float, theirs: float) -> bool:
    return ours >= theirs if figure.more_is_better else ours <= theirs


def _why(ours: Json, theirs: Json, figure: Figure) -> str:
    """What of kvgate's run was worse too, and whether the rounds tell the arms apart."""
    worse = [
        f"{each.heading} {each.form.format(mine)} against {each.form.format(other)}"
        for each in _EXPLAIN
        if (mine := number(ours, f"medians.{each.field}")) is not None
        and (other := number(theirs, f"medians.{each.field}")) is not None
        and not _not_worse(each, mine, other)
    ]
    if not worse:
        worse = ["hit ratio, balance and queue are no worse; the rest is the gateway's own time"]
    if left := number(theirs, "medians.not_served"):
        worse.append(f"the other arm left {left:.0f} requests without an answer")
    return "; ".join([*worse, _noise(ours, theirs, figure)])


def _noise(ours: Json, theirs: Json, figure: Figure) -> str:
    mine, others = (
        [told for _, told in find(arm, f"rounds[].shown.{figure.field}") if told is not None]
        for arm in (ours, theirs)
    )
    if min(len(mine), len(others)) < 2:
        return "one round only: may be noise"
    if min(mine) <= max(others) and min(others) <= max(mine):
        return "the rounds of both overlap"
    return "in every round"


def configurations(result: Json) -> Iterator[tuple[str, str, list[str]]]:
    """Name, version (empty: this checkout's) and command line of every arm, once."""
    versions = value(result, "versions") or {}
    told: set[str] = set()
    for (_, name), command in find(result, "workloads[].arms[].command"):
        if command and name not in told:
            told.add(name)
            yield name, versions.get(name.partition(":")[0], ""), command
