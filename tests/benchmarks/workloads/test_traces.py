from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workloads.plan import PlanError, Planned, Segment, write_plan
from benchmarks.workloads.traces import cut, read_trace, spread


def mooncake(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(**changes: Any) -> dict[str, Any]:
    fields = {"timestamp": 3_000, "input_length": 1_034, "output_length": 5, "hash_ids": [0, 1, 2]}
    return {**fields, **changes}


def test_mooncake_ids_become_segments_of_512_tokens(tmp_path: Path) -> None:
    [request] = read_trace(mooncake(tmp_path / "t.jsonl", row()))
    assert request == Planned(3.0, (Segment(0, 512), Segment(1, 512), Segment(2, 10)), 5)


@pytest.mark.parametrize("ids", [[0, 1], [0, 1, 2, 3]])
def test_mooncake_rows_need_an_id_for_each_block(tmp_path: Path, ids: list[int]) -> None:
    path = mooncake(tmp_path / "t.jsonl", row(), row(hash_ids=ids))
    with pytest.raises(PlanError, match=r"t\.jsonl:2: hash_ids"):
        read_trace(path)


def test_azure_rows_begin_at_the_first_and_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    first, second = read_trace(path)
    assert (first.at_s, second.at_s) == (0.0, pytest.approx(0.052))
    assert (first.prompt_tokens, second.output_tokens) == (4808, 8)
    assert first.prompt[0].id != second.prompt[0].id


def test_a_wrong_azure_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,10\n")
    with pytest.raises(PlanError, match=r"azure\.csv:2: .*many"):
        read_trace(path)


def test_other_azure_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,Tokens\n")
    with pytest.raises(PlanError, match="columns"):
        read_trace(path)


def test_kvgate_lines_are_known_by_their_content(tmp_path: Path) -> None:
    plan = [Planned(0.0, (Segment("a", 3),), 1)]
    write_plan(tmp_path / "t.jsonl", plan)
    assert read_trace(tmp_path / "t.jsonl") == plan


@pytest.mark.parametrize("content", ["", "\n", '{"prompt": "text"}\n'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(PlanError, match=r"t\.jsonl"):
        read_trace(tmp_path / "t.jsonl")


def test_a_clump_is_spread_evenly_by_seed() -> None:
    clump = [Planned(3.0, (Segment(n, 1),), 1) for n in range(1_000)]
    moved = [request.at_s for request in spread(clump, 3.0, seed=1)]
    assert moved == sorted(moved)
    assert moved[0] >= 3.0
    assert moved[-1] < 6.0
    assert sum(moved) / len(moved) == pytest.approx(4.5, abs=0.1)
    assert moved == [request.at_s for request in spread(clump, 3.0, seed=1)]
    assert moved != [request.at_s for request in spread(clump, 3.0, seed=2)]


def test_a_cut_starts_at_zero_and_runs_faster() -> None:
    plan = [Planned(float(n), (Segment(n, 10 * n),), 1) for n in range(1, 9)]
    part = cut(plan, skip=2, limit=4, speedup=2.0, max_prompt_tokens=50)
    assert [(request.at_s, request.prompt_tokens) for request in part] == [
        (0.0, 30),
        (0.5, 40),
        (1.0, 50),
    ]
