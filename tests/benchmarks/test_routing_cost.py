"""A tiny run, so that it does not rot."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.routing_cost import Settings, run
from extproc.routing.profiles import PROFILES


def test_every_profile_and_size_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    run(Settings(workers=(3, 9), conversations=5, decisions=10, output=output))
    results = json.loads(output.read_text())["results"]
    assert [(each["workers"], each["profile"]) for each in results] == [
        (workers, profile) for workers in (3, 9) for profile in PROFILES
    ]
    assert all(0 < each["p50_ms"] <= each["p99_ms"] for each in results)
    assert all(each["lookup_ms"] > 0 for each in results)
