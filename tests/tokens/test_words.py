"""Ids by known words are the library's ids, or nothing."""

from __future__ import annotations

import random
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from extproc.tokens import words as module
from extproc.tokens.blocks import TokenIds
from extproc.tokens.tokenizer import SegmentTokenizer
from extproc.tokens.words import WordTokenizer

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = Path(module.__file__).read_text(encoding="utf-8").splitlines()


def splitting(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer, *added: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text) for text in added])
    return tokenizer


def encoder(tokenizer: Tokenizer):
    def encode(texts: list[str]) -> list[TokenIds]:
        batch = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in batch]

    return encode


def words_of(tokenizer: Tokenizer) -> WordTokenizer:
    made = WordTokenizer.of(tokenizer, {"<|end|>"}, encoder(tokenizer))
    assert made is not None
    return made


KINDS = {
    "gpt-2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-3": trained(splitting(LLAMA_3)),
    "qwen": trained(splitting(QWEN)),
    "o200k": trained(splitting(O200K)),
    "added": trained(splitting(QWEN), "<think>", "ab"),
}
WORDS = {name: words_of(tokenizer) for name, tokenizer in KINDS.items()}

pieces = st.one_of(
    st.text(alphabet=string.printable + "\x00\x1c\x1f\x7f", max_size=12),
    st.sampled_from(
        ["the", " The", "don't", "I'LL", "  ", "\r\n", "1234567", "<think>", "é", "ab"]
    ),
)


class TestEquality:
    @pytest.mark.parametrize("kind", KINDS)
    @given(text=st.lists(pieces, max_size=20).map("".join))
    def test_known_words_give_the_librarys_ids(self, kind: str, text: str) -> None:
        words, (whole,) = WORDS[kind], encoder(KINDS[kind])([text])
        for _ in range(2):
            ids = words.ids(text)
            assert ids is None or ids.tolist() == whole.tolist()

    @pytest.mark.parametrize("kind", KINDS)
    def test_prose_is_served_by_words_from_the_second_time_on(self, kind: str) -> None:
        text = "the quick fox said it's 12345 times\n\n  to the lazy dog. " * 8
        WORDS[kind].ids(text)
        ids = WORDS[kind].ids(text)
        assert ids is not None
        assert ids.tolist() == encoder(KINDS[kind])([text])[0].tolist()

    def test_a_segment_tokenizer_gives_the_same_either_way(self, model_dir: Path) -> None:
        tokenizer = SegmentTokenizer.load(model_dir)
        texts = ["hello the world", "", "naïve café", "x = 1\n", "hello the world"] * 2
        quick, slow = tokenizer.encode_quickly(texts), tokenizer.encode(texts)
        assert [ids.tolist() for ids in quick] == [ids.tolist() for ids in slow]


class TestLeftToTheLibrary:
    def test_text_that_is_not_ascii(self) -> None:
        assert WORDS["qwen"].ids("café") is None

    def test_text_with_an_added_token_inside(self) -> None:
        assert WORDS["added"].ids("so <think> so") is None

    def test_text_of_mostly_new_words(self) -> None:
        rng = random.Random(1)
        words = words_of(KINDS["qwen"])
        text = " ".join("".join(rng.choices(string.ascii_letters, k=9)) for _ in range(300))
        assert words.ids(text) is None
        assert 0 < len(words) <= 300

    def test_very_long_words_are_not_kept(self) -> None:
        words = words_of(KINDS["qwen"])
        for _ in range(2):
            assert words.ids("a" * 1_000) is None
        assert len(words) == 0

    @pytest.mark.parametrize(
        "pre_tokenizer",
        [
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            pre_tokenizers.Whitespace(),
            splitting(QWEN, "removed"),
            splitting(r"\p{Greek}+|\s+"),
            splitting(r"[\p{Lm}]\P{L}"),
            splitting(r"(a)|."),
            pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]),
        ],
        ids=str,
    )
    def test_files_with_parts_not_known(self, pre_tokenizer: pre_tokenizers.PreTokenizer) -> None:
        tokenizer = trained(pre_tokenizer)
        assert WordTokenizer.of(tokenizer, set(), encoder(tokenizer)) is None

    def test_normalizers_that_change_ascii(self) -> None:
        for normalizer, known in (
            (normalizers.NFC(), True),
            (normalizers.Sequence([normalizers.NFKC()]), True),
            (normalizers.Lowercase(), False),
        ):
            tokenizer = trained(splitting(QWEN))
            tokenizer.normalizer = normalizer
            assert (WordTokenizer.of(tokenizer, set(), encoder(tokenizer)) is not None) is known

    def test_other_models(self) -> None:
        tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # noqa: S106
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert WordTokenizer.of(tokenizer, set(), encoder(tokenizer)) is None


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORDS", 50)
    words = words_of(KINDS["qwen"])
    for number in range(100):
        words.ids(f" w{number} x y z")
        assert len(words) <= 50
