"""Seeded chat requests of a given size: the same seed gives the same bytes everywhere.

Text is made of common words, rare ones rarely, so that tokenising it costs what prose costs.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import msgspec

MODEL = "bench-model"

_WORDS = """
the of and to in a is that for it as was with be by on not he this are or his from at which but
have an had they you were their one all we can her has there been if more when will would who so
no request worker cache prefix token block engine route latency memory schedule question answer
system because between through during against without another performance measurement
configuration understanding responsibility infrastructure
""".split()  # noqa: SIM905  # a list of 80 strings is harder to read
_WEIGHTS = list(accumulate(1.0 / (rank + 3) for rank in range(len(_WORDS))))


def text(rng: random.Random, size_bytes: int) -> str:
    """ASCII prose of exactly ``size_bytes`` bytes."""
    words: list[str] = []
    length = 0
    while length <= size_bytes:
        some = rng.choices(_WORDS, cum_weights=_WEIGHTS, k=64)
        words += some
        length += sum(map(len, some)) + len(some)
    return " ".join(words)[:size_bytes]


class Chat:
    """One growing conversation.

    Args:
        system: system prompt, the same text for every chat that shares it.
        turn_bytes: text that a turn adds, a third of it by the user.
    """

    def __init__(self, rng: random.Random, system: str, turn_bytes: int) -> None:
        self._rng = rng
        self._user_bytes = max(1, turn_bytes // 3)
        self._assistant_bytes = max(1, turn_bytes - self._user_bytes)
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self.text_bytes = len(system)

    def next_turn(self) -> bytes:
        """Body of the next request: the last answer and a new question are appended."""
        if len(self._messages) > 1:
            self._say("assistant", self._assistant_bytes)
        self._say("user", self._user_bytes)
        return self.body()

    def grow_to(self, size_bytes: int) -> None:
        """Append turns until the texts add up to ``size_bytes`` bytes."""
        while self.text_bytes < size_bytes:
            self.next_turn()

    def branch(self, rng: random.Random) -> Chat:
        """A chat that shares everything so far and goes on with texts of its own."""
        other = Chat(rng, "", self._user_bytes + self._assistant_bytes)
        other._messages = self._messages.copy()
        other.text_bytes = self.text_bytes
        return other

    def body(self) -> bytes:
        """JSON of a chat completion with all messages so far."""
        return msgspec.json.encode({"model": MODEL, "messages": self._messages, "max_tokens": 100})

    def _say(self, role: str, size_bytes: int) -> None:
        self._messages.append({"role": role, "content": text(self._rng, size_bytes)})
        self.text_bytes += size_bytes
