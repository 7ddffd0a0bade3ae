from __future__ import annotations

import random
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from extproc.policy import TokenizationPolicy
from extproc.request.profile import ChatPrompt, Prompt, TextPrompt, TokenPrompt, UnknownPrompt
from extproc.tokens.blocks import block_keys, root_key
from extproc.tokens.keyer import PromptKeyer, PromptKeys
from extproc.tokens.messages import MEDIA_MARK, normalise_messages
from extproc.tokens.template import ChatTemplate
from extproc.tokens.tokenizer import SegmentTokenizer
from tests.support.builders import (
    BLOCK,
    chat,
    keyed,
    keyed_one,
    keyer,
    model_keyer,
    pool_policy,
    profile,
    template_of,
    tokenizer_of,
)
from workers.simulator.model import SPECIAL_TOKENS

TEXTS = st.lists(
    st.sampled_from([*SPECIAL_TOKENS, "<|im_", "\n", " ", "Hello there, ", "def f(x):\n", "🙂"])
    | st.text(max_size=8),
    max_size=8,
).map("".join)
TURNS = st.lists(TEXTS, min_size=1, max_size=5)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@cache
def raw_tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


class Whole:
    """The way of the engine: render, tokenise the whole text, chain."""

    def __init__(self, model_dir: Path, keyer: PromptKeyer) -> None:
        self.tokenizer = raw_tokenizer(model_dir)
        self.template = template_of(model_dir)
        self.keyer = keyer

    def of_text(self, value: str) -> PromptKeys:
        ids = self.tokenizer.encode(value, add_special_tokens=False).ids
        keys = block_keys(root_key(self.keyer.namespace, BLOCK), ids, BLOCK)
        return PromptKeys(len(ids), keys, exact=True)

    def of_chat(self, prompt: ChatPrompt) -> PromptKeys:
        messages = normalise_messages(prompt.messages, "string")
        return self.of_text(self.template.render(messages))


def same(ours: PromptKeys, theirs: PromptKeys) -> bool:
    flags = (ours.tokens, ours.exact) == (theirs.tokens, theirs.exact)
    return flags and ours.keys.tolist() == theirs.keys.tolist()


