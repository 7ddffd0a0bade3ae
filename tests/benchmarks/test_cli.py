"""``kvgate bench`` as it is typed, against a simulated worker in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.cluster import MODEL, Cluster, engines
from benchmarks.workloads.plan import read_plan
from extproc.cli import app

SECRET = "sk-very-secret"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[str]:
    cluster = Cluster(workers=1, timing="rtx-pro-6000")
    with engines(cluster, model_dir, tmp_path_factory.mktemp("engine")) as [engine]:
        yield engine.url


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(url: str, tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("load")
    flags = ("--url", url, "--model", MODEL, "--model-dir", model_dir, "--engine", url)
    size = ("--workload", "tenants", "--rate-per-s", 5, "--duration-s", 3, "--seed", 4)
    budgets = ("--ttft-ms", 5000, "--tpot-ms", 500)
    header = ("--header", f"authorization: Bearer {SECRET}")
    result = bench("load", *flags, *size, *budgets, *header, "--output", folder)
    assert result.exit_code == 0, result.output
    assert "TTFT p99 ms" in result.output
    assert SECRET not in result.output
    return folder


def test_a_load_run_writes_figures_that_fit_its_plan(folder: Path) -> None:
    result = json.loads((folder / "load.json").read_text())
    found = result["figures"]
    assert found["served"] == found["requests"] == result["plan"]["requests"] > 5
    assert found["off_plan"] == 0
    assert found["prompt_tokens"] == result["plan"]["prompt_tokens"]
    assert found["output_tokens"] == result["plan"]["output_tokens"]
    assert 0 < found["good"] <= found["served"]
    assert sum(lane["requests"] for lane in result["lanes"].values()) == found["requests"]
    assert result["settings"]["drive"]["seed"] == 4
    assert result["machine"]["cores"]


def test_a_load_run_writes_samples_and_plots(folder: Path) -> None:
    samples = (folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in samples] == list(range(len(samples)))
    for plot in ("ttft", "hit_ratio", "worker_load"):
        assert (folder / f"{plot}.png").read_bytes().startswith(b"\x89PNG")


def test_no_header_value_is_written_down(folder: Path) -> None:
    written = "".join(path.read_text() for path in folder.glob("*.json*"))
    assert "authorization" in written
    assert SECRET not in written


def test_a_plan_can_be_written_and_sent_again(url: str, model_dir: Path, tmp_path: Path) -> None:
    plan, flags = tmp_path / "plan.jsonl", ("--url", url, "--model-dir", model_dir)
    size = ("--workload", "rag", "--rate-per-s", 2, "--duration-s", 2)
    assert bench("load", *flags, *size, "--plan-to", plan).exit_code == 0
    result = bench("load", *flags, "--workload", plan, "--limit", 2, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "load.json").read_text())["figures"]
    assert found["served"] == min(2, len(read_plan(plan)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("load", "--url", "http://x", "--workload", "nothing"), "known workloads"),
        (("load", "--url", "http://x", "--workload", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("load", "--url", "http://x", "--header", "no colon"), "Name: value"),
        (("load", "--url", "http://x", "--rate-per-s", "0"), "rate_per_s"),
        (("compare", "--arm", "nginx"), "no arm 'nginx'"),
        (("simulate", "--script", "/nowhere.yaml"), "/nowhere.yaml"),
    ],
    ids=["workload", "trace", "header", "rate", "arm", "script"],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = bench(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1
