"""Prompts of an exact number of tokens, in words of the model's own tokenizer.

Only words are used that are one token each wherever they stand, so a segment of n tokens is n
words. A segment is a slice of one long seeded text, headed by four words that spell its id:
making one costs the same for any length, and no two ids begin alike. What the chat template
adds is taken out of the first segment of the message that follows it (what it adds at the very
end: out of the first message), so that messages stay the same when a chat grows and the
engine's count is the planned one.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest

from benchmarks.workloads.plan import (
    MAX_SEGMENT_TOKENS,
    PlanError,
    Planned,
    Role,
    Segment,
    SegmentId,
)
from extproc.tokens.template import ChatTemplate

_MAX_WORDS = 2_048
_MIN_WORDS = 64
_TAPE_WORDS = 2 * MAX_SEGMENT_TOKENS
"""Slices begin anywhere in it."""
_ID_WORDS = 4
_MARK = "\x00"
_CACHED_FRAMES = 4_096

Message = dict[str, Any]


@dataclass(frozen=True)
class Frame:
    """Tokens that the template adds before each message, and at the end of the prompt."""

    before: tuple[int, ...]
    end: int


class PromptMaker:
    """Makes prompts for one model.

    Args:
        model_dir: tokenizer directory with a chat template.
        seed: of the words; the same seed and id give the same text everywhere.

    Raises:
        PlanError: the tokenizer has too few words of one token, or no chat template.
    """

    def __init__(self, model_dir: Path, seed: int = 0) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        template = ChatTemplate.load(model_dir)
        if template is None:
            raise PlanError(f"{model_dir}: no chat template")
        self._template = template
        self._words, self._openers = _one_token_words(self._tokenizer)
        if min(len(self._words), len(self._openers)) < _MIN_WORDS:
            raise PlanError(f"{model_dir}: too few words of one token")
        self._seed = seed
        words = random.Random(seed).choices(self._words, k=_TAPE_WORDS)
        self._starts = _starts(words)
        self._tape = "".join(words)
        self.frame = lru_cache(_CACHED_FRAMES)(self._frame)

    def messages(self, request: Planned) -> list[Message]:
        """Chat messages of a request.

        A message too short for what the template adds to it has one word, and the prompt is
        longer than planned.
        """
        parts = _by_message(request.prompt)
        frame = self.frame(tuple(role for role, _ in parts))
        messages = []
        for number, (role, segments) in enumerate(parts):
            sizes = _less([segment.tokens for segment in segments], frame.before[number])
            if number == 0:
                sizes = _less(sizes[::-1], frame.end)[::-1]
            if not any(sizes):
                sizes[0] = 1
            ids = (segment.id for segment in segments)
            text = "".join(map(self._text, ids, sizes))
            messages.append({"role": role, "content": self._open(segments[0].id) + _rest(text)})
        return messages

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        """What an engine makes of these messages: the whole text tokenised at once."""
        rendered = self._template.render(list(messages), add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False).ids
        return ids

    def _text(self, segment_id: SegmentId, tokens: int) -> str:
        """``tokens`` words, each with a space before it."""
        if tokens < 1:
            return ""
        code = self._code(segment_id)
        start = code % (_TAPE_WORDS - tokens)
        head = []
        for _ in range(min(_ID_WORDS, tokens)):
            code, digit = divmod(code, len(self._words))
            head.append(self._words[digit])
        body = tokens - len(head)
        return "".join(head) + self._tape[self._starts[start] : self._starts[start + body]]

    def _open(self, segment_id: SegmentId) -> str:
        """First word of a message; templates may trim a space before it."""
        return self._openers[self._code(segment_id) % len(self._openers)]

    def _code(self, segment_id: SegmentId) -> int:
        return xxh3_64_intdigest(repr(segment_id).encode(), self._seed)

    def _frame(self, roles: tuple[Role, ...]) -> Frame:
        messages = [{"role": role, "content": _MARK} for role in roles]
        rendered = self._template.render(messages, add_generation_prompt=True)
        pieces = rendered.split(_MARK)
        if len(pieces) != len(roles) + 1:
            raise PlanError(f"the chat template does not show each of the messages {roles} once")
        encoded = self._tokenizer.encode_batch(pieces, add_special_tokens=False)
        *before, end = (len(each.ids) for each in encoded)
        return Frame(tuple(before), end)


def _by_message(prompt: Sequence[Segment]) -> list[tuple[Role, list[Segment]]]:
    parts: list[tuple[Role, list[Segment]]] = []
    for segment in prompt:
        if segment.role is not None or not parts:
            parts.append((segment.role or "user", []))
        parts[-1][1].append(segment)
    return parts


def _less(sizes: list[int], tokens: int) -> list[int]:
    """Sizes with ``tokens`` taken out, from the first on."""
    left = []
    for size in sizes:
        taken = min(size, tokens)
        tokens -= taken
        left.append(size - taken)
    return left


def _rest(text: str) -> str:
    """All words but the first."""
    space = text.find(" ", 1)
    return text[space:] if space > 0 else ""


def _starts(words: Sequence[str]) -> array[int]:
    """Where each word begins, and where the last ends."""
    return array("L", accumulate(map(len, words), initial=0))


def _one_token_words(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Words with a space before them, and words without, that are one token each; sorted."""
    tokens = range(tokenizer.get_vocab_size())
    decoded = {tokenizer.decode([token]) for token in tokens}
    words = sorted(word for word in decoded if re.fullmatch(" [a-z]{2,12}", word))
    spaced = _of_one_token(tokenizer, words)[:_MAX_WORDS]
    return spaced, _of_one_token(tokenizer, [word[1:] for word in spaced])


def _of_one_token(tokenizer: Tokenizer, words: list[str]) -> list[str]:
    encoded = tokenizer.encode_batch(words, add_special_tokens=False)
    return [word for word, each in zip(words, encoded, strict=True) if len(each.ids) == 1]
