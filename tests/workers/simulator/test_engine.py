from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.simulator.chain import BASE, Origin, TokenChain
from workers.simulator.config import EngineConfig
from workers.simulator.engine import Engine, StepResult
from workers.simulator.requests import BlockRemoved, BlocksStored, EngineRequest, Phase


def engine(**changes: Any) -> Engine:
    defaults = {"block_size": 4, "num_blocks": 16, "max_model_len": 64, "max_num_seqs": 4}
    return Engine(EngineConfig(**(defaults | changes)))


def request(
    name: str, prompt: int, answer: int = 1, first_token: int = 0, origin: Origin = BASE
) -> EngineRequest:
    ids = range(first_token, first_token + prompt + answer)
    return EngineRequest(name, TokenChain.of(ids, 4, origin), prompt, answer)


def finish(under_test: Engine, now: float = 0.0) -> list[StepResult]:
    results = []
    while (result := under_test.step(now)) is not None:
        results.append(result)
        now = result.ended_s
    return results


def test_a_request_gets_its_first_token_from_its_last_prefill_step() -> None:
    under_test = engine()
    under_test.add(request("a", prompt=10, answer=3), now=0.0)
    results = finish(under_test)
    assert [len(result.outputs) for result in results] == [1, 1, 1]
    assert [result.outputs[0].finish_reason for result in results] == [None, None, "length"]
    assert repr(under_test) == (
        "<Engine running=0 waiting=0 <BlockManager used=0 free=16 cached=3>>"
    )


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    under_test = engine(max_num_batched_tokens=8)
    under_test.add(request("a", prompt=20), now=0.0)
    results = finish(under_test)
    assert [len(result.outputs) for result in results] == [0, 0, 1]
    sizes = [len(e.hashes) for r in results for e in r.events if isinstance(e, BlocksStored)]
    assert sizes == [2, 2, 1]


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    under_test = engine(max_num_batched_tokens=8)
    under_test.add(request("short", prompt=4, answer=4), now=0.0)
    under_test.step(0.0)
    under_test.add(request("long", prompt=20, first_token=100), now=0.1)
    result = under_test.step(0.2)
    assert result is not None
    assert [output.request.request_id for output in result.outputs] == ["short"]
    assert under_test.running[1].computed == 7


def test_the_second_identical_prompt_hits_all_full_blocks_but_that_of_its_last_token() -> None:
    under_test = engine()
    for name, prompt, cached in (("a", 12, 0), ("b", 12, 8), ("c", 13, 12)):
        again = request(name, prompt)
        under_test.add(again, now=0.0)
        finish(under_test)
        assert again.cached_tokens == cached
    assert (under_test.stats.prefix_queries, under_test.stats.prefix_hits) == (37, 20)


def test_an_exact_multiple_stores_its_last_block_again() -> None:
    under_test = engine()
    under_test.add(request("a", 12), now=0.0)
    first = finish(under_test)[0].events
    under_test.add(request("b", 12), now=1.0)
    second = finish(under_test)[0].events
    assert isinstance(first[0], BlocksStored)
    assert isinstance(second[0], BlocksStored)
    assert second[0].hashes == first[0].hashes[-1:]
    assert second[0].parent == first[0].hashes[-2]


def test_a_pure_hit_emits_nothing() -> None:
    under_test = engine()
    under_test.add(request("a", 13), now=0.0)
    finish(under_test)
    under_test.add(request("b", 13), now=1.0)
    assert finish(under_test)[0].events == []


def test_the_answer_is_cached_but_for_its_last_token() -> None:
    under_test = engine()
    under_test.add(request("a", prompt=4, answer=5), now=0.0)
    finish(under_test)
    turn = request("b", prompt=12)
    under_test.add(turn, now=1.0)
    finish(under_test)
    assert turn.cached_tokens == 8


@pytest.mark.parametrize("other", [Origin(cache_salt="s"), Origin(adapter="x", adapter_id=1)])
def test_salts_and_adapters_share_nothing(other: Origin) -> None:
    under_test = engine()
    under_test.add(request("a", 13), now=0.0)
    finish(under_test)
    salted = request("b", 13, origin=other)
    under_test.add(salted, now=1.0)
    finish(under_test)
    assert salted.cached_tokens == 0


def test_first_come_first_served_within_max_num_seqs() -> None:
    under_test = engine(max_num_seqs=2)
    for name in "abc":
        under_test.add(request(name, 4, answer=2, first_token=ord(name)), now=0.0)
    order = [o.request.request_id for r in finish(under_test) for o in r.outputs]
    assert order == ["a", "b", "a", "b", "c", "c"]


