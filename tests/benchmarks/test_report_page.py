"""``kvgate bench report``: from real results of small runs, broken ones, and none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks import hot_path, middleware, queue_costs, routing_cost
from benchmarks.cluster import Cluster
from benchmarks.compare import Comparison
from benchmarks.compare import run as run_comparison
from benchmarks.machine import command_line
from benchmarks.overload import Overload
from benchmarks.overload import run as run_overload
from benchmarks.report import write_json
from benchmarks.report_page import readme
from benchmarks.report_page.fields import find, value
from benchmarks.report_page.layouts import LAYOUTS
from benchmarks.report_page.results import SOURCES
from benchmarks.simulation.run import Simulate
from benchmarks.simulation.run import run as run_simulation
from extproc.cli import app

MARKERS = f"# Project\n\n{readme.BEGIN}\n{readme.END}\n\nThe end.\n"


def report(folder: Path, *flags: object) -> Result:
    arguments = ["bench", "report", "--results", folder, *flags]
    return CliRunner().invoke(app, list(map(str, arguments)))


def page(folder: Path) -> str:
    result = report(folder)
    assert result.exit_code == 0, result.output
    return (folder / "REPORT.md").read_text()


def result_of(folder: Path, source: str) -> dict[str, Any]:
    [file] = [each.file for each in SOURCES if each.name == source]
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found


# What is there and what is not


def test_without_results_every_benchmark_says_how_it_is_measured(tmp_path: Path) -> None:
    text = page(tmp_path)
    for source in SOURCES:
        assert f"not measured: run `make bench-{source.name}`" in text
    assert "make bench-compare" in text
    assert "MISSED" not in text


def test_every_benchmark_of_the_report_has_its_target() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    modules = makefile.split("BENCH_MODULES := ")[1].split("\n")[0].split()
    for source in SOURCES:
        assert source.name in modules or f"\nbench-{source.name}: " in makefile


@pytest.mark.parametrize("content", ["", '{"machine"', "[1, 2]", '{"sizes": 3}', "\xff"])
def test_a_broken_result_stops_nothing(content: str, tmp_path: Path) -> None:
    for source in SOURCES:
        (tmp_path / source.file).parent.mkdir(exist_ok=True)
        (tmp_path / source.file).write_text(content, encoding="latin-1")
    assert "## simulate" in page(tmp_path)


# Real results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """Small runs of the benchmarks that take seconds."""
    folder = tmp_path_factory.mktemp("results")
    routing_cost.run(
        routing_cost.Settings((10,), 8, 5, decisions=20, output=folder / "routing_cost.json")
    )
    middleware.run(middleware.Settings(1, 2, 2, 4, folder / "middleware.json"))
    run_simulation(
        Simulate((2, 4), duration_s=5.0, output=folder / "simulate"),
        model_dir,
    )
    return folder


MADE = ("routing-cost", "middleware", "simulate")


NOT_ASKED_FOR = ("queues", "growth_with_queue")


@pytest.mark.parametrize("source", MADE)
def test_every_column_of_the_report_is_a_field_of_the_result(source: str, folder: Path) -> None:
    assert_columns_are_there(folder, source)


def assert_columns_are_there(folder: Path, source: str) -> None:
    result = result_of(folder, source)
    for layout in LAYOUTS[source]:
        if layout.rows.startswith(NOT_ASKED_FOR):
            continue
        rows = [row for _, row in find(result, layout.rows)]
        assert rows, layout.rows
        for column in layout.columns:
            assert any(value(row, column.field) is not None for row in rows), column.field


def test_the_report_tells_figures_dates_and_the_machine(folder: Path) -> None:
    text = page(folder)
    told = result_of(folder, "routing-cost")
    assert told["machine"]["cpu"] in text
    assert told["machine"]["date"] in text
    [balanced] = [each for each in told["results"] if each["profile"] == "balanced"]
    assert f"| balanced | 10 | {balanced['p50_ms']:.3f} |" in text
    assert "](simulate/" not in text or (folder / "simulate").is_dir()
    assert "not measured: run `make bench-compare`" in text
    assert str(folder) not in text


def test_plots_are_linked_from_where_the_report_is(folder: Path) -> None:
    (folder / "simulate" / "ttft.png").write_bytes(b"\x89PNG")
    (folder / "simulate" / "worker_load_1.png").write_bytes(b"\x89PNG")
    text = page(folder)
    assert "![ttft](simulate/ttft.png)" in text
    assert "[worker load 1](simulate/worker_load_1.png)" in text


# Against others


def arm(ttft_p99_ms: float, goodput: float, **medians: float) -> dict[str, Any]:
    figures = {
        "hit_ratio": 0.5,
        "ttft_p50_ms": 40.0,
        "ttft_p99_ms": ttft_p99_ms,
        "load_deviation": 2.0,
        "output_tokens_per_s": 100.0,
        "goodput_per_s": goodput,
        "queue_ms": 10.0,
        "not_served": 0.0,
        **medians,
    }
    shown = [{"shown": {name: 0.99 * told for name, told in figures.items()}}, {"shown": figures}]
    command = ["/opt/venv/bin/router", "--config", "/tmp/x/router.yaml", "--policy", "best"]
    return {"command": command, "rounds": shown, "medians": figures}


COMPARED = {
    "settings": {"seed": 7, "rounds": 2, "cluster": {"workers": 8}},
    "versions": {"peer": "1.2.3"},
    "skipped": {"absent:any": "No matching distribution found"},
    "workloads": {
        "mix": {
            "arms": {
                "kvgate": arm(300.0, 9.0),
                "kvgate:health": arm(10.0, 90.0),
                "peer:aware": arm(200.0, 9.0, hit_ratio=0.6, not_served=3.0),
                "envoy:ring_hash": arm(800.0, 5.0),
            }
        },
        "failed": {"arms": {"kvgate": {"command": [], "rounds": [], "medians": {}}}},
    },
}


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    write_json(tmp_path / "compare" / "compare.json", COMPARED)
    return tmp_path


def test_where_kvgate_is_not_ahead_the_report_says_why(compared: Path) -> None:
    text = page(compared)
    assert "| mix | goodput/s | 9.00 | 9.00 (peer:aware) | ahead |" in text
    assert "| mix | TTFT p99 ms | 300 | 200 (peer:aware) | NOT AHEAD |" in text
    [why] = [line for line in text.splitlines() if line.startswith("- mix, TTFT p99 ms, behind")]
    assert "hit ratio 0.500 against 0.600" in why
    assert "left 3 requests without an answer" in why
    assert why.endswith("in every round.")
    assert "behind kvgate" not in text
    assert "Best in how many of 3: kvgate 2, peer:aware 1." in text
    assert "kvgate finished no round of failed." in text


def test_every_arm_shows_its_configuration_and_no_folder(compared: Path) -> None:
    text = page(compared)
    assert "peer:aware 1.2.3" in text
    assert "router --config router.yaml --policy best" in text
    assert "absent:any is missing: No matching distribution found" in text
    assert "/tmp" not in text
    assert "/opt" not in text


# The README


def test_the_readme_gets_a_short_summary_between_its_markers(compared: Path) -> None:
    path = compared / "README.md"
    path.write_text(MARKERS)
    assert report(compared, "--readme", path).exit_code == 0
    text = path.read_text()
    assert text.startswith(f"# Project\n\n{readme.BEGIN}\n")
    assert text.endswith(f"{readme.END}\n\nThe end.\n")
    assert "| mix: kvgate | 0.500 | **40** | 300 |" in text
    assert "| best other, each figure | 0.600 | 40 | 200 |" in text
    assert "Medians of 2 rounds, 8 simulated workers" in text
    assert len(text.splitlines()) < 20
    once = text
    assert report(compared, "--readme", path).exit_code == 0
    assert path.read_text() == once


def test_parts_without_results_keep_the_figures_of_before(compared: Path, tmp_path: Path) -> None:
    path = compared / "README.md"
    path.write_text(MARKERS)
    report(compared, "--readme", path)
    (compared / "compare" / "compare.json").unlink()
    overload = {
        "settings": {"factor": 3.0},
        "goodput_ratio": 2.0,
        "arms": {"admission on": {"figures": {"goodput_per_s": 4.0, "ttft_s": {"p99": 0.9}}}},
    }
    write_json(compared / "overload" / "overload.json", overload)
    report(compared, "--readme", path)
    text = path.read_text()
    assert "| mix: kvgate |" in text
    assert "At 3 times the sustainable rate" in text
    assert text.index("mix: kvgate") < text.index("sustainable") < text.index("Targets:")


def test_without_any_result_the_readme_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(MARKERS)
    assert report(tmp_path, "--readme", path).exit_code == 0
    assert path.read_text() == MARKERS


def test_a_readme_without_markers_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# Project\n")
    result = report(tmp_path, "--readme", path)
    assert result.exit_code == 2
    assert readme.BEGIN in result.output
    assert path.read_text() == "# Project\n"


def test_the_project_readme_has_its_markers() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1


# Commands


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/v/bin/python", "/v/bin/kvgate", "bench", "load"], "kvgate bench load"),
        (["python3", "-m", "benchmarks.overhead", "--seed", "2"], None),
        (["p", "kvgate", "--workload", "/t/m.jsonl"], "kvgate --workload m.jsonl"),
        (["p", "kvgate", "--output=/t/x/y"], "kvgate --output=y"),
        (["p", "kvgate", "--url", "http://h:80/v1"], "kvgate --url http://h:80/v1"),
        (["p", "kvgate", "--header", "k: secret", "-x"], "kvgate --header ... -x"),
        (["p", "kvgate", "--header-b=k: secret"], "kvgate --header-b=..."),
    ],
)
def test_a_command_is_told_without_folders_and_keys(words: list[str], told: str | None) -> None:
    assert command_line(words) == (told or " ".join(words))


# What takes longer


@pytest.mark.bench
def test_results_in_process_have_the_columns(tmp_path: Path) -> None:
    queue_costs.main(queued=900, output=tmp_path / "queue_costs.json")
    hot_path.run(hot_path.Settings(rounds=3, workers=(10,), output=tmp_path / "hot_path.json"))
    for source in ("queue-costs", "hot-path"):
        assert_columns_are_there(tmp_path, source)


@pytest.mark.bench
def test_comparisons_and_overloads_have_the_columns(tmp_path: Path, model_dir: Path) -> None:
    cluster = Cluster(workers=2, max_num_seqs=2, timing="rtx-pro-6000")
    arms = ("kvgate", "envoy:round_robin")
    comparison = Comparison(arms, ("chats",), duration_s=3.0, rate_per_s=2.0, cluster=cluster)
    run_comparison(replaced(comparison, output=tmp_path / "compare"), model_dir)
    overload = Overload(seconds=3.0, rate_per_s=6.0, cluster=cluster, tenants=4)
    run_overload(replaced(overload, output=tmp_path / "overload"), model_dir)
    for source in ("compare", "overload"):
        assert_columns_are_there(tmp_path, source)
    text = page(tmp_path)
    assert "(envoy:round_robin)" in text
    assert "![chats ttft](compare/chats/ttft.png)" in text


def replaced(settings: Any, output: Path) -> Any:
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return type(settings)(**{**fields, "output": output})
