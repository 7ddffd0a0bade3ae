"""Chat messages as the engine hands them to its template.

Clients send content as text, as a list of parts, or not at all. vLLM turns that into what
the template wants before rendering: parts joined by newlines, or parts as they are; tool
call arguments decoded from their JSON string; null content as empty.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from extproc.tokens.template import ContentFormat, Messages

MEDIA_MARK = "\ue000kvgate-media\ue000"
"""Stands where a message has media: the exact prefix ends at the first mark."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_KEPT_FIELDS = ("name", "tool_call_id", "reasoning", "reasoning_content")


def normalise_messages(messages: Messages, content_format: ContentFormat) -> Messages:
    """Messages with normal content; new objects where anything has to change.

    A message with media starts with :data:`MEDIA_MARK`: engines may put placeholders
    ahead of its text, so nothing of it is a known prefix.
    """
    return [_normalise(message, content_format) for message in messages]


def count_media_parts(messages: Messages) -> int:
    """Parts of all messages that are not text: each needs tokens that only the engine knows."""
    lists = (m["content"] for m in messages if isinstance(m.get("content"), list))
    return sum(not _is_text(part) for parts in lists for part in parts)


def _normalise(message: dict[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    role = message.get("role")
    content = message.get("content")
    if content_format == "string" and type(content) is str and len(message) == 2 and role:
        return message  # as it should be; templates cannot change it
    result: dict[str, Any] = {"role": role}
    if isinstance(content, list):
        result["content"] = _join(content) if content_format == "string" else _parts(content)
    elif content_format == "string":
        result["content"] = content or ""
    else:
        result["content"] = [{"type": "text", "text": content}] if content else []
    for field in _KEPT_FIELDS:
        if message.get(field) is not None:
            result[field] = message[field]
    if role == "assistant" and isinstance(message.get("tool_calls"), list):
        result["tool_calls"] = [_decode_call(call) for call in message["tool_calls"]]
    return result


def _join(parts: list[Any]) -> str:
    texts = [_text(part) for part in parts if _is_text(part)]
    marks = [MEDIA_MARK] if len(texts) < len(parts) else []
    return "\n".join(marks + texts)


def _parts(parts: list[Any]) -> list[dict[str, Any]]:
    texts = [{"type": "text", "text": _text(part)} for part in parts if _is_text(part)]
    if len(texts) < len(parts):
        texts.insert(0, {"type": "text", "text": MEDIA_MARK})
    return texts


def _is_text(part: Any) -> bool:
    if isinstance(part, dict):
        kind = part.get("type", "text")
        return isinstance(kind, str) and kind in _TEXT_PARTS
    return isinstance(part, str)


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    value = part.get("text") or part.get("refusal") or part.get("thinking")
    return value if isinstance(value, str) else ""


def _decode_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Text that is not JSON stays as it is: the engine will answer for it.
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments) if arguments else {}
    elif arguments is None:
        function["arguments"] = {}
    return {**call, "function": function}
