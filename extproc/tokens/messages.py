"""Chat messages as the engine hands them to its template.

Clients send content as text, as a list of parts, or not at all. vLLM turns that into what
the template wants before rendering: parts joined by newlines, or parts as they are; tool
call arguments decoded from their JSON string; null content as empty. The rules are those of
vLLM 0.32; tests/vllm compares them with the engine's own tokens.
"""

from __future__ import annotations

import json
from typing import Any

from extproc.tokens.template import ContentFormat, Messages

MEDIA_MARK = "\ue000kvgate-media\ue000"
"""Stands where a message has media: the exact prefix ends at the first mark."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code's first line, different in every request; vLLM takes it out of system prompts."""
_TALKERS = ("user", "assistant")
_TOOL_FIELDS = ("name", "description", "parameters")
_CALL_FIELDS = ("id", "function", "type")
_CALLED_FIELDS = ("arguments", "name")
_OPTIONAL_TOOL_FIELDS = ("strict", "defer_loading")


def normalise_messages(
    messages: Messages, content_format: ContentFormat, *, takes_developer: bool = True
) -> Messages:
    """Messages with normal content; new objects where anything has to change.

    A message with media starts with :data:`MEDIA_MARK`: engines may put placeholders
    ahead of its text, so nothing of it is a known prefix.

    Args:
        takes_developer: the template knows the role; else developers speak as the system.
    """
    as_text = content_format == "string"
    # Most are as they should be, and templates cannot change them. Long chats have hundreds.
    normal = [
        message
        if as_text
        and len(message) == 2
        and message.get("role") in _TALKERS
        and type(message.get("content")) is str
        else _normalise(message, content_format)
        for message in messages
    ]
    if not takes_developer and any(message["role"] == "developer" for message in normal):
        return _one_system_message(normal)
    return normal


def normalise_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools with the fields that vLLM knows, in its order, absent ones null."""
    return None if tools is None else [_normalise_tool(tool) for tool in tools]


def count_media_parts(messages: Messages) -> int:
    """Parts of all messages that are not text: each needs tokens that only the engine knows."""
    lists = (m["content"] for m in messages if isinstance(m.get("content"), list))
    return sum(not _is_text(part) for parts in lists for part in parts)


def _normalise(message: dict[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    role = message.get("role")
    content = message.get("content")
    if role == "system":
        content = _without_billing(content)
    result: dict[str, Any] = {"role": role, "content": _content(role, content, content_format)}
    if role == "assistant":
        _add_assistant_fields(result, message)
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        result["tools"] = message["tools"]
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    return result


def _add_assistant_fields(result: dict[str, Any], message: dict[str, Any]) -> None:
    if isinstance(message.get("tool_calls"), list) and message["tool_calls"]:
        result["tool_calls"] = [_decode_call(call) for call in message["tool_calls"]]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning


def _content(role: object, content: Any, content_format: ContentFormat) -> Any:
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        parts = []
    # Most templates take a tool's answer as text only, whatever they do with the others'.
    if content_format == "string" or (role == "tool" and all(map(_is_text, parts))):
        return _join(parts, keep_empty=content_format == "openai")
    return _parts(parts)


def _without_billing(content: Any) -> Any:
    """System content without :data:`BILLING_HEADER`'s line."""
    if isinstance(content, str):
        return _after_billing(content) if content.startswith(BILLING_HEADER) else content
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        text = _text(part) if _is_text(part) else ""
        if text.startswith(BILLING_HEADER):
            part = _after_billing(text)
            if not part:
                continue
        kept.append(part)
    return kept


def _after_billing(text: str) -> str | None:
    return text.partition("\n")[2] or None


def _one_system_message(messages: Messages) -> Messages:
    """Developers' messages as the system's, and all of those as the first message."""
    converted = [
        {"role": "system", "content": message["content"]}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    spoken = [message for message in converted if message["role"] == "system"]
    if len(spoken) == 1 and converted[0] is spoken[0]:
        return converted
    texts = [_plain(message["content"]) for message in spoken]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _normalise_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool  # the engine refuses it
    known = {field: function.get(field) for field in _TOOL_FIELDS}
    deferred = tool.get("defer_loading")
    if deferred is not None:
        function = {"defer_loading": deferred, **function}
    for field in _OPTIONAL_TOOL_FIELDS:
        if function.get(field) is not None:
            known[field] = function[field]
    result = {"type": "function", "function": known}
    return result if deferred is None else {**result, "defer_loading": deferred}


def _join(parts: list[Any], *, keep_empty: bool) -> str:
    texts = [_text(part) for part in parts if _is_text(part)]
    marks = [MEDIA_MARK] if len(texts) < len(parts) else []
    return "\n".join(marks + [text for text in texts if text or keep_empty])


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
    function = {**call["function"], "arguments": _decoded(call["function"].get("arguments"))}
    # The engine's order, which a template that prints the whole call shows.
    function = {field: function[field] for field in _CALLED_FIELDS if field in function}
    return {field: {**call, "function": function}[field] for field in _CALL_FIELDS if field in call}


def _decoded(arguments: Any) -> Any:
    """Arguments as the object that templates want; anything else is an empty one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}
