"""A tiny sweep in virtual time and through the real Envoy, and how a trace is paced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks.cluster import Cluster
from benchmarks.overload import OFF, ON, Overload
from benchmarks.overload_sweep import Sweep, paced, run
from benchmarks.workloads.plan import PlanError, Planned, Segment, write_plan
from extproc.cli import app

TINY = Sweep(
    trace=Path("trace.jsonl"),
    factors=(1.0, 4.0),
    seconds=6.0,
    warm_s=2.0,
    wall_seconds=2.0,
    arms=msgspec.structs.replace(
        Sweep(Path()).arms,
        calibration_rounds=4,
        warm_rounds=1,
        cluster=Cluster(workers=2, max_num_seqs=2, timing="rtx-pro-6000"),
    ),
)


def requests(count: int) -> list[Planned]:
    return [
        Planned(number * 0.5, (Segment(f"r{number}", 800 + 37 * (number % 9)),), 10 + number % 30)
        for number in range(count)
    ]


@pytest.fixture
def settings(tmp_path: Path) -> Sweep:
    trace = tmp_path / "trace.jsonl"
    write_plan(trace, requests(800))
    return msgspec.structs.replace(TINY, trace=trace, output=tmp_path)


def written(settings: Sweep) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((settings.output / "overload-sweep.json").read_text())
    return result


def test_admission_keeps_the_tail_where_the_rate_is_too_high(
    settings: Sweep, model_dir: Path
) -> None:
    run(settings, model_dir)
    found = written(settings)["virtual time"]
    assert found["sustainable_per_s"] > 1
    one, four = found["factors"]["1"], found["factors"]["4"]
    for arms in (one, four):
        assert arms[OFF]["shed_share"] == 0
        assert arms[ON]["figures"]["requests"] == arms[OFF]["figures"]["requests"]
    assert four[ON]["sent_per_s"] == pytest.approx(4 * found["sustainable_per_s"], rel=0.05)
    assert four[ON]["shed_share"] > 0.2
    assert four[ON]["ttft_p99_s"] < settings.arms.budgets.ttft_s < four[OFF]["ttft_p99_s"]
    assert four[ON]["goodput_per_s"] > four[OFF]["goodput_per_s"]


def test_each_figure_is_drawn(settings: Sweep, model_dir: Path) -> None:
    run(settings, model_dir)
    for name in ("goodput_per", "ttft_p99"):
        plot = settings.output / f"{name}-virtual-time.png"
        assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_the_same_goes_through_envoy(settings: Sweep, model_dir: Path) -> None:
    run(msgspec.structs.replace(settings, factors=(2.0,), wall_clock=True), model_dir)
    found = written(settings)["wall clock"]
    arms = found["factors"]["2"]
    assert set(arms) == {ON, OFF}
    for arm in arms.values():
        sent = round(2 * found["sustainable_per_s"] * settings.wall_seconds)
        assert arm["figures"]["requests"] == sent
        outcomes = arm["figures"]["outcomes"]
        assert all(told == "200" or told.startswith("429 ") for told in outcomes)


def test_rows_are_paced_and_keep_their_shape() -> None:
    rows = [Planned(at_s, (Segment(int(at_s), 10),), 1) for at_s in (5.0, 6.0, 6.0, 9.0, 20.0)]
    made = paced(rows, rate_per_s=2.0, seconds=2.0)
    assert [each.at_s for each in made] == [0.0, 0.5, 0.5, 2.0]


def test_a_trace_that_is_too_short_is_refused_with_what_it_would_take(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"30 requests are needed.*the trace has 20"):
        paced(requests(20), rate_per_s=3.0, seconds=10.0)
    result = CliRunner().invoke(app, ["bench", "overload-sweep", "--trace", "/nowhere.csv"])
    assert result.exit_code == 2
    assert "/nowhere.csv" in result.output


def test_the_sweep_has_the_overloads_arms_but_for_budget_and_policy() -> None:
    arms, overload = Sweep(Path()).arms, Overload()
    assert arms.cluster == overload.cluster
    assert arms.off == overload.off
    assert arms.budgets.ttft_s is not None
