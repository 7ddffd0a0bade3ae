from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.load.figures import (
    as_json,
    figures,
    hit_ratio_over_time,
    imbalance,
    in_flight_over_time,
)
from benchmarks.load.sample import Budgets, Sample, Try


def sample(number: int = 0, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "due_s": float(number),
        "lag_s": 0.001,
        "sent_s": float(number),
        "planned_tokens": 100,
        "tenant": "",
        "lane": "",
        "status": 200,
        "ttft_s": 0.2,
        "e2e_s": 1.1,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "output_tokens": 10,
        "worker": "a",
    }
    return Sample(number, **{**fields, **changes})


def test_rates_are_over_the_time_from_first_due_to_last_end() -> None:
    found = figures([sample(0), sample(8, e2e_s=2.0)], Budgets())
    assert found.seconds == 10.0
    assert (found.requests_per_s, found.output_tokens_per_s) == (0.2, 2.0)


def test_hits_are_counted_in_tokens() -> None:
    few = sample(0, prompt_tokens=1_000, cached_tokens=0)
    silent = sample(1, cached_tokens=None)
    assert figures([few, sample(2), silent], Budgets()).hit_ratio == 60 / 1_100


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"ttft_s": 0.31}, False),
        ({"e2e_s": 2.1}, False),
        ({"output_tokens": 1, "e2e_s": 0.2}, True),
        ({"code": "broken"}, False),
        ({"status": 429, "ttft_s": None}, False),
    ],
    ids=["within", "late", "slow", "one token", "broken", "refused"],
)
def test_goodput_is_what_keeps_both_budgets(changes: dict[str, Any], good: bool) -> None:
    assert figures([sample(**changes)], Budgets(ttft_s=0.3, tpot_s=0.15)).good == good


def test_refusals_are_counted_by_try_and_by_request() -> None:
    back = sample(0, refused=[Try(429, "queue_full", 0.1, 2.0), Try(429, "queue_full", 3.0)])
    gone = sample(1, status=503, code="no_ready_worker", ttft_s=None, announced_s=1.0)
    found = figures([back, gone, sample(2)], Budgets())
    assert found.outcomes == {"200": 2, "503 no_ready_worker": 1}
    assert (found.refused_tries, found.told_to_wait) == (3, 2)
    assert (found.returned, found.returned_served) == (1, 1)


def test_prompts_of_another_length_are_off_plan() -> None:
    odd = [sample(0, prompt_tokens=101), sample(1), sample(2, prompt_tokens=None)]
    assert figures(odd, Budgets()).off_plan == 1


def test_a_run_without_answers_has_no_latency() -> None:
    found = as_json(figures([sample(status=0, code="unreachable", ttft_s=None)], Budgets()))
    assert math.isnan(found["ttft_s"]["p50"])
    assert math.isnan(found["hit_ratio"])
    assert found["goodput_per_s"] == 0.0


def test_hit_ratio_over_time_has_the_bins_with_answers() -> None:
    samples = [sample(0), sample(1, cached_tokens=20), sample(5, cached_tokens=0)]
    assert hit_ratio_over_time(samples, 2.0) == ([1.0, 5.0], [0.4, 0.0])


def test_in_flight_over_time_counts_each_worker() -> None:
    samples = [sample(0, e2e_s=2.0), sample(1, e2e_s=0.5), sample(3, e2e_s=0.5, worker="b")]
    series = in_flight_over_time(samples, 1.0)
    assert series["a"] == ([0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 1.0, 0.0, 0.0])
    assert series["b"][1] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_imbalance_is_the_mean_deviation_between_workers() -> None:
    assert imbalance([[4.0, 4.0], [0.0, 2.0], []]) == 0.5
    assert imbalance([]) == 0.0
