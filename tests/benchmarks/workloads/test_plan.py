from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.workloads.plan import PlanError, Planned, Segment, read_plan, write_plan

REQUESTS = [
    Planned(0.5, (Segment("s", 100, "system"), Segment("q", 20, "user")), 8, tenant="a"),
    Planned(1.0, (Segment(7, 512), Segment(8, 30)), 16, session="c", lane="batch"),
]


def test_a_written_plan_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.jsonl"
    write_plan(path, REQUESTS)
    assert read_plan(path) == REQUESTS


def test_a_plan_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    write_plan(path, reversed(REQUESTS))
    assert [request.at_s for request in read_plan(path)] == [0.5, 1.0]


def test_a_prompt_has_the_tokens_of_its_segments() -> None:
    assert [request.prompt_tokens for request in REQUESTS] == [120, 542]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"at_s": -1, "prompt": [["a", 1]], "output_tokens": 1}', "at_s"),
        ('{"at_s": 0, "prompt": [], "output_tokens": 1}', "prompt"),
        ('{"at_s": 0, "prompt": [["a", 0]], "output_tokens": 1}', "prompt"),
        ('{"at_s": 0, "prompt": [["a", 1, "nobody"]], "output_tokens": 1}', "nobody"),
        ('{"at_s": 0, "prompt": [["a", 1]], "output_tokens": 0}', "output_tokens"),
        ('{"at_s": 0, "prompt": [["a", 1]], "output_tokens": 1, "lame": ""}', "lame"),
        ("not json", "malformed"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(PlanError, match=rf"plan\.jsonl:2: .*{field}"):
        read_plan(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nowhere"):
        read_plan(tmp_path / "nowhere.jsonl")
