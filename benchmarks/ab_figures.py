"""What two arms' samples say: figures, their ratio, how sure it is, and what breaks a criterion.

Both arms got the same plan, so request n of a round is the same request in both. Intervals are
a paired bootstrap in two stages: rounds are drawn with replacement, and in each of them blocks of
neighbouring requests (Kuensch, 1989), the same ones for both arms. Neighbours share the state of
machine and caches, and a stall hits one run of a round and not the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.load.sample import Budgets, Sample

Column = NDArray[np.float64]
Columns = Mapping[str, Column]
"""One value a request, in order of rounds and plan; NaN where there is none."""
Figure = Callable[[Columns], float]

RESAMPLES = 1_000
BLOCKS = 20
"""Of a round."""
_LEVEL = (0.025, 0.975)
_REFUSED_FLOOR = 0.01
"""A smaller refused share counts as this one: one refusal more than none is no ratio."""


class Interval(msgspec.Struct, frozen=True):
    """A value and its 95% interval."""

    value: float
    low: float
    high: float


class Compared(msgspec.Struct, frozen=True):
    """One figure of both arms; ``ratio`` is b over a."""

    a: float
    b: float
    ratio: Interval


class Criteria(msgspec.Struct, frozen=True):
    """What the new policy must keep to; ratios are b over a."""

    max_ttft_p99_ratio: float = 1.1
    min_goodput_ratio: float = 0.95
    max_error_rate: float = 0.01
    max_refused_ratio: float = 1.2


class Verdict(msgspec.Struct, frozen=True):
    """A criterion and what was found. Without a value it is broken."""

    name: str
    found: Interval
    limit: float
    at_least: bool = False

    @property
    def broken(self) -> bool:
        """Whether the value itself is beyond the limit."""
        value = self.found.value
        return not (value >= self.limit if self.at_least else value <= self.limit)

    @property
    def sure(self) -> bool:
        """Whether the whole interval is on the value's side of the limit."""
        return not self.found.low <= self.limit <= self.found.high


def columns(turns: Sequence[Sequence[Sample]], budgets: Budgets) -> dict[str, Column]:
    """Columns of one arm's turns, each in order of the plan."""
    samples = [sample for turn in turns for sample in turn]
    nan = float("nan")

    def of(tell: Callable[[Sample], float | None]) -> Column:
        told = (tell(sample) for sample in samples)
        return np.array([nan if value is None else float(value) for value in told])

    return {
        "ttft_ms": 1_000 * of(lambda s: s.ttft_s if s.served else None),
        "tpot_ms": 1_000 * of(lambda s: s.tpot_s),
        "e2e_ms": 1_000 * of(lambda s: s.e2e_s if s.served else None),
        "late_ms": 1_000 * of(lambda s: s.lag_s),
        "good": of(budgets.met),
        "refused": of(refused),
        "error": of(lambda s: not s.served and not refused(s)),
        "cached": of(lambda s: s.cached_tokens if s.served else None),
        "prompt": of(lambda s: s.prompt_tokens if s.served else None),
    }


def refused(sample: Sample) -> bool:
    """Whether the last try was turned away in order: 429, or 503 with a wait."""
    return sample.status == 429 or (sample.status == 503 and sample.announced_s is not None)


def _rank(column: str, share: float) -> Figure:
    """Nearest-rank percentile."""

    def tell(of: Columns) -> float:
        known = of[column][~np.isnan(of[column])]
        if not known.size:
            return float("nan")
        rank = min(known.size - 1, int(share * known.size))
        return float(np.partition(known, rank)[rank])

    return tell


def _share(column: str) -> Figure:
    return lambda of: float(of[column].mean())


def _hit_ratio(of: Columns) -> float:
    counted = ~np.isnan(of["cached"]) & ~np.isnan(of["prompt"])
    prompts = of["prompt"][counted].sum()
    return float(of["cached"][counted].sum() / prompts) if prompts else float("nan")


TTFT_P50, TTFT_P99, GOODPUT = "TTFT p50 ms", "TTFT p99 ms", "within the budgets"
ERRORS, REFUSED, LATE = "errors", "refused", "generator late p99 ms"
FIGURES: dict[str, Figure] = {
    TTFT_P50: _rank("ttft_ms", 0.5),
    TTFT_P99: _rank("ttft_ms", 0.99),
    "TPOT p50 ms": _rank("tpot_ms", 0.5),
    "TPOT p99 ms": _rank("tpot_ms", 0.99),
    "end to end p50 ms": _rank("e2e_ms", 0.5),
    GOODPUT: _share("good"),
    "token hit ratio": _hit_ratio,
    ERRORS: _share("error"),
    REFUSED: _share("refused"),
    LATE: _rank("late_ms", 0.99),
}
"""Latencies are of whole answers, shares of all requests."""


Told = Mapping[str, float]
"""Every figure of one arm."""


def compare(
    a: Columns, b: Columns, rounds: int, criteria: Criteria, seed: int
) -> tuple[dict[str, Compared], list[Verdict]]:
    """Every figure of both arms, and every criterion."""
    whole = _tell(a), _tell(b)
    drawn = [
        (_tell(_taken(a, draw)), _tell(_taken(b, draw)))
        for draw in _draws(len(a["good"]), rounds, seed)
    ]

    def interval(of: Callable[[Told, Told], float]) -> Interval:
        known = [value for pair in drawn if (value := of(*pair)) == value]
        low, high = np.quantile(known, _LEVEL) if known else (float("nan"), float("nan"))
        return Interval(of(*whole), float(low), float(high))

    compared = {
        name: Compared(whole[0][name], whole[1][name], interval(_ratio(name))) for name in FIGURES
    }
    latency, goodput = compared[TTFT_P99].ratio, compared[GOODPUT].ratio
    errors = interval(lambda _, b: b[ERRORS])
    refusals = interval(_ratio(REFUSED, _REFUSED_FLOOR))
    return compared, [
        Verdict(f"{TTFT_P99}, b over a", latency, criteria.max_ttft_p99_ratio),
        Verdict(f"{GOODPUT}, b over a", goodput, criteria.min_goodput_ratio, at_least=True),
        Verdict(f"{ERRORS} of b", errors, criteria.max_error_rate),
        Verdict(f"{REFUSED}, b over a", refusals, criteria.max_refused_ratio),
    ]


def _tell(of: Columns) -> Told:
    return {name: tell(of) for name, tell in FIGURES.items()}


def _taken(of: Columns, draw: NDArray[np.intp]) -> Columns:
    return {name: column[draw] for name, column in of.items()}


def _ratio(name: str, floor: float = 0.0) -> Callable[[Told, Told], float]:
    def ratio(a: Told, b: Told) -> float:
        # Written so that NaN stays NaN: max() would take the floor for it.
        of_a, of_b = (floor if of[name] < floor else of[name] for of in (a, b))
        return of_b / of_a if of_a else float("nan")

    return ratio


def _draws(count: int, rounds: int, seed: int) -> list[NDArray[np.intp]]:
    """Indices of each resample: rounds with replacement, and of each its blocks so."""
    blocks = [
        np.array_split(turn, min(BLOCKS, len(turn)))
        for turn in np.split(np.arange(count, dtype=np.intp), rounds)
    ]
    random = np.random.default_rng(seed)
    return [
        np.concatenate(
            [
                blocks[turn][number]
                for turn in random.integers(rounds, size=rounds)
                for number in random.integers(len(blocks[turn]), size=len(blocks[turn]))
            ]
        )
        for _ in range(RESAMPLES)
    ]
