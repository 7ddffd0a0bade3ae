"""Anthropic's Messages API, turned into the chat messages that the engine makes of it.

The system text becomes a system message, ``tool_use`` blocks become tool calls and each
``tool_result`` block a tool message; text and image blocks become parts.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from extproc.request.openai import CommonBody, Objects, decode
from extproc.request.profile import ChatPrompt, Endpoint, RequestProfile
from extproc.tokens.messages import BILLING_HEADER, count_media_parts


class MessagesBody(CommonBody):
    """``/v1/messages``."""

    system: str | Objects | None = None
    messages: Objects = msgspec.field(default_factory=list)
    tools: Objects | None = None
    max_tokens: int | None = None


def messages_profile(body: bytes) -> RequestProfile:
    """Profile of an Anthropic Messages request.

    Raises:
        InvalidJson, InvalidRequest: see :func:`extproc.request.openai.decode`.
    """
    request = decode(body, MessagesBody)
    messages = _system(request.system)
    for message in request.messages:
        messages += _converted(message)
    tools = [_tool(tool) for tool in request.tools or ()] or None
    prompt = ChatPrompt(messages, tools=tools, media_parts=count_media_parts(messages))
    return RequestProfile(
        endpoint=Endpoint.MESSAGES,
        model=request.model,
        prompts=(prompt,),
        stream=bool(request.stream),
        max_output_tokens=request.max_tokens,
        cache_salt=request.cache_salt or "",
        body_bytes=len(body),
    )


def _system(system: str | Objects | None) -> Objects:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    texts = [_block_text(block) for block in system]
    kept = [text for text in texts if not text.startswith(BILLING_HEADER)]
    return [{"role": "system", "content": "".join(kept)}] if any(kept) else []


def _converted(message: dict[str, Any]) -> Objects:
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    parts: Objects = []
    calls: Objects = []
    results: Objects = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(_tool_result(block))
        else:
            parts.append(block)
    own: dict[str, Any] = {"role": role, "content": parts or None}
    if calls:
        own["tool_calls"] = calls
    return results + ([own] if parts or calls else [])


def _tool_result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(_block_text(part) for part in content)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _block_text(block: Any) -> str:
    text = block.get("text") if isinstance(block, dict) else None
    return text if isinstance(text, str) else ""


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}
