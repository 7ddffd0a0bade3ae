"""A tiny sweep, so that it does not rot."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.routing_sweep import Settings, load_trace, run

HERD = "conversation"
ROWS = 200


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats that share their first block, in clumps every 3 s."""
    folder = tmp_path_factory.mktemp("traces")
    rng = random.Random(1)
    chats: list[list[int]] = [[0] for _ in range(40)]
    fresh = iter(range(1, 10**6))
    with (folder / "mooncake_conversation.jsonl").open("w") as file:
        for number in range(ROWS):
            chat = rng.choice(chats)
            chat.extend(next(fresh) for _ in range(4))
            row = {
                "timestamp": number // 10 * 3_000,
                "input_length": 512 * len(chat) - 100,
                "output_length": 20,
                "hash_ids": chat,
            }
            file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def result(traces: Path) -> dict:
    output = traces / "sweep.json"
    variants = {name: {"profile": name} for name in ("balanced", "consistent_hash", "random")}
    run(Settings(traces, rows=ROWS, workers=(4,), variants=variants, output=output))
    return json.loads(output.read_text())


def test_clumps_are_spread_and_the_order_of_time_kept(traces: Path) -> None:
    requests = load_trace(traces / "mooncake_conversation.jsonl", ROWS, seed=1)
    times = [request.arrives_at for request in requests]
    assert times == sorted(times)
    assert len(set(times)) == ROWS
    assert all(len(r.keys) == (r.prompt_tokens - 1) // 512 for r in requests)


def test_caches_are_found_and_work_is_spread(result: dict) -> None:
    """A shared root herds nobody."""
    by_policy = {each["policy"]: each for each in result["results"]}
    balanced = by_policy["balanced"]
    assert balanced["hit_ratio"] >= by_policy["consistent_hash"]["hit_ratio"]
    assert balanced["hit_ratio"] > 1.5 * by_policy["random"]["hit_ratio"]
    assert balanced["max_mean_work"] < 1.2


def test_what_was_swept_is_written_down(result: dict) -> None:
    assert result["seed"] == 1
    assert result["policies"]["random"] == {"profile": "random"}
    assert {each["trace"] for each in result["results"]} == {HERD}
