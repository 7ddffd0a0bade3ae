from __future__ import annotations

import pytest

from benchmarks.workloads.ceiling import ceiling_hit_ratio
from benchmarks.workloads.plan import Planned, Segment
from benchmarks.workloads.source import Source


def plan(*prompts: list[tuple[str, int]]) -> list[Planned]:
    return [
        Planned(float(number), tuple(Segment(*each) for each in prompt), 1)
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("prompts", "found", "total"),
    [
        ([], 0, 1),
        ([[("a", 10)]], 0, 10),
        ([[("a", 10)], [("a", 10)]], 10, 20),
        # A shorter segment is the beginning of a longer one of its id, both ways round.
        ([[("a", 10)], [("a", 30)], [("a", 20)]], 10 + 20, 60),
        # What follows counts only after the same beginning, and only as far as it is the same.
        ([[("a", 10), ("b", 5)], [("a", 10), ("b", 5), ("c", 1)]], 15, 31),
        ([[("a", 10), ("b", 5)], [("c", 10), ("b", 5)]], 0, 30),
        ([[("a", 10), ("b", 5)], [("a", 9), ("b", 5)]], 9, 29),
        ([[("a", 10), ("b", 5)], [("x", 1), ("b", 5)], [("a", 10), ("x", 1), ("b", 5)]], 10, 37),
    ],
)
def test_what_an_earlier_prompt_began_with_is_found(
    prompts: list[list[tuple[str, int]]], found: int, total: int
) -> None:
    assert ceiling_hit_ratio(plan(*prompts)) == pytest.approx(found / total)


def test_shared_prompts_are_mostly_shared() -> None:
    shared = Source("shared", seed=1, duration_s=20.0).requests()
    assert 0.8 < ceiling_hit_ratio(shared) < 0.95
    assert ceiling_hit_ratio(shared[:1]) == 0.0
