"""Tokenising by segment, exact or not at all.

Special tokens in a rendered chat split the text before BPE, so the ids of
``A <special> B`` are ``ids(A) + special + ids(B)`` and each segment can be cached on its
own. That holds for nearly all chat models; a check at start compares it with whole-text
tokenising and falls back to whole text where it does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from xxhash import xxh3_64_hexdigest

from extproc.errors import KvgateError
from extproc.tokens.blocks import TokenIds
from extproc.tokens.words import WordTokenizer

_PROBE_TEXTS = (
    "Hello",
    " leading and trailing ",
    "\n\nblank lines\n",
    "You are a helpful assistant.\nAnswer briefly.",
    "naïve café - 東京 🙂 Привет",
    "x=1;\n\tif (a<b) { return 'q'; }  # 3.14e-10",
    "",
    "1234567890 don't WON'T I'm",
    "a\r\n\r\n  b\t\tc   \n d  ",
    "\x0b\x0c\x1c\x1f\x7f \x00 end",
)


class TokenizerFailure(KvgateError):
    """A tokenizer file is missing or unreadable."""


class SegmentTokenizer:
    """A Hugging Face tokenizer that knows where its text may be cut.

    Attributes:
        fingerprint: hash of the tokenizer file; part of every block key.
        segmented: whether segments may be tokenised apart (the start-up check passed).
        prefix_ids: ids that ``add_special_tokens`` puts in front (BOS).
        wraps_exactly: whether it puts none behind.
        special_ids: the one-token segments; empty unless ``segmented``.
        special_bytes: the same, text as UTF-8 and ids as uint32-LE.
        specials_stand_apart: none of them holds another, so whatever follows one, it is found.
    """

    def __init__(self, tokenizer: Tokenizer, fingerprint: str) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint
        special_ids = _splitting_tokens(tokenizer)
        self._splitter = _splitter(list(special_ids))
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        wrapped = tokenizer.encode("a", add_special_tokens=True).ids
        start = next(
            (i for i in range(len(wrapped)) if wrapped[i : i + len(plain)] == plain), len(wrapped)
        )
        self.prefix_ids = np.array(wrapped[:start], dtype=np.uint32)
        self.wraps_exactly = start + len(plain) == len(wrapped)
        self.special_ids = {
            text: np.array([number], dtype=np.uint32) for text, number in special_ids.items()
        }
        self._words: WordTokenizer | None = None
        probes = _probes(list(special_ids))
        self.segmented = self.agrees_with_whole(probes)
        if not self.segmented:
            self.special_ids = {}
        words = WordTokenizer.of(tokenizer, set(self.special_ids), self.encode)
        if words is not None and _agrees_on_words(words, self, probes):
            self._words = words
        self.special_bytes = {
            text.encode(): ids.tobytes() for text, ids in self.special_ids.items()
        }
        self._special_bytes_spans = _spans(list(self.special_bytes))
        self.specials_stand_apart = _stand_apart(self.special_bytes.keys())

    @classmethod
    def load(cls, path: Path) -> SegmentTokenizer:
        """Load ``tokenizer.json`` or a directory that has one. Local files only.

        Raises:
            TokenizerFailure: missing or not a tokenizer.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            data = file.read_bytes()
        except OSError as error:
            raise TokenizerFailure(f"{file}: {error.strerror}") from error
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerFailure(f"{file} is not a tokenizer: {error}") from error
        return cls(tokenizer, xxh3_64_hexdigest(data))

    def split(self, text: str) -> list[str]:
        """Segments in order: texts and special tokens; joined they are ``text``."""
        if not self.segmented or self._splitter is None:
            return [text]
        return [piece for piece in self._splitter.split(text) if piece]

    def special_spans(self, text: bytes, start: int = 0) -> list[tuple[int, int]]:
        """Start and end of each special token that cuts a text, given and counted in UTF-8.

        Args:
            start: where to begin: behind a special token.
        """
        return self._special_bytes_spans(text, start) if self.segmented else []

    def encode(self, texts: list[str]) -> list[TokenIds]:
        """Ids of each text, no special tokens added.

        Releases the GIL while it works, so a thread may call it without stalling others.
        """
        try:
            batch = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # a lone surrogate, which JSON lets in and no tokenizer takes
            plain = [text.encode("utf-8", "replace").decode() for text in texts]
            batch = self._tokenizer.encode_batch_fast(plain, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in batch]

    @property
    def known_words(self) -> int:
        """Words whose ids are kept."""
        return 0 if self._words is None else len(self._words)

    def encode_quickly(self, texts: list[str]) -> list[TokenIds]:
        """The same ids as :meth:`encode`, by words already known where that is possible.

        Holds the GIL; four times faster on prose.
        """
        if self._words is None:
            return self.encode(texts)
        found = [self._words.ids(text) for text in texts]
        left = iter(self.encode([t for t, ids in zip(texts, found, strict=True) if ids is None]))
        return [next(left) if ids is None else ids for ids in found]

    def agrees_with_whole(self, texts: list[str]) -> bool:
        """Whether segmented tokenising gives the ids of whole-text tokenising for each text."""
        if self._splitter is None:
            return False
        for text, whole in zip(texts, self.encode(texts), strict=True):
            pieces = [piece for piece in self._splitter.split(text) if piece]
            apart = [self.special_ids.get(p) for p in pieces]
            ids = [
                known if known is not None else self.encode([piece])[0]
                for known, piece in zip(apart, pieces, strict=True)
            ]
            if not np.array_equal(np.concatenate([np.empty(0, np.uint32), *ids]), whole):
                return False
        return True