class TestExactness:
    """TK1: keys are exactly those of the whole tokenised text."""

    @given(value=TEXTS)
    def test_a_text_has_the_keys_of_its_whole(self, model_dir: Path, value: str) -> None:
        maker = model_keyer(model_dir)
        whole = Whole(model_dir, maker)
        for _ in range(2):  # cold, then from the caches
            assert same(keyed_one(maker, TextPrompt(value)), whole.of_text(value))

    @given(chats=st.lists(TURNS, min_size=1, max_size=4), cache=st.sampled_from([1, 900, 10**7]))
    def test_growing_chats_have_the_keys_of_their_whole(
        self, model_dir: Path, chats: list[list[str]], cache: int
    ) -> None:
        """Through boundary caches that keep nothing, little or all."""
        bounds = TokenizationPolicy(segment_cache_bytes=cache, boundary_cache_bytes=cache)
        maker = model_keyer(model_dir, tokenization=bounds)
        whole = Whole(model_dir, maker)
        for turns in chats:
            for length in range(1, len(turns) + 1):
                prompt = chat(*turns[:length])
                assert same(keyed_one(maker, prompt), whole.of_chat(prompt))

    def test_boundaries_within_a_long_chat_are_exact_too(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        whole = Whole(model_dir, maker)
        turns = [f"Turn {number}. " + "lorem ipsum dolor " * 40 for number in range(12)]
        keyed_one(maker, chat(*turns))
        assert len(maker.boundaries.cache) > 2
        for changed in range(0, 12, 3):
            other = [*turns[:changed], "Another turn.", *turns[changed + 1 :]]
            assert same(keyed_one(maker, chat(*other)), whole.of_chat(chat(*other)))

    def test_the_second_turn_holds_the_blocks_of_the_first(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        first = keyed_one(maker, chat("Tell me of Köln."))
        second = keyed_one(maker, chat("Tell me of Köln.", "It is old.", "How old?"))
        blocks = (first.tokens - 1) // BLOCK
        assert second.keys[:blocks].tolist() == first.keys.tolist()
        assert len(second.keys) > blocks > 0


class TestCaches:
    def test_known_text_is_not_tokenised_again(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        keyed_one(maker, chat("system-like text", "x", "first question"))
        prepared = maker.prepare(profile(chat("system-like text", "x", "second question")))
        assert "".join(prepared.cold) == "user\nsecond question"
        assert prepared.cold_chars == len("user\nsecond question")
        assert not maker.prepare(profile(chat("system-like text"))).cold

    def test_a_chat_goes_on_from_its_last_boundary(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        keyed_one(maker, chat("a", "b", "c"))
        before = maker.boundaries.cache.hits
        keyed_one(maker, chat("a", "b", "c", "d", "e"))
        assert maker.boundaries.cache.hits == before + 1

    def test_the_known_part_of_a_long_chat_is_not_read_again(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        turns = [f"Turn {number}. " + "lorem ipsum dolor " * 60 for number in range(41)]
        keyed_one(maker, chat(*turns[:39]))
        assert self.read_from(maker, model_dir, chat(*turns)) > 0.9 * 39 * len(turns[0])

    def test_chats_that_share_a_long_start_go_on_from_it(self, model_dir: Path) -> None:
        """However many they are, and whichever came last."""
        maker = model_keyer(model_dir)
        document = "lorem ipsum dolor " * 2_000
        for number in range(40):
            keyed_one(maker, chat(document, "yes", f"question {number}? " + "a b c " * 300))
        last = chat(document, "yes", "another question")
        assert self.read_from(maker, model_dir, last) > len(document)

    def test_long_chats_have_the_keys_of_their_whole(self, model_dir: Path) -> None:
        """Grown, branched, cut short and changed at the start, by turns, in a small cache."""
        bounds = TokenizationPolicy(boundary_cache_bytes=60_000)
        makers = [model_keyer(model_dir), model_keyer(model_dir, tokenization=bounds)]
        whole = Whole(model_dir, makers[0])
        rng = random.Random(5)
        turns = [f"Turn {number}. " + "lorem ipsum dolor " * 90 for number in range(60)]
        for _ in range(60):
            if rng.random() < 0.3:
                turns[rng.randrange(len(turns))] = f"Changed {rng.random()}. " + "a b c " * 200
            prompt = chat(*turns[: rng.randrange(1, 60, 2)])
            expected = whole.of_chat(prompt)
            for maker in makers:
                assert same(keyed_one(maker, prompt), expected)

    @staticmethod
    def read_from(maker: PromptKeyer, model_dir: Path, prompt: ChatPrompt) -> int:
        """Where the keyer begins to look for special tokens in this chat."""
        starts: list[int] = []
        real = SegmentTokenizer.special_spans

        def spy(tokenizer: SegmentTokenizer, text: bytes, start: int) -> list[tuple[int, int]]:
            starts.append(start)
            return real(tokenizer, text, start)

        expected = Whole(model_dir, maker).of_chat(prompt)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SegmentTokenizer, "special_spans", spy)
            assert same(keyed_one(maker, prompt), expected)
        return starts[0]

    def test_boundaries_hold_no_more_memory_than_they_count(self, model_dir: Path) -> None:
        """MM1: short beginnings of long texts do not keep the long texts' keys alive."""
        pool = pool_policy(block_size_tokens=1)
        bounds = TokenizationPolicy(segment_cache_bytes=1, boundary_cache_bytes=100_000)
        maker = model_keyer(model_dir, pool=pool, tokenization=bounds)
        tail = "one two three four five six seven eight nine ten " * 200
        keyed_one(maker, TextPrompt(tail))
        tracemalloc.start()
        try:
            for number in range(60):
                keyed_one(maker, TextPrompt(f"{number}<|im_end|>{tail}"))
            assert tracemalloc.get_traced_memory()[0] < 400_000
        finally:
            tracemalloc.stop()
        assert len(maker.boundaries.cache) >= 60

    def test_a_thread_can_tokenise_between_the_steps(self, model_dir: Path) -> None:
        """Two requests prepared before either is finished do not disturb each other."""
        maker = model_keyer(model_dir)
        whole = Whole(model_dir, maker)
        prompts = [chat("same start", "x", "one"), chat("same start", "x", "two")]
        prepared = [maker.prepare(profile(prompt)) for prompt in prompts]
        encoded = [maker.encode_cold(each) for each in prepared]
        for prompt, ready, ids in reversed(list(zip(prompts, prepared, encoded, strict=True))):
            assert same(maker.finish(ready, ids)[0], whole.of_chat(prompt))


class TestNamespaces:
    def test_base_adapters_and_salts_have_disjoint_keys(self, model_dir: Path) -> None:
        """HA1: the same 512-token prompt, five ways, five disjoint key lists."""
        maker = model_keyer(model_dir, pool=pool_policy(adapters=["lora-a", "lora-b"]))
        prompt = TokenPrompt(list(range(512)))
        ways: list[dict[str, Any]] = [
            {}, {"model": "lora-a"}, {"model": "lora-b"}, {"cache_salt": "s1"},
            {"cache_salt": "s2"},
        ]  # fmt: skip
        lists = [keyed_one(maker, prompt, **way).keys.tolist() for way in ways]
        assert [len(keys) for keys in lists] == [511 // BLOCK] * 5
        assert len(set().union(*lists)) == 5 * (511 // BLOCK)

    def test_chats_of_an_adapter_do_not_meet_the_bases_boundaries(self, model_dir: Path) -> None:
        """HA1: also when the boundary cache is warm."""
        maker = model_keyer(model_dir, pool=pool_policy(adapters=["lora"]))
        prompt = chat("A first message that fills a few blocks of four tokens.")
        base = keyed_one(maker, prompt)
        adapted = keyed_one(maker, prompt, model="lora")
        assert base.tokens == adapted.tokens
        assert not set(base.keys.tolist()) & set(adapted.keys.tolist())

    def test_an_alias_is_the_base(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir, pool=pool_policy(aliases=["a"]))
        base, alias = (keyed_one(maker, chat("Hello there"), model=name) for name in ("sim", "a"))
        assert base.keys.tolist() == alias.keys.tolist()

    def test_revision_and_tokenizer_are_part_of_the_namespace(self, model_dir: Path) -> None:
        makers = [
            keyer(),
            keyer(pool=pool_policy(model_revision="r2")),
            keyer(tokenizer_of(model_dir)),
        ]
        assert len({maker.namespace for maker in makers}) == 3


class TestMedia:
    """BP1: an image ends the exact prefix and has a charge."""

    def prompt(self, *content: dict[str, Any], system: str = "Look well. " * 20) -> ChatPrompt:
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": list(content)},
        ]
        media = sum(part["type"] != "text" for part in content)
        return ChatPrompt(messages, media_parts=media)

    def test_images_share_the_text_before_them_and_nothing_else(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        cat = keyed_one(maker, self.prompt(text("What?"), image("data:cat")))
        dog = keyed_one(maker, self.prompt(text("What?"), image("data:dog")))
        plain = keyed_one(maker, self.prompt(text("What?")))
        assert len(cat.keys) > 5
        assert cat.keys.tolist() == dog.keys.tolist() == plain.keys[: len(cat.keys)].tolist()
        system_tokens = keyed_one(maker, TextPrompt("Look well. " * 20)).tokens
        assert len(cat.keys) * BLOCK <= system_tokens + 10

    def test_an_image_in_the_first_message_leaves_no_keys(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        prompt = ChatPrompt([{"role": "user", "content": [image("u")]}], media_parts=1)
        assert len(keyed_one(maker, prompt).keys) == 0

    def test_every_part_is_charged_and_so_is_the_text_behind_it(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir, media_part_tokens=1_000)
        plain = keyed_one(maker, self.prompt(text("What?")))
        one = keyed_one(maker, self.prompt(image("a"), text("What?")))
        two = keyed_one(maker, self.prompt(image("a"), image("b"), text("What?")))
        longer = keyed_one(maker, self.prompt(image("a"), text("What? " * 400)))
        assert 900 < one.tokens - plain.tokens < 1_100
        assert two.tokens - one.tokens == 1_000
        assert longer.tokens - one.tokens == pytest.approx(6 * 399 / 4, abs=1)
        assert plain.exact
        assert not one.exact

    def test_the_mark_in_a_callers_text_only_ends_the_prefix(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        keys = keyed_one(maker, self.prompt(text(f"a{MEDIA_MARK}b")))
        plain = keyed_one(maker, self.prompt(text("ab")))
        assert not keys.exact
        assert keys.keys.tolist() == plain.keys[: len(keys.keys)].tolist()


class TestLongPrompts:
    @given(cap=st.integers(1, 700))
    def test_a_cut_text_has_a_prefix_of_the_whole_texts_keys(
        self, model_dir: Path, cap: int
    ) -> None:
        value = "An unhyphenatable counterrevolutionary 12345678 <|im_end|>\n\n" * 10
        maker = model_keyer(model_dir, tokenization=TokenizationPolicy(max_prompt_chars=cap))
        cut = keyed_one(maker, TextPrompt(value))
        full = keyed_one(model_keyer(model_dir), TextPrompt(value))
        assert cut.exact is (cap >= len(value))
        assert cut.keys.tolist() == full.keys[: len(cut.keys)].tolist()
        assert len(cut.keys) >= (cap // 8 - 16) // BLOCK - 1
        assert cut.tokens >= (len(value) - cap) // 4

    def test_only_so_many_prompts_are_looked_up(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir, max_prompts=2)
        keys = keyed(maker, profile(*[TextPrompt("some text of some length")] * 3))
        assert [len(each.keys) > 0 for each in keys] == [True, True, False]
        assert keys[2] == PromptKeys(1 + 24 // 4)


class TestTokens:
    def test_given_ids_are_keyed_as_they_are(self) -> None:
        maker = keyer()
        ids = list(range(10))
        root = root_key(maker.namespace, BLOCK)
        keys = keyed_one(maker, TokenPrompt(ids))
        assert (keys.tokens, keys.exact) == (10, True)
        assert keys.keys.tolist() == block_keys(root, ids, BLOCK).tolist()

    @pytest.mark.parametrize("odd", [-1, 2**32, 2**80])
    def test_ids_that_no_tokenizer_has_give_no_keys(self, odd: int) -> None:
        keys = keyed_one(keyer(), TokenPrompt([*range(10), odd]))
        assert (keys.tokens, len(keys.keys), keys.exact) == (11, 0, False)


class TestText:
    def wrapped(self, model_dir: Path, single: str) -> PromptKeyer:
        raw = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        bos = "<|endoftext|>"
        raw.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(bos, raw.token_to_id(bos))]
        )
        return keyer(SegmentTokenizer(raw, "f"))

    def test_a_token_put_in_front_is_part_of_the_keys(self, model_dir: Path) -> None:
        maker = self.wrapped(model_dir, "<|endoftext|> $A")
        value = "Some text of more than a block or two."
        for _ in range(2):
            with_bos = keyed_one(maker, TextPrompt(value))
            by_hand = keyed_one(maker, TextPrompt("<|endoftext|>" + value, False))
            without = keyed_one(maker, TextPrompt(value, False))
            assert with_bos.keys.tolist() == by_hand.keys.tolist()
            assert with_bos.tokens == without.tokens + 1
            assert not set(with_bos.keys.tolist()) & set(without.keys.tolist())

    def test_no_text_is_taken_for_a_token_put_in_front(self, model_dir: Path) -> None:
        """Neither way round do the two share a remembered chain."""
        single = "<|endoftext|> $A"
        value = "Some text<|im_end|> of more than a block or two."
        looks_like_it = "\0\0\0\0" + value  # the token's id, as it is hashed
        wrapped, plain = TextPrompt(value), TextPrompt(looks_like_it, False)
        alone = [keyed_one(self.wrapped(model_dir, single), each) for each in (wrapped, plain)]
        for order in ((0, 1), (1, 0)):
            maker = self.wrapped(model_dir, single)
            for which in order:
                assert same(keyed_one(maker, (wrapped, plain)[which]), alone[which])

    def test_a_token_put_behind_leaves_no_exact_prefix(self, model_dir: Path) -> None:
        maker = self.wrapped(model_dir, "$A <|endoftext|>")
        assert keyed_one(maker, TextPrompt("x" * 40)) == PromptKeys(11)
        assert keyed_one(maker, TextPrompt("x" * 40, False)).exact

    def test_a_tokenizer_without_segments_is_exact_too(self, model_dir: Path) -> None:
        tokenizer = SegmentTokenizer.load(model_dir)
        tokenizer.segmented, tokenizer.special_ids = False, {}
        maker = keyer(tokenizer, template_of(model_dir))
        assert same(
            keyed_one(maker, chat("a", "b")), Whole(model_dir, maker).of_chat(chat("a", "b"))
        )
        assert len(maker.boundaries.cache) == 0

    def test_a_lone_surrogate_does_not_raise(self, model_dir: Path) -> None:
        """BP1: it has a length and, to be on the safe side, keys of its own."""
        maker = model_keyer(model_dir)
        odd, plain = (keyed_one(maker, chat(f"a{mark}b" * 9)) for mark in ("\ud800", ""))
        assert odd.tokens > plain.tokens


SOME_PROMPT = st.one_of(
    st.builds(TextPrompt, TEXTS),
    st.builds(UnknownPrompt, st.integers(0, 10_000)),
    st.builds(TokenPrompt, st.lists(st.integers(0, 5_000), min_size=1)),
    st.builds(
        ChatPrompt,
        st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "tool", "developer"])},
                optional={
                    "content": st.none() | st.text() | st.lists(st.builds(text, st.text())),
                    "tool_calls": st.just([{"function": {"name": "f", "arguments": "{}"}}]),
                },
            )
        ),
    ),
)


class TestEstimates:
    """BP1: whatever the prompt, it has a size above zero."""

    @given(prompt=SOME_PROMPT)
    def test_any_prompt_has_tokens(self, model_dir: Path, prompt: Prompt) -> None:
        bare = keyer()
        assert bare.estimate(profile(prompt))[0].tokens > 0
        assert keyed_one(bare, prompt).tokens > 0
        empty = isinstance(prompt, TextPrompt) and not prompt.text
        assert keyed_one(model_keyer(model_dir), prompt).tokens > 0 or empty

    def test_without_a_tokenizer_lengths_are_estimates(self) -> None:
        maker = keyer()
        assert not maker.exact
        made = keyed_one(maker, TextPrompt("x" * 400))
        assert (made.tokens, made.exact, made.by_text) == (101, False, True)
        assert keyed_one(maker, UnknownPrompt(400)) == PromptKeys(101)
        assert maker.encode_cold(maker.prepare(profile(chat("x")))) == []

    def test_an_unknown_prompt_is_estimated_with_a_tokenizer_too(self, model_dir: Path) -> None:
        maker = model_keyer(model_dir)
        assert maker.exact
        assert keyed_one(maker, UnknownPrompt(400)) == PromptKeys(101)

    def test_a_chat_without_a_template_is_estimated(self, model_dir: Path) -> None:
        maker = keyer(tokenizer_of(model_dir))
        keys = keyed_one(maker, chat("x" * 400))
        assert keys == PromptKeys(1 + len("x" * 400 + "user") // 4)
        assert maker.template_failures == 0

    def test_every_text_of_a_chat_counts_and_payloads_do_not(self) -> None:
        tools = [{"type": "function", "function": {"description": "d" * 400}}]
        documents = [{"title": "t" * 400}]
        bare = keyed_one(keyer(), ChatPrompt([])).tokens
        assert bare == 1
        assert keyed_one(keyer(), ChatPrompt([], tools=tools)).tokens > 100
        assert keyed_one(keyer(), ChatPrompt([], documents=documents)).tokens > 100
        picture = ChatPrompt([{"content": [image("x" * 4_000_000)]}], media_parts=1)
        assert keyed_one(keyer(media_part_tokens=500), picture).tokens == 501

    def test_failures_of_the_template_are_counted_and_estimated(self, model_dir: Path) -> None:
        maker = keyer(tokenizer_of(model_dir), ChatTemplate("{{ raise_exception('no') }}"))
        for failures in (1, 2):
            assert keyed_one(maker, chat("x" * 40)) == PromptKeys(1 + 44 // 4)
            assert maker.template_failures == failures

    def test_deep_nesting_in_tool_arguments_is_no_500(self, model_dir: Path) -> None:
        call = {"function": {"name": "f", "arguments": "[" * 100_000}}
        prompt = ChatPrompt([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert keyed_one(model_keyer(model_dir), prompt).tokens > 0

    def test_templates_get_the_date(self, model_dir: Path) -> None:
        template = ChatTemplate("{{ strftime_now('%Y') }}")
        dated = keyer(tokenizer_of(model_dir), template, strftime_now=lambda _form: "2031")
        assert keyed_one(dated, chat("x")).exact
        undated = keyer(tokenizer_of(model_dir), template)
        assert not keyed_one(undated, chat("x")).exact
        assert (dated.template_failures, undated.template_failures) == (0, 1)
