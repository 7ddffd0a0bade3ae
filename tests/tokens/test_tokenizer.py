from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from extproc.tokens.tokenizer import SegmentTokenizer, TokenizerFailure
from tests.support.builders import tokenizer_of
from workers.simulator.model import SPECIAL_TOKENS

PIECES = st.lists(
    st.sampled_from([*SPECIAL_TOKENS, "<|im_", "start|>", "|>", "\n", " ", "  ", "user\n", "é🙂"])
    | st.text(max_size=12),
    max_size=12,
).map("".join)


def trained(*specials: AddedToken | str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello there"], trainer)
    return tokenizer


def wrapping(single: str) -> SegmentTokenizer:
    tokenizer = trained("<s>", "</s>")
    ids = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return SegmentTokenizer(tokenizer, "f")


def ids(tokenizer: SegmentTokenizer, text: str) -> list[int]:
    """Ids of a text made by segment, as the keyer does."""
    pieces = tokenizer.split(text)
    known = [tokenizer.special_ids.get(piece) for piece in pieces]
    return [
        token
        for piece, special in zip(pieces, known, strict=True)
        for token in (tokenizer.encode([piece])[0] if special is None else special).tolist()
    ]


class TestExactness:
    """TK1: ids made by segment are those of the whole text."""

    @given(text=PIECES)
    def test_segments_give_the_ids_of_the_whole_text(self, model_dir: Path, text: str) -> None:
        tokenizer = tokenizer_of(model_dir)
        assert tokenizer.segmented
        assert ids(tokenizer, text) == tokenizer.encode([text])[0].tolist()
        assert tokenizer.agrees_with_whole([text])

    @given(text=PIECES)
    def test_segments_joined_are_the_text(self, model_dir: Path, text: str) -> None:
        pieces = tokenizer_of(model_dir).split(text)
        assert "".join(pieces) == text
        assert "" not in pieces

    @given(text=PIECES)
    def test_spans_of_special_tokens_are_where_text_is_split(
        self, model_dir: Path, text: str
    ) -> None:
        tokenizer = tokenizer_of(model_dir)
        data = text.encode("utf-8", "surrogatepass")
        found = [data[start:end] for start, end in tokenizer.special_spans(data)]
        pieces = tokenizer.split(text)
        assert found == [p.encode() for p in pieces if p in tokenizer.special_ids]
        assert tokenizer.special_bytes.keys() >= set(found)

    def test_special_tokens_are_segments_of_one_known_id(self, model_dir: Path) -> None:
        tokenizer = tokenizer_of(model_dir)
        assert tokenizer.split("a<|im_start|>b") == ["a", "<|im_start|>", "b"]
        assert {text: len(ids) for text, ids in tokenizer.special_ids.items()} == dict.fromkeys(
            SPECIAL_TOKENS, 1
        )

    def test_the_longest_special_token_wins(self) -> None:
        tokenizer = SegmentTokenizer(trained("<a>", "<a>b"), "f")
        assert tokenizer.split("x<a>bc<a>c") == ["x", "<a>b", "c", "<a>", "c"]
        assert tokenizer.special_spans(b"x<a>bc<a>c") == [(1, 5), (6, 9)]
        assert tokenizer.segmented
        assert not tokenizer.specials_stand_apart

    @given(text=PIECES)
    def test_spans_can_be_looked_for_behind_any_of_them(self, model_dir: Path, text: str) -> None:
        tokenizer = tokenizer_of(model_dir)
        assert tokenizer.specials_stand_apart
        data = text.encode("utf-8", "surrogatepass")
        spans = tokenizer.special_spans(data)
        for number, (_, end) in enumerate(spans, 1):
            assert tokenizer.special_spans(data[:end]) == spans[:number]
            assert tokenizer.special_spans(data, end) == spans[number:]


class TestFallingBack:
    """TK1: a tokenizer whose segments differ from the whole text is not segmented."""

    def whole_only(self, tokenizer: SegmentTokenizer) -> bool:
        text = "a<s>b"
        return (
            not tokenizer.segmented
            and tokenizer.special_ids == {}
            and tokenizer.split(text) == [text]
        )

    def test_a_prefix_space_at_the_start_alone_is_noticed(self) -> None:
        tokenizer = trained("<s>")
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("t", prepend_scheme="first")
        assert self.whole_only(SegmentTokenizer(tokenizer, "f"))

    def test_special_tokens_that_eat_space_do_not_split(self) -> None:
        tokenizer = trained(AddedToken("<s>", special=True, lstrip=True))
        assert self.whole_only(SegmentTokenizer(tokenizer, "f"))

    def test_without_special_tokens_there_is_nothing_to_split_at(self) -> None:
        tokenizer = SegmentTokenizer(trained(), "f")
        assert self.whole_only(tokenizer)
        assert not tokenizer.agrees_with_whole(["a"])


class TestSpecialTokensAround:
    @pytest.mark.parametrize(
        ("single", "prefix", "wraps"),
        [
            ("$A", [], True),
            ("<s> $A", ["<s>"], True),
            ("<s> <s> $A", ["<s>", "<s>"], True),
            ("$A </s>", [], False),
            ("<s> $A </s>", ["<s>"], False),
        ],
    )
    def test_what_is_put_in_front_and_behind_is_known(
        self, single: str, prefix: list[str], wraps: bool
    ) -> None:
        tokenizer = wrapping(single)
        known = [tokenizer.special_ids[text][0] for text in prefix]
        assert tokenizer.prefix_ids.tolist() == known
        assert tokenizer.wraps_exactly is wraps


class TestEncoding:
    def test_truncation_and_padding_of_the_file_are_off(self) -> None:
        raw = trained("<s>")
        raw.enable_truncation(2)
        raw.enable_padding(length=50)
        assert len(SegmentTokenizer(raw, "f").encode(["abcdef"])[0]) == 6

    def test_no_special_tokens_are_added(self) -> None:
        assert len(wrapping("<s> $A </s>").encode(["z"])[0]) == 1

    def test_a_lone_surrogate_does_not_raise(self, model_dir: Path) -> None:
        """BP1: engines' JSON readers let it in, and no tokenizer takes it."""
        odd, plain = tokenizer_of(model_dir).encode(["a\ud800b", "ab"])
        assert odd.tolist() == tokenizer_of(model_dir).encode(["a?b"])[0].tolist()
        assert plain.tolist() == tokenizer_of(model_dir).encode(["ab"])[0].tolist()


class TestLoading:
    def test_a_folder_or_a_file_gives_the_same_tokenizer(self, model_dir: Path) -> None:
        by_folder = SegmentTokenizer.load(model_dir)
        by_file = SegmentTokenizer.load(model_dir / "tokenizer.json")
        assert by_folder.fingerprint == by_file.fingerprint == tokenizer_of(model_dir).fingerprint

    def test_another_file_has_another_fingerprint(self, tmp_path: Path, model_dir: Path) -> None:
        trained("<s>").save(str(tmp_path / "tokenizer.json"))
        other = SegmentTokenizer.load(tmp_path)
        assert other.fingerprint != tokenizer_of(model_dir).fingerprint

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerFailure, match=r"tokenizer\.json: No such file"):
            SegmentTokenizer.load(tmp_path)

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "tokenizer.json"
        file.write_text("{}")
        with pytest.raises(TokenizerFailure, match="is not a tokenizer"):
            SegmentTokenizer.load(file)
