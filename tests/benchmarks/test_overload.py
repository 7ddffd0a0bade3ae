"""A tiny overload on the whole system, and what its figures are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster
from benchmarks.load.sample import Sample, Try
from benchmarks.overload import (
    OFF,
    ON,
    Overload,
    calibrate,
    middle_rate,
    patient_clients,
    run,
    told_against_seen,
)
from benchmarks.workloads.shapes import Spread

TINY = Overload(
    seconds=3.0,
    factor=3.0,
    calibration_rounds=2,
    warm_rounds=1,
    tries=4,
    patient_every=2,
    cluster=Cluster(workers=2, max_num_seqs=2, timing="rtx-pro-6000"),
    prompt_tokens=Spread(100, 200, 400),
    answer_tokens=Spread(20, 40, 60),
    tenants=4,
)


pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("overload")
    run(Overload(**{**settings_of(TINY), "output": folder, "rate_per_s": 6.0}), model_dir)
    return json.loads((folder / "overload.json").read_text())


def settings_of(settings: Overload) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def test_both_arms_get_every_request(result: dict[str, Any]) -> None:
    assert set(result["arms"]) == {ON, OFF}
    for arm in result["arms"].values():
        assert arm["figures"]["requests"] == result["requests"]
        assert sum(arm["figures"]["outcomes"].values()) == result["requests"]
        assert sum(lane["requests"] for lane in arm["lanes"].values()) == result["requests"]


def test_without_admission_nobody_is_refused_and_engines_queue(result: dict[str, Any]) -> None:
    off = result["arms"][OFF]
    assert set(off["figures"]["outcomes"]) == {"200"}
    assert off["engine_waiting_most"] > 0


def test_every_refusal_says_when_to_come_back(result: dict[str, Any]) -> None:
    found = result["arms"][ON]["figures"]
    assert found["refused_tries"] == found["told_to_wait"]


def test_patient_clients_are_told_by_lane(result: dict[str, Any]) -> None:
    for arm in result["arms"].values():
        clients = sum(lane["clients"] for lane in arm["patient"].values())
        assert clients == -(-result["requests"] // TINY.patient_every)
        for lane in arm["patient"].values():
            assert 0 <= lane["answered"] <= lane["clients"]
    off = result["arms"][OFF]["patient"].values()
    assert all(lane["answered"] == lane["clients"] and not lane["returned"] for lane in off)


def test_results_hold_seed_sizes_and_machine(result: dict[str, Any]) -> None:
    assert result["settings"]["seed"] == TINY.seed
    assert result["settings"]["cluster"]["workers"] == 2
    assert result["machine"]["cores"]


def test_calibration_finds_what_the_slots_can_do(model_dir: Path) -> None:
    # Two workers of two slots; an answer of some 20 to 60 tokens takes half a second or so.
    plan = TINY.plan(20.0, 1.0)
    assert 2.0 < calibrate(TINY, model_dir, plan) < 40.0


def sample(number: int, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "due_s": 0.0,
        "lag_s": 0.0,
        "sent_s": 0.0,
        "planned_tokens": 1,
        "tenant": "",
        "lane": "",
        "status": 200,
        "e2e_s": 1.0,
    }
    return Sample(number, **{**fields, **changes})


def test_the_rate_is_taken_from_the_middle() -> None:
    # Slow to begin, one a tenth of a second in the middle, slow to end.
    ends = [0.0, 5.0, *(6.0 + n / 10 for n in range(20)), 20.0, 30.0]
    samples = [sample(n, sent_s=end) for n, end in enumerate(ends)]
    assert middle_rate(samples) == pytest.approx(10.0)


def test_too_few_answers_tell_no_rate() -> None:
    with pytest.raises(ValueError, match="too few"):
        middle_rate([sample(0)])


def test_announced_waits_are_compared_with_those_seen() -> None:
    once = sample(0, sent_s=2.1, queue_s=1.9, refused=[Try(429, "queue_full", 0.1, 2.0)])
    twice = sample(
        1,
        sent_s=4.0,
        queue_s=0.0,
        refused=[Try(429, "queue_full", 0.0, 1.0), Try(429, "queue_full", 1.1, 2.9)],
    )
    never = sample(2)
    gone = sample(3, status=429, refused=[Try(429, "queue_full", 0.1, 2.0)])
    whole, held = told_against_seen([once, twice, never, gone])
    assert whole == [pytest.approx(2.0 / 3.9), pytest.approx(1.0 / 4.0)]
    assert held == [pytest.approx(2.0 / 1.9)]


def test_only_who_comes_back_as_told_is_patient() -> None:
    again = [Try(429, "queue_full", 0.1, 2.0)]
    samples = [
        sample(0, lane="online", refused=again),
        sample(1, lane="online"),
        sample(2, lane="online", status=429, refused=again),
        sample(4, lane="batch"),
    ]
    assert patient_clients(samples, every=2) == {
        "online": {"clients": 2, "answered": 1, "returned": 2},
        "batch": {"clients": 1, "answered": 1, "returned": 0},
    }
