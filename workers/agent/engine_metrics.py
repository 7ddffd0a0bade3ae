"""``EngineMetrics``: an engine's /metrics page, reduced to what routing needs.

What a page does not have, or has as NaN or infinity, is None and never 0: an unknown
worker must not look idle (case LD1). Several engines behind one server are summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workers.agent.metric_names import ENGINES, PROCESS_START, MetricNames, Names
from workers.agent.metrics_page import Sample, Samples, read_page

_WANTED = frozenset(PROCESS_START).union(*(names.wanted() for names in ENGINES))


@dataclass(frozen=True, slots=True)
class Total:
    """A histogram without its buckets."""

    sum: float
    count: float


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Numbers of one worker, all its engines (data-parallel ranks) together."""

    engine: str = ""
    """Whose names the page has; empty if nobody's."""
    running: float | None = None
    waiting: float | None = None
    waiting_for_capacity: float | None = None
    """Of the waiting, those that lack KV blocks; preemption shows here first."""
    kv_usage: float | None = None
    """Share of KV blocks held by live requests, 0 to 1, of the fullest engine: it is the
    one that preempts first, and a mean would hide it."""
    preemptions: float | None = None
    prefix_queries: float | None = None
    """Tokens looked up in the prefix cache since start."""
    prefix_hits: float | None = None
    """Tokens found there since start."""
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    finished: float | None = None
    """Requests that ended by themselves since start."""
    iterations: float | None = None
    """Steps since start."""
    ttft: Total | None = None
    tpot: Total | None = None
    busy: float | None = None
    """Share of time that the step loop computed; only the simulator tells it."""
    awake: bool | None = None
    """False if any engine sleeps."""
    kv_blocks: int | None = None
    block_size_tokens: int | None = None
    max_adapters: int | None = None
    """Adapters that fit on the engine at once."""
    process_start_time_s: float | None = None
    """Unix time; another value means another process."""

    @property
    def progress(self) -> tuple[float, ...]:
        """Numbers that grow while an engine works; empty if it tells none of them."""
        counters = (self.prompt_tokens, self.generation_tokens, self.finished, self.iterations)
        return tuple(counter for counter in counters if counter is not None)

    @property
    def busy_requests(self) -> float | None:
        """Requests on the engine, running and waiting."""
        if self.running is None or self.waiting is None:
            return None
        return self.running + self.waiting


def parse_metrics(page: bytes) -> EngineMetrics:
    """Read a page.

    Raises:
        MetricsError: too long, cut in the middle, or without a single sample.
    """
    samples = read_page(page, _WANTED)
    names = _engine_of(samples)
    start = _total(samples, PROCESS_START)
    if names is None:
        return EngineMetrics(process_start_time_s=start)
    config = _first(samples, names.cache_config)
    return EngineMetrics(
        engine=names.engine,
        running=_total(samples, names.running),
        waiting=_total(samples, names.waiting),
        waiting_for_capacity=_waiting_for_capacity(samples, names),
        kv_usage=_share(samples, names.kv_usage),
        preemptions=_total(samples, names.preemptions),
        prefix_queries=_total(samples, names.prefix_queries),
        prefix_hits=_total(samples, names.prefix_hits),
        prompt_tokens=_total(samples, names.prompt_tokens),
        generation_tokens=_total(samples, names.generation_tokens),
        finished=_total(samples, names.finished),
        iterations=_total(samples, tuple(f"{name}_count" for name in names.iterations)),
        ttft=_histogram(samples, names.ttft),
        tpot=_histogram(samples, names.tpot),
        busy=_share(samples, names.busy),
        awake=_awake(samples, names),
        kv_blocks=_sum_of_label(config, names.blocks_labels),
        block_size_tokens=_common_label(config, names.block_size_labels),
        max_adapters=_max_adapters(samples, names),
        process_start_time_s=start,
    )


def _engine_of(samples: Samples) -> MetricNames | None:
    return next((names for names in ENGINES if names.wanted() & samples.keys()), None)


def _first(samples: Samples, names: Names) -> list[Sample]:
    return next((samples[name] for name in names if name in samples), [])


def _values(found: list[Sample]) -> list[float]:
    """Values of the samples; none at all if one of them is no finite number."""
    values = [value for _, value in found]
    return values if all(map(math.isfinite, values)) else []


def _total(samples: Samples, names: Names) -> float | None:
    values = _values(_first(samples, names))
    return sum(values) if values else None


def _share(samples: Samples, names: Names) -> float | None:
    values = _values(_first(samples, names))
    return min(1.0, max(0.0, *values)) if values else None


def _histogram(samples: Samples, names: Names) -> Total | None:
    for name in names:
        total = _total(samples, (f"{name}_sum",))
        count = _total(samples, (f"{name}_count",))
        if total is not None and count is not None:
            return Total(total, count)
    return None


def _waiting_for_capacity(samples: Samples, names: MetricNames) -> float | None:
    found = _first(samples, names.waiting_by_reason)
    values = _values([sample for sample in found if sample[0].get("reason") == "capacity"])
    return sum(values) if values else None


def _awake(samples: Samples, names: MetricNames) -> bool | None:
    states = _first(samples, names.sleep_state)
    awake = [value > 0 for labels, value in states if labels.get("sleep_state") == "awake"]
    return all(awake) if awake else None


def _max_adapters(samples: Samples, names: MetricNames) -> int | None:
    # One series for each combination of running adapters that ever was; the value is when.
    found = [sample for sample in _first(samples, names.adapters) if math.isfinite(sample[1])]
    if not found:
        return None
    newest = max(found, key=lambda sample: sample[1])[0].get("max_lora", "")
    return int(newest) if newest.isdecimal() else None


def _labels(config: list[Sample], names: Names) -> list[str]:
    return [next((labels[name] for name in names if name in labels), "") for labels, _ in config]


def _sum_of_label(config: list[Sample], names: Names) -> int | None:
    numbers = _labels(config, names)
    if not numbers or not all(number.isdecimal() for number in numbers):
        return None
    return sum(map(int, numbers))


def _common_label(config: list[Sample], names: Names) -> int | None:
    numbers = set(_labels(config, names))
    number = numbers.pop() if len(numbers) == 1 else ""
    return int(number) if number.isdecimal() else None
