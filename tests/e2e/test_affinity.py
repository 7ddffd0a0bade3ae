"""Prompts go where their prefix is cached, until that worker is loaded."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.e2e.chat import ask, asked, chat, client_for, text
from tests.support.system import System, eventually

BLOCK_TOKENS = 16


async def test_a_system_prompt_asked_thirty_times_stays_on_one_worker(system: System) -> None:
    prompt = text(2_700, seed=1)
    async with client_for(system.url) as client:
        answers = [await ask(client, asked(prompt, f"question {n}?")) for n in range(30)]
    assert {answer.status for answer in answers} == {200}
    assert answers[0].prompt_tokens > 3_000
    assert Counter(a.worker for a in answers).most_common(1)[0][1] >= 29
    for answer in answers[1:]:
        assert answer.cached >= 3_000 - BLOCK_TOKENS


async def test_a_prefix_with_many_continuations_is_shown_as_hot(system: System) -> None:
    prompt = text(300, seed=40)
    async with client_for(system.url) as client:
        for number in range(8):
            await ask(client, asked(prompt, text(60, seed=number)))
    eventually(lambda: any(w["hot_prefixes"] for w in system.fleet()), "it is told", 10)
    assert system.metric("kvgate_protocol_errors_total") == 0


async def test_sixty_at_once_spread_once_the_holder_is_loaded(system: System) -> None:
    prompt = text(2_700, seed=2)
    gate = asyncio.Semaphore(30)

    async def one(client: object, number: int) -> str:
        async with gate:
            body = asked(prompt, f"question {number}?", max_tokens=200)
            answer = await ask(client, body)  # type: ignore[arg-type]
            assert answer.status == 200
            return answer.worker

    async with client_for(system.url) as client:
        await ask(client, asked(prompt, "the first question"))
        workers = await asyncio.gather(*(one(client, number) for number in range(60)))
    share = Counter(workers)
    print("spread:", dict(share))
    assert len(share) == len(system.workers)
    assert max(share.values()) <= 36


async def test_predicted_cached_tokens_are_the_engines_within_one_block(system: System) -> None:
    conversations = [[{"role": "system", "content": text(300, seed=100 + n)}] for n in range(10)]
    off = []
    async with client_for(system.url) as client:
        for turn in range(20):
            for number, messages in enumerate(conversations):
                messages.append({"role": "user", "content": text(40, seed=turn * 100 + number)})
                answer = await ask(client, chat(messages, max_tokens=24))
                messages.append({"role": "assistant", "content": answer.content})
                off.append(abs(answer.predicted - answer.cached))
    good = sum(difference <= BLOCK_TOKENS for difference in off)
    print(f"within one block: {good} of {len(off)}, worst {max(off)} tokens")
    assert len(off) == 200
    assert good >= 198
