"""Text mode: prompts of pools without a tokenizer have keys over characters."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.policy import TokenizationPolicy
from extproc.request.profile import ChatPrompt, TextPrompt
from extproc.tokens.blocks import Keys
from tests.support.builders import BLOCK, Fleet, chat, keyed_one, keyer, ready

CHARS = 4 * BLOCK
MAKER = keyer()


def keys(prompt: Any, **changes: Any) -> Keys:
    return keyed_one(MAKER, prompt, **changes).keys


def shared(one: Keys, other: Keys) -> int:
    pairs = zip(one.tolist(), other.tolist(), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(common=st.text(max_size=400), one=st.text(max_size=90), other=st.text(max_size=90))
def test_texts_share_the_blocks_that_they_share(common: str, one: str, other: str) -> None:
    first, second = keys(TextPrompt(common + one)), keys(TextPrompt(common + other))
    assert len(first) == max(0, len(common + one) - 1) // CHARS
    assert shared(first, second) >= min(len(common) // CHARS, len(first), len(second))


def test_a_block_is_a_number_of_characters_in_any_script() -> None:
    for letter in "xé語😀\ud800":
        prompt = keyed_one(MAKER, TextPrompt(letter * 10 * CHARS + letter))
        assert len(prompt.keys) == 10
        assert prompt.tokens > 10 * BLOCK


def test_the_next_turn_finds_the_one_before() -> None:
    before = keys(chat("s" * 100, "a" * 100))
    after = keys(chat("s" * 100, "a" * 100, "more"))
    assert shared(before, after) == len(before) > 10


def test_what_changes_the_prompt_changes_its_keys() -> None:
    plain = chat("s" * 100)
    tools = [{"type": "function", "function": {"name": "f"}}]
    others = [
        ChatPrompt(plain.messages, tools=tools),
        ChatPrompt(plain.messages, documents=[{"text": "t"}]),
        ChatPrompt(plain.messages, template_kwargs={"enable_thinking": False}),
        ChatPrompt([{"role": "system", "content": "s" * 100}]),
    ]
    firsts = {int(keys(prompt)[0]) for prompt in (plain, *others)}
    assert len(firsts) == 5


def test_salt_and_adapter_keep_apart_and_tokens_are_something_else() -> None:
    prompt = TextPrompt("s" * 100)
    made = [keys(prompt), keys(prompt, cache_salt="a"), keys(prompt, model="lora")]
    assert len({int(each[0]) for each in made}) == 3


def test_an_image_ends_what_is_known() -> None:
    content = [
        {"type": "text", "text": "look " * 50},
        {"type": "image_url", "image_url": {"url": "x" * 1_000}},
    ]
    messages = [{"role": "user", "content": "a" * 100}, {"role": "user", "content": content}]
    prompt = keyed_one(MAKER, ChatPrompt(messages, media_parts=1))
    assert shared(prompt.keys, keys(chat("a" * 100))) >= 100 // CHARS
    assert len(prompt.keys) <= 160 // CHARS
    assert prompt.tokens > 600


def test_a_long_text_is_cut_and_counted() -> None:
    maker = keyer(tokenization=TokenizationPolicy(max_prompt_chars=10 * CHARS))
    prompt = keyed_one(maker, TextPrompt("x" * 100 * CHARS))
    assert len(prompt.keys) == 10
    assert prompt.tokens >= 100 * BLOCK


def test_nesting_that_no_engine_reads_has_no_keys() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert len(keys(ChatPrompt([], tools=[{"function": {"parameters": nested}}]))) == 0


def test_a_conversation_stays_where_it_was_for_minutes() -> None:
    """Digests tell nothing of such keys, so what was routed is believed for long."""
    fleet = Fleet(workers=8, overlay={"ttl_s": 2.0, "ttl_without_digest_s": 300.0})
    first = keyed_one(MAKER, chat("s" * 4_000))
    home = fleet.picked(first)
    for now in range(1, 60):
        for worker in fleet.workers:
            fleet.scheduler.report(fleet.served, worker, ready(), float(now))
        fleet.scheduler.tick(float(now))
    assert fleet.picked(keyed_one(MAKER, chat("s" * 4_000, "b" * 90)), now=59.0) == home
    assert fleet.pool.cached_blocks(first.keys).max() == len(first.keys)
