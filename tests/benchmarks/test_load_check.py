"""Our load generator beside aiperf: what aiperf is given, what is read of it, and our own side."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import load_check
from benchmarks.aiperf import AIPERF, EXPORT, command, read_export, replay, write_input
from benchmarks.cluster import MODEL, Cluster, engines
from benchmarks.load.client import Client, Wire, make_session
from benchmarks.load.driver import Drive, drive
from benchmarks.load.sample import Sample
from benchmarks.load_check import OURS, THEIRS, LoadCheck, ours, run, shown, side_by_side
from benchmarks.peers import CannotInstall, installed
from benchmarks.report_page.fields import find, value
from benchmarks.report_page.layouts import LAYOUTS
from benchmarks.rig import RigFailure
from benchmarks.workloads.plan import Planned, Segment
from benchmarks.workloads.prompts import PromptMaker
from tests.benchmarks.load.server import serving

RECORDED = Path(__file__).parent / "recorded" / "aiperf-0.13.0.json"
"""Of a run of aiperf 0.13.0 over 231 requests, with the fields that are read and some others."""
PLAN = [Planned(0.125, (Segment("a", 60),), 4), Planned(0.5, (Segment("b", 80),), 7)]


# What aiperf is given


async def test_aiperf_gets_the_bodies_and_times_of_our_own_client(
    model_dir: Path, tmp_path: Path
) -> None:
    wire, maker = Wire("http://h", "m"), PromptMaker(model_dir, 5)
    write_input(tmp_path / "plan.jsonl", wire, maker, PLAN)
    lines = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    assert [line["timestamp"] for line in lines] == [125.0, 500.0]
    async with make_session(wire) as session:
        client = Client(session, wire, maker, 0.0)
        assert [line["payload"] for line in lines] == [
            json.loads(client.body(request)) for request in PLAN
        ]


def test_aiperf_is_told_the_schedule_the_tokenizer_and_whose_count_of_tokens(
    model_dir: Path,
) -> None:
    words = command(Path("/v"), Wire("http://h:1", "m"), model_dir, Path("p.jsonl"), Path("o"))
    told = " ".join(words)
    assert words[:2] == ("/v/aiperf", "profile")
    assert f"--tokenizer {model_dir.resolve()}" in told
    assert "--url http://h:1 --model m" in told
    assert {"--streaming", "--fixed-schedule", "--use-server-token-count"} <= set(words)


def test_headers_that_aiperf_cannot_send_are_in_neither_tools_plan() -> None:
    plan = LoadCheck(workload="tenants", duration_s=5.0).plan()
    assert plan
    assert not any(each.session or each.tenant or each.lane for each in plan)


# What is read of it


def test_figures_of_aiperf_come_in_our_names_and_units() -> None:
    export = json.loads(RECORDED.read_text())
    found = read_export(RECORDED)
    assert found["requests"] == found["served"] == 231
    assert found["ttft_p99_ms"] == export["time_to_first_token"]["p99"]
    assert found["tpot_p50_ms"] == export["inter_token_latency"]["p50"]
    assert found["e2e_p99_ms"] == export["request_latency"]["p99"]
    read_percent = export["overall_usage_prompt_cache_read_pct"]["avg"]
    assert found["hit_ratio"] == pytest.approx(read_percent / 100)
    assert export["time_to_first_token"]["unit"] == export["request_latency"]["unit"] == "ms"
    assert set(found) == set(shown([sample()]))


def test_an_export_without_a_figure_is_a_failure_that_names_it(tmp_path: Path) -> None:
    export = json.loads(RECORDED.read_text())
    del export["time_to_first_token"]["p90"]
    (tmp_path / EXPORT).write_text(json.dumps(export))
    with pytest.raises(RigFailure, match=r"time_to_first_token\.p90"):
        read_export(tmp_path / EXPORT)
    with pytest.raises(RigFailure, match="cannot be read"):
        read_export(tmp_path / "nothing.json")


def test_a_run_of_aiperf_that_fails_shows_its_log(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "import sys; sys.exit('no such tokenizer')")
    with pytest.raises(RigFailure, match=r"(?s)status 1.*no such tokenizer"):
        replay(words, tmp_path, 0.0)


# Our own side


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "ttft_s": 0.2,
        "e2e_s": 1.1,
        "status": 200,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "output_tokens": 10,
    }
    return Sample(0, 0.0, 0.001, 0.001, 100, "", "", **{**fields, **changes})


def test_our_side_sends_the_plan_and_tells_its_figures(model_dir: Path, tmp_path: Path) -> None:
    cluster = Cluster(workers=1, timing="rtx-pro-6000")
    settings = LoadCheck(seed=3, duration_s=2.0, rate_per_s=4.0, cluster=cluster)
    plan = settings.plan()
    with engines(cluster, model_dir, tmp_path) as [engine]:
        found = ours(settings, plan, model_dir, engine.url, tmp_path)
    assert found["requests"] == found["served"] == len(plan)
    assert found["prompt_tokens"] == sum(each.prompt_tokens for each in plan)
    assert found["output_tokens"] == sum(each.output_tokens for each in plan)
    assert 0 < found["ttft_p50_ms"] <= found["ttft_p90_ms"] <= found["ttft_p99_ms"]
    assert found["ttft_p50_ms"] + found["tpot_p50_ms"] < found["e2e_p99_ms"]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(plan)


def test_figures_of_a_run_are_in_milliseconds() -> None:
    found = shown([sample()])
    assert (found["ttft_p50_ms"], found["e2e_p99_ms"]) == (200.0, 1100.0)
    assert found["tpot_p50_ms"] == pytest.approx(100.0)
    assert found["hit_ratio"] == 0.6


# Side by side


def test_medians_of_the_rounds_are_divided_and_their_ends_kept() -> None:
    rounds = {
        OURS: [shown([sample(ttft_s=ttft_s)]) for ttft_s in (0.1, 0.3, 0.2)],
        THEIRS: [shown([sample(ttft_s=0.4, cached_tokens=0)])] * 3,
    }
    found = {each["figure"]: each for each in side_by_side(rounds)}
    ttft = found["TTFT p50 ms"]
    assert (ttft[OURS], ttft[THEIRS], ttft["ratio"]) == (200.0, 400.0, 0.5)
    assert (ttft["ours_lowest"], ttft["ours_highest"]) == (100.0, 300.0)
    assert math.isnan(found["token hit ratio"]["ratio"])


def test_the_report_has_every_figure_of_both_tools() -> None:
    rounds = {OURS: [shown([sample()])], THEIRS: [read_export(RECORDED)]}
    assert_columns({"fronts": {"kvgate": {"figures": side_by_side(rounds)}}})


def assert_columns(result: dict[str, Any]) -> None:
    [layout] = LAYOUTS["load-check"]
    rows = [row for _, row in find(result, layout.rows)]
    assert rows
    for column in layout.columns:
        assert all(value(row, column.field) is not None for row in rows), column.field


def test_without_aiperf_it_says_why_and_starts_nothing(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cannot(_package: object) -> Path:
        raise CannotInstall("No matching distribution found")

    monkeypatch.setattr(load_check, "installed", cannot)
    assert run(LoadCheck(duration_s=1.0, output=tmp_path), model_dir) == {}
    assert "skipped: aiperf: No matching distribution found" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# With aiperf itself


@pytest.fixture(scope="module")
def bin_dir() -> Path:
    return installed(AIPERF)


@pytest.mark.bench
async def test_both_tools_send_the_same_bodies_at_the_same_times(
    bin_dir: Path, model_dir: Path, tmp_path: Path
) -> None:
    plan = [Planned(0.2 * n, (Segment(n, 60 + n),), 4) for n in range(10)]
    async with serving() as server:
        wire = Wire(server.url, MODEL)
        await drive(Drive(wire, model_dir), plan, lambda _: None)
        mine = list(zip(server.bodies, server.came_s, strict=True))
        server.bodies.clear()
        server.came_s.clear()
        file = tmp_path / "plan.jsonl"
        write_input(file, wire, PromptMaker(model_dir), plan)
        words = command(bin_dir, wire, model_dir, file, tmp_path)
        found = await asyncio.to_thread(replay, words, tmp_path, plan[-1].at_s)
    theirs = list(zip(server.bodies, server.came_s, strict=True))
    assert found["requests"] == found["served"] == len(plan)
    assert [body for body, _ in mine] == [body for body, _ in theirs]
    for sent in (mine, theirs):
        # Open loop at the plan's pace; how late a busy machine is is not told here.
        gaps = [at_s - sent[0][1] for _, at_s in sent]
        assert gaps == pytest.approx([each.at_s for each in plan], abs=1.0)


@pytest.mark.bench
def test_a_tiny_run_puts_both_tools_side_by_side(
    bin_dir: Path, model_dir: Path, tmp_path: Path
) -> None:
    cluster = Cluster(workers=2, timing="rtx-pro-6000")
    settings = LoadCheck(rounds=1, duration_s=5.0, rate_per_s=3.0, cluster=cluster, output=tmp_path)
    run(settings, model_dir)
    result = json.loads((tmp_path / "load-check.json").read_text())
    assert result["versions"] == {"aiperf": "0.13.0"}
    assert set(result["fronts"]) == set(settings.fronts)
    for found in result["fronts"].values():
        figures = {each["figure"]: each for each in found["figures"]}
        for same in ("requests", "answered", "prompt tokens", "output tokens"):
            assert figures[same][OURS] == figures[same][THEIRS] > 0
        # The same requests on the same kind of cluster: no unit or definition is off.
        for near in ("TTFT p50 ms", "TPOT p50 ms", "end to end p50 ms", "output tokens/s"):
            assert 0.1 < figures[near]["ratio"] < 10.0
    assert_columns(result)
