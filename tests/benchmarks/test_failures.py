"""A tiny run of every kind of trouble on real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.cluster import Cluster
from benchmarks.failures import ARMS, Failures, run
from benchmarks.workloads.plan import PlanError

TINY = Failures(
    seconds=8.0,
    at_s=2.0,
    down_s=2.0,
    drain_s=4.0,
    rate_per_s=1.0,
    added=1,
    cluster=Cluster(workers=2, max_num_seqs=8, timing="rtx-pro-6000"),
)

_LEFT_OUT = ("envoy round robin: calm", "envoy round robin: freeze")

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    arms = tuple(arm for arm in ARMS if arm not in _LEFT_OUT)
    run(msgspec.structs.replace(TINY, arms=arms, output=folder), model_dir)
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "failures.json").read_text())
    return found


def whats(result: dict[str, Any], arm: str) -> list[str]:
    return [step["what"] for step in result["arms"][arm]["steps"]]


def test_every_arm_gets_the_same_requests(result: dict[str, Any]) -> None:
    for arm in result["arms"].values():
        assert arm["figures"]["requests"] == result["plan"]["requests"]
        assert sum(span["requests"] for span in arm["spans"].values()) == result["plan"]["requests"]
        failed = sum(span["errors"] + span["broken"] for span in arm["spans"].values())
        assert failed == arm["figures"]["requests"] - arm["figures"]["served"]


def test_without_trouble_all_is_served(result: dict[str, Any]) -> None:
    calm = result["arms"]["kvgate: calm"]
    assert calm["steps"] == []
    assert calm["figures"]["served"] == result["plan"]["requests"]


@pytest.mark.parametrize("router", ["kvgate", "envoy round robin"])
def test_a_killed_worker_comes_back(result: dict[str, Any], router: str) -> None:
    assert whats(result, f"{router}: kill") == ["killed", "started again", "ready"]
    began, _, ready = result["arms"][f"{router}: kill"]["steps"]
    assert began["at_s"] >= TINY.at_s
    assert ready["at_s"] - began["at_s"] > TINY.down_s


def test_a_frozen_worker_breaks_no_answer(result: dict[str, Any]) -> None:
    assert whats(result, "kvgate: freeze") == ["stopped", "goes on", "ready"]
    spans = result["arms"]["kvgate: freeze"]["spans"].values()
    assert sum(span["broken"] for span in spans) == 0


def test_a_rolling_restart_reaches_every_worker(result: dict[str, Any]) -> None:
    told = ["worker 1 drains", "worker 2 drains", "all ready"]
    assert whats(result, "kvgate: roll") == told
    assert len(result["arms"]["kvgate: roll"]["figures"]["workers"]) == TINY.cluster.workers


def test_a_worker_that_joins_is_sent_to(result: dict[str, Any]) -> None:
    started, ready = result["arms"]["kvgate: add"]["steps"]
    assert (started["what"], ready["what"]) == ("1 more start", "ready")
    assert ready["at_s"] > started["at_s"]


def test_each_event_is_drawn(folder: Path) -> None:
    for event in ("kill", "freeze", "roll", "add"):
        assert (folder / f"{event}.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_arm_is_refused(model_dir: Path) -> None:
    with pytest.raises(PlanError, match="no arm 'kvgate: flood'"):
        run(msgspec.structs.replace(TINY, arms=("kvgate: flood",)), model_dir)
