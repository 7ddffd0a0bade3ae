"""A tiny comparison on real processes, and peers that cannot be installed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, peers
from benchmarks.cluster import Cluster, Engine
from benchmarks.compare import Comparison, run
from benchmarks.peers import PEERS, CannotInstall, Peer, Start, installed, peer_front
from benchmarks.rig import HOST
from benchmarks.workloads.plan import PlanError

ARMS = ("kvgate", "kvgate:round_robin", "envoy:ring_hash", "absent:any")
ABSENT = Peer("absent", "/nowhere/absent-0-py3-none-any.whl", "any", lambda _start, _policy: ())


pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(compare, "PEER_ARMS", {ABSENT.name: ABSENT})
        patch.setattr(compare, "ALL_ARMS", ARMS)
        settings = Comparison(
            arms=ARMS,
            workloads=("chats",),
            duration_s=4.0,
            rate_per_s=2.0,
            cluster=Cluster(workers=2, max_num_seqs=4, timing="rtx-pro-6000"),
            output=folder,
        )
        run(settings, model_dir)
    return json.loads((folder / "compare.json").read_text())


def test_every_arm_serves_the_same_requests(result: dict[str, Any]) -> None:
    found = result["workloads"]["chats"]
    assert set(found["arms"]) == set(ARMS[:-1])
    for arm in found["arms"].values():
        [one] = arm["rounds"]
        assert one["figures"]["requests"] == found["plan"]["requests"]
        assert one["figures"]["served"] == found["plan"]["requests"]
        assert one["figures"]["off_plan"] == 0
        assert arm["medians"]["ttft_p50_ms"] > 0
        assert arm["medians"]["cpu_ms"] > 0
        assert arm["medians"]["memory_mb"] > 0


def test_only_kvgate_has_agents(result: dict[str, Any]) -> None:
    arms = result["workloads"]["chats"]["arms"]
    assert arms["kvgate"]["medians"]["agents_cpu_ms"] > 0
    assert arms["envoy:ring_hash"]["medians"]["agents_cpu_ms"] == 0


def test_conversations_find_their_cache_where_routing_cares(result: dict[str, Any]) -> None:
    arms = result["workloads"]["chats"]["arms"]
    hits = {name: arm["medians"]["hit_ratio"] for name, arm in arms.items()}
    assert hits["kvgate"] > 0.2
    assert hits["kvgate"] > hits["kvgate:round_robin"]


def test_a_peer_that_cannot_be_installed_is_skipped_with_a_reason(result: dict[str, Any]) -> None:
    assert set(result["skipped"]) == {"absent:any"}
    assert "absent" in result["skipped"]["absent:any"]


def test_installing_fails_with_what_pip_said(tmp_path: Path) -> None:
    with pytest.raises(CannotInstall, match="absent"):
        installed(ABSENT, tmp_path)
    assert not (tmp_path / "absent" / ".ready").exists()


def test_needs_are_installed_in_place_of_what_a_package_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(peers, "_checked", asked.append)
    (tmp_path / "absent").mkdir()
    installed(replace(ABSENT, needs=("one", "two")), tmp_path)
    _venv, alone, needs = asked
    assert tuple(alone[-2:]) == ("--no-deps", ABSENT.requirement)
    assert tuple(needs[-2:]) == ("one", "two")
    assert "--no-deps" not in needs


def test_an_adapter_is_part_of_the_cost_and_gets_the_environment(tmp_path: Path) -> None:
    def command(start: Start, policy: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "http.server", "--bind", HOST, str(start.port))

    def adapter(_start: Start) -> tuple[str, ...]:
        code = "import os, time; open(os.environ['MARK'], 'w').close(); time.sleep(60)"
        return (sys.executable, "-c", code)

    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / ".ready").touch()
    peer = replace(ABSENT, command=command, adapter=adapter, environment={"MARK": "{folder}/mark"})
    with peer_front(peer, [], tmp_path, tmp_path, tmp_path) as front:
        assert [each.name for each in front.processes] == ["peer", "adapter"]
        deadline = time.monotonic() + 10
        while not (tmp_path / "mark").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_traces_run_longer_and_on_larger_caches_if_told() -> None:
    told = Comparison(duration_s=30.0, trace_duration_s=120.0, trace_num_blocks=56_320)
    for name, seconds, blocks in (("chats", 30.0, 4_096), ("mooncake.jsonl", 120.0, 56_320)):
        source = told.source(name)
        assert source.duration_s == seconds
        assert told.cluster_of(source).num_blocks == blocks
    source = Comparison(duration_s=30.0).source("mooncake.jsonl")
    assert source.duration_s == 30.0
    assert Comparison().cluster_of(source).num_blocks == 4_096


def test_an_unknown_arm_is_refused_before_anything_starts() -> None:
    with pytest.raises(PlanError, match="envoy:random"):
        run(Comparison(arms=("envoy:random",)), Path())


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_is_told_all_workers_and_its_policy(peer: Peer, tmp_path: Path) -> None:
    engines = [
        Engine(8001, 5557, 5657, Path("1.sock")),
        Engine(8002, 5558, 5658, Path("2.sock")),
    ]
    start = Start(tmp_path, engines, 9000, 9001, tmp_path, tmp_path)
    command = peer.command(start, peer.policy)
    if peer.adapter is not None:
        command += peer.adapter(start)
    written = "".join(path.read_text() for path in tmp_path.glob("*.yaml"))
    told = " ".join(command) + written
    assert all(engine.url in told for engine in engines)
    assert peer.policy in told
    assert "9000" in told
