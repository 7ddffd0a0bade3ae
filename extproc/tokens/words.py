"""``WordTokenizer``: ids of ASCII text by looking its words up.

BPE tokenizers cut text into words by a regular expression and merge each word on its own,
so the ids of a text are those of its words, and prose is made of few words. The pattern is
read from the tokenizer's own file. On ASCII text its meaning is the same in every regular
expression engine once ``\\p{L}`` and ``\\p{N}`` are spelled out; other text is left to the
library, and so is whatever this module does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from extproc.tokens.blocks import TokenIds

MAX_WORDS = 65_536
"""Words kept; at about 120 bytes each. A full table starts again from nothing."""
MAX_WORD_CHARS = 64
_MOST_NEW = 0.1
"""Text with more new words than this is cheaper to tokenise whole."""
_LEARNT_AT_ONCE = 256
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ``ByteLevel`` with ``use_regex`` cuts by (GPT-2's encoder)."""
_CLASSES = {
    r"\p{L}": "A-Za-z",
    r"\p{Lu}": "A-Z",
    r"\p{Ll}": "a-z",
    r"\p{N}": "0-9",
    r"\p{Nd}": "0-9",
    r"\p{Lt}": "",
    r"\p{Lm}": "",
    r"\p{Lo}": "",
    r"\p{M}": "",
}
_TOKENS = re.compile(r"\\[pP]\{\w+\}|\\.|.", re.DOTALL)
_SAME_ON_ASCII = frozenset({"NFC", "NFD", "NFKC", "NFKD"})

EncodeAll = Callable[[list[str]], list[TokenIds]]


class WordTokenizer:
    """Looks words up and learns the new ones.

    Args:
        pattern: what cuts text into words; every character of a text belongs to one.
        added: text of added tokens that are found inside words; such text is not ours.
        encode: the library's way, for words not seen yet.
    """

    def __init__(self, pattern: re.Pattern[str], added: list[str], encode: EncodeAll) -> None:
        self._words = pattern.findall
        self._added = re.compile("|".join(map(re.escape, added))).search if added else None
        self._encode = encode
        self._ids: dict[str, bytes] = {}

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, splitting: set[str], encode: EncodeAll
    ) -> WordTokenizer | None:
        """The word tokenizer of a BPE file; None where the file has a part not known here.

        Args:
            splitting: added tokens that the texts to come do not contain.
        """
        spec = json.loads(tokenizer.to_str())
        model = spec["model"]
        if model.get("type") != "BPE" or model.get("dropout"):
            return None
        if not _is_plain(spec.get("normalizer")):
            return None
        unicode_source = _pattern(spec.get("pre_tokenizer"))
        source = None if unicode_source is None else _in_ascii(unicode_source)
        if source is None:
            return None
        added = [token["content"] for token in spec.get("added_tokens", ())]
        try:
            pattern = re.compile(source, re.ASCII)
        except re.error:
            return None
        if pattern.groups:
            return None
        return cls(pattern, [text for text in added if text not in splitting], encode)

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, text: str) -> TokenIds | None:
        """Ids of a text; None where the library should tokenise it."""
        if not text.isascii() or (self._added is not None and self._added(text)):
            return None
        words = self._words(text)
        if len("".join(words)) != len(text):
            return None
        ids = self._known(words)
        if ids is None:
            missing = [word for word in dict.fromkeys(words) if word not in self._ids]
            self._learn(missing[:_LEARNT_AT_ONCE])
            if len(missing) > _MOST_NEW * len(words) + 4:
                return None
            ids = self._known(words)
        return None if ids is None else np.frombuffer(ids, dtype=np.uint32)

    def _known(self, words: list[str]) -> bytes | None:
        try:
            return b"".join(map(self._ids.__getitem__, words))
        except KeyError:
            return None

    def _learn(self, words: list[str]) -> None:
        words = [word for word in words if len(word) <= MAX_WORD_CHARS]
        if len(self._ids) + len(words) > MAX_WORDS:
            self._ids.clear()
        for word, ids in zip(words, self._encode(words), strict=True):
            self._ids[word] = ids.tobytes()


def _is_plain(normalizer: dict[str, Any] | None) -> bool:
    """Whether a normalizer leaves ASCII text alone."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_is_plain, normalizer["normalizers"]))
    return normalizer["type"] in _SAME_ON_ASCII


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The regular expression that cuts text into words."""
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "ByteLevel":
        plain = not pre_tokenizer["add_prefix_space"] and pre_tokenizer.get("use_regex", True)
        return _GPT2_WORDS if plain else None
    if pre_tokenizer["type"] != "Sequence":
        return None
    steps = pre_tokenizer["pretokenizers"]
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, bytes_ = steps
    if bytes_["add_prefix_space"] or bytes_.get("use_regex", True):
        return None
    if split["behavior"] != "Isolated" or split["invert"]:
        return None
    source = split["pattern"].get("Regex")
    return source if isinstance(source, str) else None


def _in_ascii(source: str) -> str | None:
    """The pattern with Unicode's classes spelled out for ASCII; None for one not known."""
    out: list[str] = []
    inside = False
    for token in _TOKENS.findall(source):
        if token.startswith((r"\p", r"\P")):
            range_ = _CLASSES.get(token)
            if range_ is None or not (inside or range_):
                return None
            out.append(range_ if inside else f"[{range_}]")
            continue
        inside = {"[": True, "]": False}.get(token, inside)
        out.append(token)
    return "".join(out)
