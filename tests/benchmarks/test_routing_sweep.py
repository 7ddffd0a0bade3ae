"""A tiny sweep, so that it does not rot."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.routing.displacement import Regret
from benchmarks.routing.requests import BLOCK_TOKENS, load_trace, one_cache_hit_ratio
from benchmarks.routing_sweep import Settings, Variant, drawn, run

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
    variants = {name: Variant({"profile": name}) for name in ("balanced", "consistent_hash")}
    variants["random"] = Variant({"profile": "random"})
    variants["displacement"] = Variant({}, displacement=8.0)
    settings = Settings(
        traces, ROWS, workers=(4,), cache_blocks=100, variants=variants, output=output
    )
    run(settings)
    return json.loads(output.read_text())


def test_clumps_are_spread_and_the_order_of_time_kept(traces: Path) -> None:
    requests = load_trace(traces / "mooncake_conversation.jsonl", ROWS, seed=1)
    times = [request.arrives_at for request in requests]
    assert times == sorted(times)
    assert len(set(times)) == ROWS
    assert all(len(r.keys) == (r.prompt_tokens - 1) // BLOCK_TOKENS for r in requests)


def test_caches_are_found_and_work_is_spread(result: dict) -> None:
    """A shared root herds nobody."""
    by_policy = {each["policy"]: each for each in result["results"]}
    balanced = by_policy["balanced"]
    assert balanced["hit_ratio"] >= by_policy["consistent_hash"]["hit_ratio"]
    assert balanced["hit_ratio"] > 1.5 * by_policy["random"]["hit_ratio"]
    assert balanced["max_mean_work"] < 1.2


def test_displacement_changes_where_requests_go(result: dict) -> None:
    by_policy = {each["policy"]: each for each in result["results"]}
    assert by_policy["displacement"]["hit_ratio"] != by_policy["balanced"]["hit_ratio"]


def test_what_was_swept_is_written_down(result: dict) -> None:
    assert result["model"]["seed"] == 1
    assert result["policies"]["random"]["routing"] == {"profile": "random"}
    assert {each["trace"] for each in result["results"]} == {HERD}


def test_one_cache_for_all_counts_every_block_that_stands_in_it(traces: Path) -> None:
    requests = load_trace(traces / "mooncake_conversation.jsonl", ROWS, seed=1)
    known: set[int] = set()
    cached = 0
    for request in requests:
        keys = request.keys.tolist()
        cached += BLOCK_TOKENS * sum(key in known for key in keys)
        known.update(keys)
    asked = sum(request.prompt_tokens for request in requests)
    assert one_cache_hit_ratio(requests, 10**9) == pytest.approx(cached / asked)
    assert one_cache_hit_ratio(requests, 100) < cached / asked


def test_drawn_policies_are_the_same_for_a_seed() -> None:
    assert drawn(3, seed=1) == drawn(3, seed=1) != drawn(3, seed=2)
    assert next(iter(drawn(3, seed=1))) == "balanced"


class TestRegret:
    """The share of evicted blocks that were asked for again."""

    def test_rises_with_evicted_blocks_asked_for_again(self) -> None:
        regret = Regret(blocks=2)
        regret.take([], evicted=[1, 2])
        assert regret.share == 0.0
        regret.take([1, 7], evicted=[])
        once = regret.share
        assert once > 0.0
        regret.take([1], evicted=[])
        assert regret.share == once

    def test_blocks_evicted_too_long_ago_are_forgotten(self) -> None:
        regret = Regret(blocks=2)
        regret.take([], evicted=[1, 2, 3])
        regret.take([1], evicted=[])
        assert regret.share == 0.0
