"""One HTTP request's sequences, from the engine's outputs to pieces of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from workers.simulator.errors import ApiError
from workers.simulator.requests import EngineRequest
from workers.simulator.speaker import Answer


@dataclass(frozen=True, slots=True)
class Sequence:
    """One choice: what the engine computes and what it says."""

    request: EngineRequest
    answer: Answer


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice, and perhaps its end."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_tokens: int
    """Tokens that this prompt put into the cache: those of its new full blocks."""


class Generation:
    """Collects what the engine makes; a slow reader gets several tokens in one piece.

    Args:
        choices: sequences per prompt, neighbours in ``sequences``.
        interval_tokens: new tokens of a choice that make a piece; its first and its last
            never wait for others.
    """

    def __init__(
        self, sequences: list[Sequence], choices: int = 1, interval_tokens: int = 1
    ) -> None:
        self.sequences = sequences
        self._choices = choices
        self._interval_tokens = interval_tokens
        self._sent = [0] * len(sequences)
        self._arrived: dict[int, tuple[int, str | None]] = {}
        self._open = len(sequences)
        self._news = asyncio.Event()
        self._failure: ApiError | None = None

    def receive(self, index: int, generated: int, finish_reason: str | None) -> None:
        """Choice ``index`` has ``generated`` tokens by now."""
        self._arrived[index] = (generated, finish_reason)
        sent = self._sent[index]
        if not sent or finish_reason or generated - sent >= self._interval_tokens:
            self._news.set()

    def fail(self, error: ApiError) -> None:
        """End the generation with an error."""
        self._failure = error
        self._news.set()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What has arrived since the last look, until every choice has ended.

        Raises:
            ApiError: the engine failed the request.
        """
        while self._open:
            await self._news.wait()
            self._news.clear()
            if self._arrived:
                yield self._take()
            if self._failure is not None:
                raise self._failure

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        prompts = [s.request for s in self.sequences[:: self._choices]]
        return Usage(
            sum(request.prompt_tokens for request in prompts),
            sum(self._sent),
            sum(request.cached_tokens for request in prompts),
            sum(_full_blocks(request) - request.cached_tokens for request in prompts),
        )

    def _take(self) -> list[Piece]:
        arrived, self._arrived = self._arrived, {}
        pieces = []
        for index, (generated, finish_reason) in arrived.items():
            answer, sent = self.sequences[index].answer, self._sent[index]
            text, token_ids = answer.text(sent, generated), answer.token_ids[sent:generated]
            self._sent[index] = generated
            self._open -= finish_reason is not None
            pieces.append(Piece(index, text, token_ids, finish_reason))
        return pieces


def _full_blocks(request: EngineRequest) -> int:
    """Tokens of the prompt's full blocks."""
    return request.prompt_tokens // request.chain.block_size * request.chain.block_size
