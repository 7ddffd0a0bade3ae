"""``kvgate bench ab`` against two scripted servers, and what its verdicts are made of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.ab import AB, Arm
from benchmarks.ab_figures import Compared, Criteria, Verdict, columns, compare
from benchmarks.load.client import Wire
from benchmarks.load.driver import Drive
from benchmarks.load.sample import Budgets, Sample
from benchmarks.workloads.plan import Planned, Segment, write_plan
from benchmarks.workloads.source import Source
from extproc.cli import app
from tests.benchmarks.load.server import Script, serving

COUNT = 12
SECRET = "sk-very-secret"
BUDGETS = Budgets(ttft_s=1.0, tpot_s=0.5)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.jsonl"
    write_plan(path, [Planned(n * 0.02, (Segment(n, 60),), 4) for n in range(COUNT)])
    return path


async def ab(a: str, b: str, plan: Path, model_dir: Path, *flags: object) -> tuple[Result, Path]:
    """The command in a thread, so that the servers can answer."""
    folder = plan.parent / "ab"
    arguments = ["bench", "ab", "--a", a, "--b", b, "--workload", plan, "--model-dir", model_dir]
    arguments += ["--rounds", 2, "--pause-s", 0, "--tpot-ms", 500, "--output", folder, *flags]
    result = await asyncio.to_thread(CliRunner().invoke, app, list(map(str, arguments)))
    return result, folder


async def test_two_like_servers_keep_every_criterion(plan: Path, model_dir: Path) -> None:
    flags = ("--max-ttft-p99-ratio", 100, "--header-b", f"authorization: Bearer {SECRET}")
    async with serving() as old, serving() as new:
        result, folder = await ab(old.url, new.url, plan, model_dir, *flags)
    assert result.exit_code == 0, result.output
    assert len(old.bodies) == len(new.bodies) == 2 * COUNT
    found = json.loads((folder / "ab.json").read_text())
    assert found["roll_back"] is False
    assert found["figures"]["within the budgets"]["ratio"]["value"] == 1.0
    assert found["figures"]["token hit ratio"]["a"] == pytest.approx(0.48)
    assert [len(rounds) for rounds in found["arms"].values()] == [2, 2]
    for plot in ("ttft", "hit_ratio"):
        assert (folder / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
    assert {each["authorization"] for each in new.headers} == {f"Bearer {SECRET}"}
    assert not any("authorization" in each for each in old.headers)
    written = "".join(path.read_text() for path in folder.glob("*.json*"))
    assert SECRET not in written + result.output


async def test_no_run_finds_the_prompts_of_another_cached(plan: Path, model_dir: Path) -> None:
    async with serving() as old, serving() as new:
        await ab(old.url, new.url, plan, model_dir)
    bodies = [json.dumps(body["messages"]) for body in (*old.bodies, *new.bodies)]
    assert len(set(bodies)) == 4 * COUNT


@pytest.mark.parametrize(
    ("script", "broken"),
    [
        (Script(status=500, code="oops"), "errors of b"),
        (Script(status=429), "refused, b over a"),
        (Script(pause_s=0.25), "TTFT p99 ms, b over a"),
    ],
    ids=["errors", "refusals", "slow"],
)
async def test_a_worse_server_is_rolled_back(
    script: Script, broken: str, plan: Path, model_dir: Path
) -> None:
    async with serving() as old, serving(*[script] * COUNT) as new:
        result, folder = await ab(old.url, new.url, plan, model_dir)
    assert result.exit_code == 1, result.output
    assert f"ROLL BACK: {broken}" in result.output
    criteria = json.loads((folder / "ab.json").read_text())["criteria"]
    assert broken in [each["name"] for each in criteria if each["broken"]]


async def test_nothing_is_compared_with_a_cluster_that_answers_nothing(
    plan: Path, model_dir: Path
) -> None:
    async with serving() as new:
        result, _ = await ab("http://127.0.0.1:9", new.url, plan, model_dir)
    assert result.exit_code == 2
    assert "is within the budgets" in result.output


def test_arms_take_turns_there_and_back_each_in_its_own_words() -> None:
    old, new = Arm("a", Wire("http://a", "m")), Arm("b", Wire("http://b", "m"))
    drive = Drive(old.wire, Path())
    settings = AB(Source("chats"), old, new, drive, BUDGETS, rounds=4)
    turns = list(settings.turns())
    assert "".join(arm.name for arm, _ in turns) == "abbaabba"
    assert all(drive.wire == arm.wire for arm, drive in turns)
    assert len({drive.seed for _, drive in turns}) == 8


# Figures


def sample(number: int, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "due_s": number / 10,
        "lag_s": 0.001,
        "sent_s": number / 10,
        "planned_tokens": 100,
        "tenant": "",
        "lane": "",
        "status": 200,
        "ttft_s": 0.1 + number / 1_000,
        "e2e_s": 1.0,
        "output_tokens": 20,
        "prompt_tokens": 100,
        "cached_tokens": 48,
    }
    return Sample(number, **{**fields, **changes})


def against(b: Iterable[Sample], seed: int = 1) -> tuple[dict[str, Compared], dict[str, Verdict]]:
    a = columns([[sample(n) for n in range(100)]], BUDGETS)
    compared, verdicts = compare(a, columns([list(b)], BUDGETS), 1, Criteria(), seed)
    return compared, {each.name.split(",")[0].split(" of")[0]: each for each in verdicts}


def test_an_arm_against_itself_is_surely_ok() -> None:
    compared, verdicts = against(sample(n) for n in range(100))
    assert {each.ratio.value for each in compared.values() if each.a} == {1.0}
    assert all(each.sure and not each.broken for each in verdicts.values())


def test_a_ratio_in_every_request_has_a_narrow_interval() -> None:
    compared, verdicts = against(sample(n, ttft_s=2 * (0.1 + n / 1_000)) for n in range(100))
    ratio = compared["TTFT p99 ms"].ratio
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert verdicts["TTFT p99 ms"].broken
    assert verdicts["TTFT p99 ms"].sure


def test_a_stall_in_one_of_four_rounds_is_not_sure() -> None:
    a = [[sample(n) for n in range(100)] for _ in range(4)]
    stalled = [sample(n, ttft_s=9.0) for n in range(100)]
    b = columns([stalled, *a[1:]], BUDGETS)
    compared, verdicts = compare(columns(a, BUDGETS), b, 4, Criteria(), 1)
    assert compared["TTFT p99 ms"].ratio.value > 40.0
    assert compared["TTFT p99 ms"].ratio.low < 1.1
    assert verdicts[0].broken
    assert not verdicts[0].sure


def test_few_bad_requests_leave_a_verdict_unsure() -> None:
    bad = [sample(n, status=500 if n == 50 else 200, code="x" * (n == 50)) for n in range(100)]
    _, verdicts = against(bad)
    errors = verdicts["errors"]
    assert errors.found.value == 0.01
    assert errors.found.low == 0.0 < 0.01 < errors.found.high
    assert not errors.broken
    assert not errors.sure


def test_an_arm_without_answers_breaks_what_cannot_be_told() -> None:
    _, verdicts = against(sample(n, status=0, code="unreachable", ttft_s=None) for n in range(100))
    assert verdicts["TTFT p99 ms"].found.value != verdicts["TTFT p99 ms"].found.value
    assert verdicts["TTFT p99 ms"].broken
    assert verdicts["errors"].found.value == 1.0
    assert not verdicts["refused"].broken


def test_a_refusal_more_than_none_is_no_ratio() -> None:
    _, verdicts = against(sample(n, status=429 if n == 7 else 200) for n in range(100))
    assert verdicts["refused"].found.value == 1.0


@pytest.mark.parametrize(
    ("status", "announced_s", "column"),
    [(429, None, "refused"), (503, 1.0, "refused"), (503, None, "error"), (200, None, "good")],
)
def test_a_refusal_is_told_from_an_error(
    status: int, announced_s: float | None, column: str
) -> None:
    found = columns([[sample(0, status=status, announced_s=announced_s)]], BUDGETS)
    assert {name: found[name][0] for name in ("good", "refused", "error")} == {
        name: float(name == column) for name in ("good", "refused", "error")
    }


def test_intervals_repeat_with_their_seed() -> None:
    slower = [sample(n, ttft_s=0.1 + (n * 37 % 100) / 500) for n in range(100)]
    ratios = [against(slower, seed)[0]["TTFT p99 ms"].ratio for seed in (3, 3, 4)]
    assert ratios[0] == ratios[1] != ratios[2]
