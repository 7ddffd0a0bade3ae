"""Prompts have exactly the planned tokens and share exactly the planned segments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.catalog import KINDS, workload
from benchmarks.workloads.plan import PlanError, Planned, Segment
from benchmarks.workloads.prompts import PromptMaker

SHORTEST = 40
"""More than the template adds to a message."""


@pytest.fixture(scope="module")
def maker(model_dir: Path) -> PromptMaker:
    return PromptMaker(model_dir)


def ids(maker: PromptMaker, *prompt: Segment) -> list[int]:
    return maker.token_ids(maker.messages(Planned(0.0, prompt, 1)))


def shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


segments = st.builds(
    Segment,
    st.one_of(st.integers(0, 50), st.sampled_from(["a", "b", "c"])),
    st.integers(SHORTEST, 400),
    st.sampled_from([None, "system", "user", "assistant"]),
)


@given(prompt=st.lists(segments, min_size=1, max_size=8))
def test_the_engine_counts_the_planned_tokens(maker: PromptMaker, prompt: list[Segment]) -> None:
    assert len(ids(maker, *prompt)) == sum(segment.tokens for segment in prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_every_workload_has_the_planned_tokens(maker: PromptMaker, kind: str) -> None:
    for request in workload(kind, duration_s=6.0).requests()[:40]:
        assert len(ids(maker, *request.prompt)) == request.prompt_tokens


@given(
    common=st.lists(segments, min_size=1, max_size=4),
    ends=st.tuples(st.integers(SHORTEST, 300), st.integers(SHORTEST, 300)),
)
def test_prompts_share_the_segments_that_they_begin_with(
    maker: PromptMaker, common: list[Segment], ends: tuple[int, int]
) -> None:
    one, other = (
        ids(maker, *common, Segment(f"end-{number}", size, "user"))
        for number, size in enumerate(ends)
    )
    # What the template puts between two messages is the same for both.
    between = 16
    together = sum(segment.tokens for segment in common)
    assert together - between <= shared(one, other) <= together + between


def test_blocks_of_a_trace_are_shared_to_the_token(maker: PromptMaker) -> None:
    blocks = [Segment(number, 512) for number in range(3)]
    one = ids(maker, *blocks, Segment(10, 200))
    other = ids(maker, *blocks, Segment(11, 300))
    assert shared(one, other) == 3 * 512


def test_a_chat_only_grows(maker: PromptMaker) -> None:
    turns = [Segment("s", 100, "system"), Segment("q", 50, "user"), Segment("a", 70, "assistant")]
    first = ids(maker, *turns[:2])
    second = ids(maker, *turns, Segment("r", 60, "user"))
    assert second[: len(first)] == first


def test_text_depends_on_seed_and_id_alone(model_dir: Path, maker: PromptMaker) -> None:
    request = Planned(0.0, (Segment("x", 100),), 1)
    assert PromptMaker(model_dir).messages(request) == maker.messages(request)
    assert PromptMaker(model_dir, seed=2).messages(request) != maker.messages(request)


def test_a_message_too_short_for_the_template_has_one_word(maker: PromptMaker) -> None:
    [message] = maker.messages(Planned(0.0, (Segment("x", 1),), 1))
    assert len(message["content"].split()) == 1


def test_a_model_without_template_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="no chat template"):
        PromptMaker(tmp_path)