def _agrees_on_words(words: WordTokenizer, tokenizer: SegmentTokenizer, texts: list[str]) -> bool:
    """Whether known words give the library's ids, for the pieces between special tokens."""
    pieces = [piece for text in texts for piece in tokenizer.split(text)]
    pieces = [piece for piece in pieces if piece not in tokenizer.special_ids]
    for _ in range(2):  # the first time learns
        for piece, whole in zip(pieces, tokenizer.encode(pieces), strict=True):
            ids = words.ids(piece)
            if ids is not None and not np.array_equal(ids, whole):
                return False
    return True


def _splitting_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Added tokens that cut text wherever they stand, and their ids."""
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special and not (token.lstrip or token.rstrip or token.single_word)
    }


def _splitter(specials: list[str]) -> re.Pattern[str] | None:
    longest_first = sorted(specials, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if specials else None


def _spans(specials: list[bytes]) -> Callable[[bytes, int], list[tuple[int, int]]]:
    """As :func:`_splitter` cuts: UTF-8 is found in UTF-8 only where its text is in the text."""
    if not specials:
        return lambda _text, _start: []
    longest_first = sorted(specials, key=lambda text: len(text.decode()), reverse=True)
    find = re.compile(b"|".join(map(re.escape, longest_first))).finditer
    return lambda text, start: [match.span() for match in find(text, start)]


def _stand_apart(specials: Set[bytes]) -> bool:
    """Whether none holds another. By its substrings: some models have thousands of them."""
    lengths = {len(special) for special in specials}
    return not any(
        text[start : start + length] in specials
        for text in specials
        for length in lengths
        if length < len(text)
        for start in range(len(text) - length + 1)
    )


def _probes(specials: list[str]) -> list[str]:
    """Texts that put every probe text before, between and after special tokens."""
    specials = specials[:8]
    probes = list(_PROBE_TEXTS)
    for number, special in enumerate(specials):
        left = _PROBE_TEXTS[number % len(_PROBE_TEXTS)]
        for right in _PROBE_TEXTS:
            probes.append(f"{left}{special}{right}{special}\n{left}")
            probes.append(f"{special}{right}")
    probes.append("".join(special + text for special in specials for text in _PROBE_TEXTS))
    return probes
