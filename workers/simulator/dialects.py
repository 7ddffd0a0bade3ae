"""OpenAI's chat and text completions: bodies in, JSON and SSE out.

A dialect turns a body into prompts and a reply into that API's words. The same handler
drives every dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from workers.simulator.errors import ApiError
from workers.simulator.generation import Piece, Usage
from workers.simulator.options import Options
from workers.simulator.prompt import Prompter

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
FINGERPRINT = "vllm-simulator"
"""Of the whole answer and of a stream's last chunk."""


@dataclass(slots=True)
class Reply:
    """A reply in the making."""

    request_id: str
    model: str
    created: int
    options: Options
    usage: Usage
    prompt_ids: list[list[int]]
    answer_ids: list[list[int]]
    texts: list[str]
    finish_reasons: list[str] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Take in a piece."""
        self.texts[piece.index] += piece.text
        if piece.finish_reason is not None:
            self.finish_reasons[piece.index] = piece.finish_reason

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(self.finish_reasons)


class Dialect(Protocol):
    """One API's words."""

    opens: bool
    """Whether answers begin a text, as a chat's do, or continue the prompt."""
    streams: bool
    """Whether ``stream`` means anything."""
    generates: bool
    """Whether there is an answer; without, only the prompt is computed."""

    def prompts(self, prompter: Prompter, body: Json) -> list[list[int]]:
        """Token ids of each prompt in the body."""

    def opening(self, reply: Reply) -> bytes:
        """Events before the first piece."""

    def piece(self, reply: Reply, piece: Piece) -> bytes:
        """Events of one piece."""

    def closing(self, reply: Reply) -> bytes:
        """Events after the last piece."""

    def whole(self, reply: Reply) -> Json:
        """The reply that is not streamed."""

    def failure(self, error: ApiError) -> bytes:
        """Events of an error after the stream has begun."""


def sse(content: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"event: %s\n" % event.encode() if event else b""
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(content))


def openai_usage(usage: Usage) -> Json:
    """Usage of both completion APIs, with cached tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chat_usage(usage: Usage) -> Json:
    """Usage of a chat, which also tells how many tokens the cache has gained."""
    told = openai_usage(usage)
    told["prompt_tokens_details"]["created_cache_tokens"] = usage.created_tokens
    return told


class _OpenAi:
    streams = True
    generates = True
    id_prefix: str
    object: str
    chunk_object: str
    usage: Callable[[Usage], Json] = staticmethod(openai_usage)

    def closing(self, reply: Reply) -> bytes:
        if not reply.options.include_usage:
            return DONE
        last = {"usage": self.usage(reply.usage), "system_fingerprint": FINGERPRINT}
        return sse(self._chunk(reply, []) | last) + DONE

    def whole(self, reply: Reply) -> Json:
        choices = [self._choice(reply, index) for index in range(len(reply.texts))]
        return {
            "id": self.id_prefix + reply.request_id,
            "object": self.object,
            "created": reply.created,
            "model": reply.model,
            "choices": choices,
            "usage": self.usage(reply.usage),
            "system_fingerprint": FINGERPRINT,
        }

    def failure(self, error: ApiError) -> bytes:
        return sse(error.body()) + DONE

    def _piece(self, reply: Reply, piece: Piece, choice: Json) -> bytes:
        if reply.options.return_token_ids:
            choice["token_ids"] = piece.token_ids
        chunk = self._chunk(reply, [choice])
        if not reply.options.include_usage and reply.finished:
            chunk["system_fingerprint"] = FINGERPRINT
        return sse(chunk)

    def _choice(self, reply: Reply, index: int) -> Json:
        raise NotImplementedError

    def _chunk(self, reply: Reply, choices: list[Json]) -> Json:
        return {
            "id": self.id_prefix + reply.request_id,
            "object": self.chunk_object,
            "created": reply.created,
            "model": reply.model,
            "choices": choices,
        }


class ChatDialect(_OpenAi):
    """``/v1/chat/completions``."""

    opens = True
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    usage = staticmethod(chat_usage)

    def prompts(self, prompter: Prompter, body: Json) -> list[list[int]]:
        """Token ids of the rendered messages."""
        return [prompter.chat(body)]

    def opening(self, reply: Reply) -> bytes:
        """An empty delta that names the role, for each choice."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            sse(self._chunk(reply, [_delta(index, delta, None)]))
            for index in range(len(reply.texts))
        )

    def piece(self, reply: Reply, piece: Piece) -> bytes:
        """A content delta."""
        delta = {"content": piece.text}
        return self._piece(reply, piece, _delta(piece.index, delta, piece.finish_reason))

    def whole(self, reply: Reply) -> Json:
        """The completion; ``return_token_ids`` adds the prompt's."""
        whole = super().whole(reply)
        if reply.options.return_token_ids:
            whole["prompt_token_ids"] = reply.prompt_ids[0]
        return whole

    def _choice(self, reply: Reply, index: int) -> Json:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": reply.texts[index]},
            "logprobs": None,
            "finish_reason": reply.finish_reasons[index],
            "stop_reason": None,
        }
        if reply.options.return_token_ids:
            choice["token_ids"] = reply.answer_ids[index]
        return choice


class CompletionsDialect(_OpenAi):
    """``/v1/completions``."""

    opens = False
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def prompts(self, prompter: Prompter, body: Json) -> list[list[int]]:
        """Token ids of every prompt."""
        return prompter.completions(body.get("prompt"))

    def opening(self, reply: Reply) -> bytes:
        """Nothing: the first piece is the first event."""
        return b""

    def piece(self, reply: Reply, piece: Piece) -> bytes:
        """A text chunk."""
        choice = _text_choice(piece.index, piece.text, piece.finish_reason)
        return self._piece(reply, piece, choice)

    def _choice(self, reply: Reply, index: int) -> Json:
        choice = _text_choice(index, reply.texts[index], reply.finish_reasons[index])
        if reply.options.return_token_ids:
            choice["prompt_token_ids"] = reply.prompt_ids[index // reply.options.choices]
            choice["token_ids"] = reply.answer_ids[index]
        return choice


def _delta(index: int, delta: Json, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _text_choice(index: int, text: str, finish_reason: str | None) -> Json:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
    }
