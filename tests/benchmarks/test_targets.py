"""Targets: what is read, and what counts as kept."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report_page.fields import find, number, value
from benchmarks.report_page.results import SOURCES
from benchmarks.targets import TARGETS, Checked, Target, check

TARGET = Target(what="time", source="s", field="ms", limit=2.0)
RATE = Target(what="rate", source="s", field="per_s", limit=2.0, at_least=True)


@pytest.mark.parametrize(
    ("target", "measured", "verdict"),
    [
        (TARGET, 1.9, "met"),
        (TARGET, 2.0, "met"),
        (TARGET, 2.1, "MISSED"),
        (RATE, 2.1, "met"),
        (RATE, 1.9, "MISSED"),
        (TARGET, None, "not measured"),
    ],
)
def test_a_target_is_kept_missed_or_not_measured(
    target: Target, measured: float | None, verdict: str
) -> None:
    checked = Checked(target, measured)
    assert checked.verdict == verdict
    assert checked.ratio == (None if measured is None else pytest.approx(measured / 2.0))


def test_every_target_names_a_benchmark_of_the_report() -> None:
    assert {target.source for target in TARGETS} <= {source.name for source in SOURCES}


def test_targets_without_results_are_not_measured() -> None:
    assert {each.verdict for each in check({})} == {"not measured"}


def test_targets_read_the_field_that_they_name() -> None:
    results: dict[str, Any] = {
        "overhead": {
            "workloads": [
                {
                    "workload": {"name": "8 KB chats, 16 connections", "kind": "chat"},
                    "above_bare_cpu_ms": {"median": 0.2},
                },
                {
                    "workload": {"name": "400 KB", "kind": "long", "size_bytes": 400_000},
                    "medians": {"kvgate": {"processor_cpu_ms": 7.0}},
                },
                {
                    "workload": {"name": "a tiny run", "kind": "small", "rate_per_s": 50.0},
                    "medians": {"kvgate": {"processor_cores": 0.01}},
                },
            ]
        },
        "simulate": {"sizes": {"1000": {"wall_s": 600.0, "simulated_s": 3_600.0}}},
    }
    told = {each.target.what: each for each in check(results) if each.measured is not None}
    assert {what: each.verdict for what, each in told.items()} == {
        "Scheduler CPU above a bare processor, 8 KB chats": "met",
        "Scheduler CPU, whole, 400 KB growing chats": "MISSED",
        "Wall-clock time of a simulated second with 1,000 workers": "met",
    }
    second = told["Wall-clock time of a simulated second with 1,000 workers"]
    assert second.measured == pytest.approx(1 / 6)
    assert second.target.read_from == "sizes.1000.wall_s / sizes.1000.simulated_s"


def test_the_best_other_arm_of_the_same_run_is_a_target() -> None:
    arms = {
        name: {"medians": {"ttft_p50_ms": ttft, "goodput_per_s": goodput}}
        for name, ttft, goodput in (("kvgate", 40.0, 9.0), ("x:y", 50.0, 8.0), ("z:w", 39.0, 9.5))
    }
    results = {"compare": {"workloads": {"mix": {"arms": arms}}}}
    told = [each for each in check(results) if each.measured is not None]
    assert [(each.target.what, each.target.limit, each.verdict) for each in told] == [
        ("TTFT p50 ms on mix, against z:w", 39.0, "MISSED"),
        ("goodput/s on mix, against z:w", 9.5, "MISSED"),
    ]
    assert [number(results["compare"], each.target.field) for each in told] == [40.0, 9.0]


# Paths

RESULT = {
    "arms": {"a": {"p": {"ms": 1}}, "b": {"p": {"ms": 2}}},
    "list": [
        {"name": "x y, z", "size": 8, "ms": 3.5},
        {"name": "x", "size": 16, "ms": None},
        {"name": "x y, z", "size": 16, "ms": 5.0},
    ],
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("arms.a.p.ms", [((), 1)]),
        ("arms[].p.ms", [(("a",), 1), (("b",), 2)]),
        ("arms[].p[]", [(("a", "ms"), 1), (("b", "ms"), 2)]),
        ("list[name].ms", [(("x y, z",), 3.5), (("x",), None), (("x y, z",), 5.0)]),
        ("list[name=x y, z].ms", [((), 3.5), ((), 5.0)]),
        ("list[name=x y, z][size=16].ms", [((), 5.0)]),
        ("list[size=16][name].ms", [(("x",), None), (("x y, z",), 5.0)]),
        ("nothing[].here", []),
        ("arms.a.p.ms.deeper", []),
    ],
)
def test_a_path_finds_every_field_with_its_labels(path: str, found: list[object]) -> None:
    assert list(find(RESULT, path)) == found


def test_only_numbers_are_numbers() -> None:
    assert number(RESULT, "arms.a.p.ms") == 1.0
    assert number(RESULT, "list[name=x].ms") is None
    assert number({"broken": True}, "broken") is None
    assert value(RESULT, "list[name=x].ms") is None