def test_the_last_to_start_is_preempted_and_finishes_later() -> None:
    under_test = engine(num_blocks=4, max_model_len=16)
    first, last = request("a", 7, answer=6), request("b", 7, answer=6, first_token=50)
    under_test.add(first, now=0.0)
    under_test.add(last, now=0.0)
    under_test.step(0.0)
    under_test.step(0.1)
    step = under_test.begin(0.2)
    assert step is not None
    assert (first.phase, last.phase) == (Phase.RUNNING, Phase.PREEMPTED)
    assert under_test.stats.preemptions == 0  # as in vLLM, counted when it resumes
    under_test.complete(step)
    finish(under_test, 0.3)
    assert (first.generated, last.generated, last.preemptions) == (6, 6, 1)
    assert under_test.stats.preemptions == 1
    assert under_test.stats.prefix_queries == 14
    assert under_test.blocks.free == 4


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_an_abort_in_any_phase_gives_all_blocks_back(steps: int) -> None:
    under_test = engine(max_num_batched_tokens=8)
    under_test.add(request("a", prompt=20, answer=4), now=0.0)
    for now in range(steps):
        under_test.step(float(now))
    assert under_test.abort("a")
    assert not under_test.abort("a")
    assert under_test.step(9.0) is None
    assert under_test.blocks.free == 16


def test_an_abort_during_a_step_leaves_no_output() -> None:
    under_test = engine()
    under_test.add(request("a", 4), now=0.0)
    step = under_test.begin(0.0)
    assert step is not None
    under_test.abort("a")
    result = under_test.complete(step)
    assert result.outputs == []
    assert len(result.events) == 1
    assert under_test.blocks.free == 16


def test_a_pooling_request_ends_with_its_prefill() -> None:
    under_test = engine()
    under_test.add(request("a", 9, answer=0), now=0.0)
    (result,) = finish(under_test)
    assert (result.outputs[0].tokens, result.outputs[0].finish_reason) == (0, "stop")
    assert under_test.stats.generation_tokens == 0


def test_a_cleared_cache_is_announced_by_the_next_step() -> None:
    under_test = engine()
    under_test.add(request("a", 9), now=0.0)
    assert under_test.begin(0.0)
    assert not under_test.reset_prefix_cache()
    under_test.abort("a")
    assert under_test.reset_prefix_cache()
    under_test.add(request("b", 9), now=1.0)
    result = under_test.step(1.0)
    assert result is not None
    assert [type(event).__name__ for event in result.events] == ["AllBlocksCleared", "BlocksStored"]


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one request of max_model_len 65"):
        engine(max_model_len=65)
    with pytest.raises(ValueError, match="max_num_seqs must be positive, got 0"):
        engine(max_num_seqs=0)
    with pytest.raises(ValueError, match="exceeds max_model_len"):
        engine().add(request("a", 64), now=0.0)
    under_test = engine()
    under_test.add(request("a", 4), now=0.0)
    with pytest.raises(ValueError, match="is in use"):
        under_test.add(request("a", 4), now=0.0)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 8)), min_size=1, max_size=12),
    seqs=st.integers(1, 4),
    budget=st.integers(1, 16),
    seed=st.integers(0, 2**16),
)
def test_under_any_load_every_request_ends_and_events_tell_what_is_cached(
    sizes: list[tuple[int, int]], seqs: int, budget: int, seed: int
) -> None:
    rng = random.Random(seed)
    under_test = engine(num_blocks=8, max_model_len=32, max_num_seqs=seqs,
                        max_num_batched_tokens=budget)  # fmt: skip
    counts: dict[int, int] = {}
    left = [request(str(i), *size, rng.choice((0, 0, 50))) for i, size in enumerate(sizes)]
    everything, now, aborted = list(left), 0.0, 0
    while left or under_test.busy:
        if left and rng.random() < 0.5:
            under_test.add(left.pop(0), now)
        if rng.random() < 0.05:
            aborted += under_test.abort(str(rng.randrange(len(sizes))))
        result = under_test.step(now)
        now = result.ended_s if result else now + 1.0
        for event in result.events if result else ():
            if isinstance(event, BlocksStored):
                for block_hash in event.hashes:
                    counts[block_hash] = counts.get(block_hash, 0) + 1
            elif isinstance(event, BlockRemoved):
                counts[event.block_hash] -= 1
        assert len(under_test.running) <= seqs
    assert under_test.blocks.free == 8
    complete = sum(r.generated == r.answer_tokens for r in everything)
    assert complete >= len(everything) - aborted
    assert all(r.phase is Phase.FINISHED for r in everything)
    assert min(counts.values(), default=0) >= 0
    assert under_test.blocks.cached == sum(count > 0 for count in counts.values())
