"""OpenAI's Responses and Anthropic's Messages: one choice, typed events."""

from __future__ import annotations

from typing import Any

from workers.simulator.dialects import DONE, Reply, sse
from workers.simulator.errors import ApiError
from workers.simulator.generation import Piece
from workers.simulator.prompt import Prompter, anthropic_to_chat, responses_to_chat

Json = dict[str, Any]


class ResponsesDialect:
    """``/v1/responses``."""

    opens = True
    streams = True
    generates = True

    def prompts(self, prompter: Prompter, body: Json) -> list[list[int]]:
        """Token ids of the body as a chat."""
        return [prompter.chat(responses_to_chat(body))]

    def opening(self, reply: Reply) -> bytes:
        """The response, its one item and its one part come into being."""
        started = self._response(reply, "in_progress", [])
        item = self._item(reply, "in_progress", [])
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        return b"".join(
            (
                _typed("response.created", {"response": started}),
                _typed("response.in_progress", {"response": started}),
                _typed("response.output_item.added", {"output_index": 0, "item": item}),
                _typed("response.content_part.added", place | {"part": _part("")}),
            )
        )

    def piece(self, reply: Reply, piece: Piece) -> bytes:
        """A text delta."""
        place = {"item_id": f"msg_{reply.request_id}", "output_index": 0, "content_index": 0}
        return _typed("response.output_text.delta", place | {"delta": piece.text})

    def closing(self, reply: Reply) -> bytes:
        """Part, item and response are complete."""
        part = _part(reply.texts[0])
        item = self._item(reply, "completed", [part])
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        return b"".join(
            (
                _typed("response.output_text.done", place | {"text": part["text"]}),
                _typed("response.content_part.done", place | {"part": part}),
                _typed("response.output_item.done", {"output_index": 0, "item": item}),
                _typed("response.completed", {"response": self.whole(reply)}),
            )
        )

    def whole(self, reply: Reply) -> Json:
        """The response object."""
        item = self._item(reply, "completed", [_part(reply.texts[0])])
        usage = reply.usage
        return self._response(reply, "completed", [item]) | {
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
        }

    def failure(self, error: ApiError) -> bytes:
        """An error event."""
        return sse(error.body()) + DONE

    def _response(self, reply: Reply, status: str, output: list[Json]) -> Json:
        return {
            "id": f"resp_{reply.request_id}",
            "object": "response",
            "created_at": reply.created,
            "model": reply.model,
            "status": status,
            "output": output,
        }

    def _item(self, reply: Reply, status: str, content: list[Json]) -> Json:
        return {
            "id": f"msg_{reply.request_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


class MessagesDialect:
    """``/v1/messages``."""

    opens = True
    streams = True
    generates = True

    def prompts(self, prompter: Prompter, body: Json) -> list[list[int]]:
        """Token ids of the body as a chat."""
        return [prompter.chat(anthropic_to_chat(body))]

    def opening(self, reply: Reply) -> bytes:
        """The message and its one block begin."""
        message = self._message(reply, [], None)
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return _typed("message_start", {"message": message}) + _typed("content_block_start", block)

    def piece(self, reply: Reply, piece: Piece) -> bytes:
        """A text delta."""
        delta = {"type": "text_delta", "text": piece.text}
        return _typed("content_block_delta", {"index": 0, "delta": delta})

    def closing(self, reply: Reply) -> bytes:
        """Block and message end."""
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
        return b"".join(
            (
                _typed("content_block_stop", {"index": 0}),
                _typed("message_delta", {"delta": delta, "usage": self._usage(reply)}),
                _typed("message_stop", {}),
            )
        )

    def whole(self, reply: Reply) -> Json:
        """The message object."""
        block = {"type": "text", "text": reply.texts[0]}
        return self._message(reply, [block], _stop_reason(reply))

    def failure(self, error: ApiError) -> bytes:
        """An error event."""
        return sse(error.anthropic_body(), "error")

    def _message(self, reply: Reply, content: list[Json], stop_reason: str | None) -> Json:
        return {
            "id": f"msg_{reply.request_id}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": reply.model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": self._usage(reply),
        }

    def _usage(self, reply: Reply) -> Json:
        usage = reply.usage
        told = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
        if all(reply.finish_reasons):  # a message that only begins has counted nothing yet
            told["cache_read_input_tokens"] = usage.cached_tokens
            told["cache_creation_input_tokens"] = usage.created_tokens
        return told


def _typed(kind: str, content: Json) -> bytes:
    return sse({"type": kind, **content}, kind)


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": []}


def _stop_reason(reply: Reply) -> str:
    return "max_tokens" if reply.finish_reasons[0] == "length" else "end_turn"
