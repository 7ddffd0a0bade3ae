"""Workloads whose prompts grow: chats and agents.

What an assistant said comes back as text of that length, not as the engine's own words (as in
Mooncake's traces), so it has to be computed once more by whoever serves the next turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import takewhile

import msgspec

from benchmarks.workloads.plan import Planned, Segment
from benchmarks.workloads.shapes import Count, Positive, Spread, Zipf, arrivals


class _Growth(msgspec.Struct, frozen=True):
    """How one kind of conversation grows."""

    turns: Spread
    gap_s: Spread
    ask: Spread
    answer: Spread
    most_tokens: int


class Chats(msgspec.Struct, frozen=True, tag="chats", tag_field="kind", forbid_unknown_fields=True):
    """Users who come back with the whole conversation so far.

    ``rate_per_s`` conversations begin. Turns are those of Mooncake's conversation trace (p50 1,
    p90 3, p99 8) seen from the conversations that go on: 1-turn ones are left to ``shared``. The
    trace's gaps (p50 123 s, p90 483 s) are 25 times as short.
    """

    rate_per_s: Positive = 8.0
    duration_s: Positive = 45.0
    seed: int = 1
    system_prompts: Count = 8
    system_tokens: Count = 500
    turns: Spread = Spread(4, 8, 12)
    gap_s: Spread = Spread(4.9, 19.3, 60)
    ask_tokens: Spread = Spread(100, 400, 2_000)
    answer_tokens: Spread = Spread(129, 424, 1_000)
    most_prompt_tokens: Count = 16_000

    def requests(self) -> list[Planned]:
        """All requests, in order of time."""
        growth = _Growth(
            self.turns, self.gap_s, self.ask_tokens, self.answer_tokens, self.most_prompt_tokens
        )
        return _grown(self, growth, self.system_prompts, self.system_tokens)


class Agents(
    msgspec.Struct, frozen=True, tag="agents", tag_field="kind", forbid_unknown_fields=True
):
    """Agents that call tools in long chains: big shared instructions, many short answers.

    Answers are those of Mooncake's synthetic trace (p50 69, p90 389 tokens), whose tool and
    agent prompts have a median of 11,587 tokens.
    """

    rate_per_s: Positive = 1.0
    duration_s: Positive = 45.0
    seed: int = 1
    kinds: Count = 6
    instruction_tokens: Count = 4_000
    steps: Spread = Spread(10, 20, 30)
    gap_s: Spread = Spread(0.8, 3.0, 15)
    result_tokens: Spread = Spread(300, 1_500, 6_000)
    answer_tokens: Spread = Spread(69, 389, 893)
    most_prompt_tokens: Count = 28_000

    def requests(self) -> list[Planned]:
        """All requests, in order of time."""
        growth = _Growth(
            self.steps, self.gap_s, self.result_tokens, self.answer_tokens, self.most_prompt_tokens
        )
        return _grown(self, growth, self.kinds, self.instruction_tokens)


def _grown(
    workload: Chats | Agents, growth: _Growth, shared: int, shared_tokens: int
) -> list[Planned]:
    kind = type(workload).__name__.lower()
    rng = random.Random(f"{kind} {workload.seed}")
    popularity = Zipf(shared, 1.0)
    requests: list[Planned] = []
    starts = list(arrivals(rng, workload.rate_per_s, workload.duration_s))
    for number, start_s in enumerate(starts):
        system = Segment(f"{kind}-{popularity.draw(rng)}", shared_tokens, "system")
        turns = _conversation(rng, f"{kind}-{workload.seed}-{number}", system, start_s, growth)
        requests += takewhile(lambda turn: turn.at_s < workload.duration_s, turns)
    return sorted(requests, key=lambda request: request.at_s)


def _conversation(
    rng: random.Random, session: str, system: Segment, at_s: float, growth: _Growth
) -> Iterator[Planned]:
    """All turns, however late; it draws the same whatever is used of it."""
    prompt = [system]
    turns = []
    for turn in range(growth.turns.count(rng)):
        prompt.append(Segment(f"{session}-ask-{turn}", growth.ask.count(rng), "user"))
        answer = growth.answer.count(rng)
        request = Planned(at_s, tuple(prompt), answer, session=session)
        if request.prompt_tokens <= growth.most_tokens:
            turns.append(request)
        prompt.append(Segment(f"{session}-answer-{turn}", answer, "assistant"))
        at_s += growth.gap_s.draw(rng)
    return iter(turns)
