from __future__ import annotations

import pytest

from workers.agent.engine_metrics import EngineMetrics, Total
from workers.agent.gpu import GpuUse
from workers.agent.signals import RequestSums, SignalMeter, Signals

BEFORE = EngineMetrics(
    waiting_for_capacity=3.0,
    preemptions=10.0,
    prefix_queries=1_000.0,
    prefix_hits=500.0,
    prompt_tokens=1_000.0,
    generation_tokens=200.0,
    ttft=Total(10.0, 20.0),
    tpot=Total(5.0, 500.0),
    busy=0.4,
)
AFTER = EngineMetrics(
    waiting_for_capacity=1.0,
    preemptions=14.0,
    prefix_queries=1_400.0,
    prefix_hits=800.0,
    prompt_tokens=1_400.0,
    generation_tokens=300.0,
    ttft=Total(13.0, 26.0),
    tpot=Total(7.0, 600.0),
    busy=0.6,
)


def second(before: EngineMetrics, after: EngineMetrics, seconds: float = 2.0) -> Signals:
    meter = SignalMeter()
    meter.measure(before, 100.0)
    return meter.measure(after, 100.0 + seconds)


def test_they_are_rates_and_means_of_the_time_between_two_pages() -> None:
    assert second(BEFORE, AFTER) == Signals(
        ttft_s=0.5,
        tpot_s=0.02,
        prompt_tokens_per_s=200.0,
        generation_tokens_per_s=50.0,
        preemptions_per_s=2.0,
        waiting_for_capacity=1.0,
        cache_hit_ratio=0.75,
        busy_ratio=0.6,
    )


def test_the_first_page_tells_only_what_is_so_now() -> None:
    assert SignalMeter().measure(BEFORE, 1.0) == Signals(waiting_for_capacity=3.0, busy_ratio=0.4)


def test_counters_that_go_back_are_unknown_for_one_interval() -> None:
    meter = SignalMeter()
    meter.measure(AFTER, 0.0)
    assert meter.measure(BEFORE, 1.0) == Signals(waiting_for_capacity=3.0, busy_ratio=0.4)
    assert meter.measure(AFTER, 2.0).generation_tokens_per_s == 100.0


def test_a_mean_over_nothing_is_unknown_and_a_rate_of_nothing_is_0() -> None:
    signals = second(BEFORE, BEFORE)
    assert (signals.ttft_s, signals.tpot_s, signals.cache_hit_ratio) == (None, None, None)
    assert (signals.prompt_tokens_per_s, signals.preemptions_per_s) == (0.0, 0.0)


def test_what_a_page_lacks_is_unknown() -> None:
    assert second(EngineMetrics(), AFTER).tpot_s is None
    assert second(BEFORE, EngineMetrics()) == Signals()


def test_two_pages_at_once_give_no_rate() -> None:
    assert second(BEFORE, AFTER, seconds=0.0).prompt_tokens_per_s is None


def test_the_middlewares_ttft_goes_before_the_engines() -> None:
    meter = SignalMeter()
    meter.measure(BEFORE, 0.0, RequestSums(Total(1.0, 4), 1.0))
    signals = meter.measure(AFTER, 2.0, RequestSums(Total(1.5, 6), 5.0))
    assert (signals.ttft_s, signals.errors_per_s) == (0.25, 2.0)
    assert meter.measure(AFTER, 4.0).errors_per_s is None


def test_without_a_first_chunk_in_the_interval_the_engines_is_taken() -> None:
    meter = SignalMeter()
    meter.measure(BEFORE, 0.0, RequestSums(Total(1.0, 4), 0.0))
    assert meter.measure(AFTER, 2.0, RequestSums(Total(1.0, 4), 0.0)).ttft_s == 0.5


@pytest.mark.parametrize(
    ("gpu", "busy", "memory"),
    [(None, 0.4, None), (GpuUse(0.9, 0.5), 0.9, 0.5), (GpuUse(None, 0.5), None, 0.5)],
)
def test_a_gpu_tells_how_busy_it_is(
    gpu: GpuUse | None, busy: float | None, memory: float | None
) -> None:
    signals = SignalMeter().measure(BEFORE, 0.0, gpu=gpu)
    assert (signals.busy_ratio, signals.memory_ratio) == (busy, memory)
