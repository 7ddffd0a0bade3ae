"""What a run's samples say: latency, hit ratio, goodput, refusals, balance."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from benchmarks.load.sample import Budgets, Sample
from benchmarks.report import percentile

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles in one unit; all NaN without values."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


class Figures(msgspec.Struct, frozen=True):
    """One run or one part of it. Rates are over ``seconds``, from the first request due to the
    last answer's end; latencies are of whole answers."""

    requests: int
    served: int
    good: int
    """Answers within the budgets."""
    seconds: float
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    lag_s: Spread
    """How late the generator was."""
    queue_s: Spread
    """How long the gateway held requests, where it says so."""
    hit_ratio: float
    """Prompt tokens that engines took from their caches, of all that they answered."""
    prompt_tokens: int
    output_tokens: int
    off_plan: int
    """Answers whose prompt had not the planned number of tokens."""
    outcomes: dict[str, int]
    """By status and code of the last try."""
    refused_tries: int
    told_to_wait: int
    """Refused tries that announced a wait."""
    returned: int
    """Requests that waited as told and came back."""
    returned_served: int
    workers: dict[str, int]
    """Answers by worker, where the gateway says so."""

    @property
    def requests_per_s(self) -> float:
        """Answers a second."""
        return self.served / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def goodput_per_s(self) -> float:
        """Answers within the budgets, a second."""
        return self.good / self.seconds


def figures(samples: Sequence[Sample], budgets: Budgets, seconds: float | None = None) -> Figures:
    """Figures of these samples; ``seconds`` where they are part of a longer run."""
    served = [sample for sample in samples if sample.served]
    counted = [sample for sample in served if sample.cached_tokens is not None]
    refusals = [(bool(each.refused), _refused(each)) for each in samples]
    returned = [sample for sample in samples if sample.refused]
    cached = sum(sample.cached_tokens or 0 for sample in counted)
    prompts = sum(sample.prompt_tokens or 0 for sample in counted)
    return Figures(
        requests=len(samples),
        served=len(served),
        good=sum(budgets.met(sample) for sample in samples),
        seconds=run_seconds(samples) if seconds is None else seconds,
        ttft_s=spread(sample.ttft_s for sample in served),
        tpot_s=spread(sample.tpot_s for sample in served),
        e2e_s=spread(sample.e2e_s for sample in served),
        lag_s=spread(sample.lag_s for sample in samples),
        queue_s=spread(sample.queue_s for sample in served),
        hit_ratio=cached / prompts if prompts else float("nan"),
        prompt_tokens=sum(sample.prompt_tokens or 0 for sample in served),
        output_tokens=sum(sample.output_tokens for sample in served),
        off_plan=sum(
            sample.prompt_tokens not in (None, sample.planned_tokens) for sample in served
        ),
        outcomes=dict(Counter(map(outcome, samples)).most_common()),
        refused_tries=sum(len(tries) for _, tries in refusals),
        told_to_wait=sum(wait is not None for _, tries in refusals for wait in tries),
        returned=len(returned),
        returned_served=sum(sample.served for sample in returned),
        workers=dict(sorted(Counter(s.worker for s in served if s.worker).items())),
    )


def run_seconds(samples: Iterable[Sample]) -> float:
    """From the first request due to the end of the last answer."""
    times = [(sample.due_s, sample.sent_s + sample.e2e_s) for sample in samples]
    if not times:
        return float("nan")
    return max(end for _, end in times) - min(due for due, _ in times)


def outcome(sample: Sample) -> str:
    """``200`` for a whole answer, else status and code."""
    return f"{sample.status} {sample.code}".strip()


def spread(values: Iterable[float | None]) -> Spread:
    """Mean and percentiles of what is not None."""
    known = [value for value in values if value is not None]
    if not known:
        nan = float("nan")
        return Spread(nan, nan, nan, nan, nan)
    ranks = {name: percentile(known, share) for name, share in SHARES.items()}
    return Spread(mean=statistics.fmean(known), most=max(known), **ranks)


def _refused(sample: Sample) -> list[float | None]:
    """Waits announced by each refused try, the last one included."""
    waits = [each.announced_s for each in sample.refused]
    if sample.status in (429, 503):
        waits.append(sample.announced_s)
    return waits


# Over time

Series = tuple[list[float], list[float]]
"""Times in seconds from the start, and values."""


def hit_ratio_over_time(samples: Sequence[Sample], bin_s: float) -> Series:
    """Hit ratio of the answers that began in each bin; bins without any are left out."""
    cached: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    for sample in samples:
        if sample.served and sample.prompt_tokens and sample.cached_tokens is not None:
            cached[int(sample.sent_s / bin_s)] += sample.cached_tokens
            prompts[int(sample.sent_s / bin_s)] += sample.prompt_tokens
    bins = sorted(prompts)
    return [(each + 0.5) * bin_s for each in bins], [cached[b] / prompts[b] for b in bins]


def in_flight_over_time(samples: Sequence[Sample], step_s: float) -> dict[str, Series]:
    """Requests in flight on each worker that a gateway names, at every step."""
    changes: dict[str, Counter[int]] = {}
    for sample in samples:
        if sample.worker and sample.e2e_s:
            of_worker = changes.setdefault(sample.worker, Counter())
            of_worker[int(sample.sent_s / step_s)] += 1
            of_worker[int((sample.sent_s + sample.e2e_s) / step_s) + 1] -= 1
    last = max((max(steps) for steps in changes.values()), default=0)
    series = {}
    for worker, steps in sorted(changes.items()):
        level, levels = 0, []
        for step in range(last + 1):
            level += steps[step]
            levels.append(float(level))
        series[worker] = ([step * step_s for step in range(last + 1)], levels)
    return series


def imbalance(loads: Iterable[Sequence[float]]) -> float:
    """Standard deviation over workers of their load, mean over time."""
    return statistics.fmean([statistics.pstdev(load) for load in loads if len(load)] or [0.0])


def as_json(found: Figures) -> dict[str, Any]:
    """All fields, with the rates."""
    fields: dict[str, Any] = msgspec.to_builtins(found)
    rates = ("requests_per_s", "output_tokens_per_s", "goodput_per_s")
    return {**fields, **{name: getattr(found, name) for name in rates}}
