"""The text a simulated model says: dull, endless and exactly re-tokenisable.

Only words that are one token each are spoken, so an answer cut anywhere tokenises back to
the ids that the engine computed, and a chat's next turn hits the blocks of this one. What
is said depends on the prompt alone: every worker answers alike, as at temperature 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest

_PARAGRAPH = """
The server is open and the client can send a request at any time. Each request has a name and a
value and the value is set when the request is read. If there is no value then the default is used
and a new one is made for the next call. This file is for test use only and it should not be part
of the code that will run in the main process. A list of all the words is in the first line and
the last line is the end of the list. We add one to the count and return the result with its type
so that the other side can see if it was found or not. You may get an error from the system but
the state of the object will be the same as it was before the call.
"""
_MIN_WORDS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids and, for each, its piece of the text."""

    token_ids: list[int]
    pieces: list[str]

    def text(self, first: int, last: int) -> str:
        """Text of tokens ``first`` up to but without ``last``."""
        return "".join(self.pieces[first:last])


class Speaker:
    """Makes answers in one tokenizer's words.

    Raises:
        ValueError: the tokenizer has too few words of one token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = _PARAGRAPH.replace(".", "").split()
        self._words = _single_tokens(tokenizer, [" " + word for word in words])
        self._openers = _single_tokens(tokenizer, [word.capitalize() for word in words])
        if len(self._words) < _MIN_WORDS:
            raise ValueError("the tokenizer has too few English words of one token")
        self._verify(tokenizer)

    def answer(self, prompt: bytes, tokens: int, choice: int = 0, opens: bool = False) -> Answer:
        """The answer to a prompt.

        Args:
            prompt: bytes that stand for the prompt, such as its token ids.
            choice: number of the choice when several are asked for.
            opens: begin a text (a chat's answer) instead of continuing one.
        """
        start = xxh3_64_intdigest(prompt, choice)
        words = self._words
        spoken = [words[(start + i) % len(words)] for i in range(tokens)]
        if opens and tokens and self._openers:
            spoken[0] = self._openers[start % len(self._openers)]
        return Answer([token for token, _ in spoken], [piece for _, piece in spoken])

    def _verify(self, tokenizer: Tokenizer) -> None:
        for opens in (False, True):
            answer = self.answer(b"", 2 * len(self._words), opens=opens)
            text = answer.text(0, len(answer.pieces))
            if tokenizer.encode(text, add_special_tokens=False).ids != answer.token_ids:
                raise ValueError("answers do not survive this tokenizer; it joins words")


def _single_tokens(tokenizer: Tokenizer, words: list[str]) -> list[tuple[int, str]]:
    encoded = tokenizer.encode_batch(words, add_special_tokens=False)
    pairs = ((e.ids[0], word) for e, word in zip(encoded, words, strict=True) if len(e.ids) == 1)
    return [(token, word) for token, word in pairs if tokenizer.decode([token]) == word]
