"""``SignalMeter``: rates and means of the last interval, from what engines only sum up.

A counter that went back, or that one of the two pages lacks, gives no number for that
interval; so does a mean over nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.agent.engine_metrics import EngineMetrics, Total
from workers.agent.gpu import GpuUse

MIN_INTERVAL_S = 1e-3


@dataclass(frozen=True, slots=True)
class RequestSums:
    """What the middleware told of all requests since the agent's start."""

    ttft: Total
    errors: float


@dataclass(frozen=True, slots=True)
class Signals:
    """The fields of ``Signals`` in the agent API; None = unknown."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    preemptions_per_s: float | None = None
    waiting_for_capacity: float | None = None
    cache_hit_ratio: float | None = None
    busy_ratio: float | None = None
    memory_ratio: float | None = None
    errors_per_s: float | None = None


NO_SIGNALS = Signals()
_NOTHING = EngineMetrics()


class SignalMeter:
    """Compares each scrape with the one before."""

    def __init__(self) -> None:
        self._metrics = _NOTHING
        self._requests: RequestSums | None = None
        self._at_s: float | None = None

    def measure(
        self,
        metrics: EngineMetrics,
        now_s: float,
        requests: RequestSums | None = None,
        gpu: GpuUse | None = None,
    ) -> Signals:
        """Signals of the time since the last call; ``requests`` where the middleware speaks."""
        before, told = self._metrics, self._requests
        began_s = now_s if self._at_s is None else self._at_s
        self._metrics, self._requests, self._at_s = metrics, requests, now_s
        seconds = now_s - began_s
        heard = _mean(told.ttft if told else None, requests.ttft if requests else None)
        return Signals(
            ttft_s=_mean(before.ttft, metrics.ttft) if heard is None else heard,
            tpot_s=_mean(before.tpot, metrics.tpot),
            prompt_tokens_per_s=_rate(before.prompt_tokens, metrics.prompt_tokens, seconds),
            generation_tokens_per_s=_rate(
                before.generation_tokens, metrics.generation_tokens, seconds
            ),
            preemptions_per_s=_rate(before.preemptions, metrics.preemptions, seconds),
            waiting_for_capacity=metrics.waiting_for_capacity,
            cache_hit_ratio=_hit_ratio(before, metrics),
            busy_ratio=gpu.busy if gpu else metrics.busy,
            memory_ratio=gpu.memory if gpu else None,
            errors_per_s=_rate(
                told.errors if told else None, requests.errors if requests else None, seconds
            ),
        )


def _grown(before: float | None, now: float | None) -> float | None:
    if before is None or now is None or now < before:
        return None
    return now - before


def _rate(before: float | None, now: float | None, seconds: float) -> float | None:
    grown = _grown(before, now)
    return None if grown is None or seconds < MIN_INTERVAL_S else grown / seconds


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _mean(before: Total | None, now: Total | None) -> float | None:
    if before is None or now is None:
        return None
    return _ratio(_grown(before.sum, now.sum), _grown(before.count, now.count))


def _hit_ratio(before: EngineMetrics, now: EngineMetrics) -> float | None:
    hits = _grown(before.prefix_hits, now.prefix_hits)
    ratio = _ratio(hits, _grown(before.prefix_queries, now.prefix_queries))
    return None if ratio is None else min(1.0, ratio)
