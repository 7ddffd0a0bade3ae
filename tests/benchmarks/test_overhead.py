"""A tiny run of the overhead benchmark with the real Envoy and the real ``kvgate serve``."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.arms import ARMS, quantile_s
from benchmarks.http_load import Order, Workload, make_plans
from benchmarks.overhead import Settings, run

WORKLOADS = (
    Workload("chats", "chat", connections=2, requests=8),
    Workload("long chats", "long", connections=1, requests=2, size_bytes=100_000),
    Workload("open loop", "small", connections=2, requests=8, rate_per_s=100.0),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = tmp_path_factory.mktemp("overhead") / "overhead.json"
    run(
        Settings(
            rounds=2,
            workers=2,
            workloads=WORKLOADS,
            agents=3,
            held_requests=80,
            standing_s=0.5,
            output=output,
        )
    )
    return json.loads(output.read_text())


def test_every_arm_serves_every_workload_in_every_round(result: dict) -> None:
    assert [each["workload"]["name"] for each in result["workloads"]] == [
        workload.name for workload in WORKLOADS
    ]
    for workload in result["workloads"]:
        assert set(workload["medians"]) == set(ARMS)
        assert all(len(rounds) == 2 for rounds in workload["rounds"].values())
        assert all(figures["p50_ms"] > 0 for figures in workload["medians"].values())


def test_only_arms_with_a_processor_have_its_cost(result: dict) -> None:
    switches = {arm: result["workloads"][0]["medians"][arm]["processor_switches"] for arm in ARMS}
    assert switches["Envoy alone"] == 0
    assert switches["bare processor"] > 0
    assert switches["kvgate"] > 0


def test_only_kvgate_decides(result: dict) -> None:
    medians = result["workloads"][0]["medians"]
    decision = medians["kvgate"]
    assert 0 < decision["decision_p50_ms"] <= decision["decision_p95_ms"]
    assert medians["bare processor"]["decision_p50_ms"] is None


def test_the_steps_share_all_of_the_cost(result: dict) -> None:
    for workload in result["workloads"]:
        shares = workload["shares"]
        assert set(shares) == {
            "bare", "tokenise", "keys", "lookup", "admission", "routing", "rest"
        }  # fmt: skip
        assert sum(shares.values()) == pytest.approx(1.0)


def test_idle_is_measured_with_all_agents_connected(result: dict) -> None:
    assert result["idle"]["ready_workers"] == result["idle"]["agents"] == 3


def test_held_requests_are_all_held_and_all_end_well(result: dict) -> None:
    held = result["held"]
    assert held["ended_well"] == held["requests"] == 80
    assert held["left"] == 0


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)])
def test_quantiles_are_linear_within_a_bucket(share: float, expected: float) -> None:
    inf = float("inf")
    before = {1.0: 5.0, 2.0: 5.0, inf: 6.0}
    after = {1.0: 15.0, 2.0: 25.0, inf: 26.0}
    assert quantile_s(before, after, share) == pytest.approx(expected)


def test_a_quantile_beyond_the_bounds_is_the_last_bound_and_of_nothing_is_none() -> None:
    inf = float("inf")
    assert quantile_s({}, {1.0: 0.0, inf: 4.0}, 0.5) == 1.0
    assert math.isnan(quantile_s({1.0: 3.0, inf: 3.0}, {1.0: 3.0, inf: 3.0}, 0.5))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_requests_depend_on_the_seed_and_the_round_alone(workload: Workload) -> None:
    first, again, other = (
        make_plans(Order(port, workload, seed=1, round=number, rounds=2))
        for port, number in ((1, 0), (2, 0), (1, 1))
    )
    assert first == again
    assert [plan[1] for plan in first] != [plan[1] for plan in other]


def test_a_long_chat_goes_on_from_round_to_round() -> None:
    workload = WORKLOADS[1]
    [(_, first)], [(warm, _)] = (
        make_plans(Order(1, workload, seed=1, round=number, rounds=2)) for number in (0, 1)
    )
    assert warm == first[-1:]
