"""A tiny run of the hot path, so that it does not rot."""

from __future__ import annotations

import json

import pytest

from benchmarks.hot_path import STEPS, Conversations, Settings, run

SETTINGS = Settings(
    rounds=3,
    workers=(10,),
    conversations=(Conversations("small chat", 6_000, 500, chats=2),),
    digest_keys=500,
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = tmp_path_factory.mktemp("hot-path") / "results" / "hot_path.json"
    run(Settings(**{**vars(SETTINGS), "output": output}))
    return json.loads(output.read_text())


def test_every_step_takes_time(result: dict) -> None:
    [case] = result["decisions"]
    assert set(case["steps_ms"]) == set(STEPS)
    assert all(0 < step["median"] <= step["p99"] for step in case["steps_ms"].values())


def test_steps_are_checked_against_the_whole_decision(result: dict) -> None:
    [case] = result["decisions"]
    assert case["whole_ms"]["median"] > 0
    off = 100 * (case["sum_of_medians_ms"] / case["whole_ms"]["median"] - 1)
    assert case["sum_off_percent"] == pytest.approx(off)


def test_match_is_compared_with_plain_filters(result: dict) -> None:
    [match] = result["match_128_blocks"]
    assert match["workers"] == 10
    assert match["ratio"] > 1


def test_machine_and_seed_are_written_down(result: dict) -> None:
    assert result["seed"] == SETTINGS.seed
    assert result["machine"]["packages"]["numpy"]
