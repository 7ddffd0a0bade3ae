"""A tiny run of the benchmark, so that it does not rot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.middleware import ARMS, BARE, Settings, run


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = Path(tmp_path_factory.mktemp("middleware"), "results", "middleware.json")
    run(Settings(rounds=3, requests=4, chunks=16, output=output))
    return json.loads(output.read_text())


def test_every_arm_is_compared_with_the_bare_application(result: dict) -> None:
    assert {case["arm"] for case in result["requests"]} == set(ARMS)
    bare = [case for case in result["requests"] if case["arm"] == BARE]
    assert all(case["ratio"] == 1 and case["added_us"]["median"] == 0 for case in bare)
    assert all(case["request_us"] > 0 for case in result["requests"])


def test_chunks_and_datagrams_have_a_cost_each(result: dict) -> None:
    assert {case["arm"] for case in result["chunks"]} == set(ARMS[1:])
    assert result["agent_us_a_datagram"] > 0


def test_seed_and_machine_are_written_down(result: dict) -> None:
    assert result["seed"] == 1
    assert result["machine"]["cores"]
