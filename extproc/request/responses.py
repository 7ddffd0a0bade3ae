"""OpenAI's Responses API, turned into the chat messages that the engine makes of it.

A request that continues a stored response (``previous_response_id``) starts from text that
only the engine has: its prompt is unknown here.
"""

from __future__ import annotations

from typing import Any

from extproc.request.openai import CommonBody, Objects, decode
from extproc.request.profile import ChatPrompt, Endpoint, Prompt, RequestProfile, UnknownPrompt
from extproc.tokens.messages import count_media_parts


class ResponsesBody(CommonBody):
    """``/v1/responses``."""

    input: str | list[str | dict[str, Any]] | None = None
    instructions: str | None = None
    tools: Objects | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None


def responses_profile(body: bytes) -> RequestProfile:
    """Profile of a Responses request.

    Raises:
        InvalidJson, InvalidRequest: see :func:`extproc.request.openai.decode`.
    """
    request = decode(body, ResponsesBody)
    return RequestProfile(
        endpoint=Endpoint.RESPONSES,
        model=request.model,
        prompts=(_prompt(request, len(body)),),
        stream=bool(request.stream),
        max_output_tokens=request.max_output_tokens,
        cache_salt=request.cache_salt or "",
        body_bytes=len(body),
    )


def _prompt(request: ResponsesBody, body_chars: int) -> Prompt:
    if request.previous_response_id is not None:
        return UnknownPrompt(body_chars)
    messages: Objects = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    items = request.input if isinstance(request.input, list) else [request.input or ""]
    messages += [_message(item) for item in items]
    return ChatPrompt(
        messages, tools=_tools(request.tools), media_parts=count_media_parts(messages)
    )


def _message(item: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(item, str):
        return {"role": "user", "content": item}
    kind = item.get("type")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        return {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
    return {"role": item.get("role", "user"), "content": item.get("content")}


def _tools(tools: Objects | None) -> Objects | None:
    # Responses tools are flat; templates know the nested chat form.
    functions = [tool for tool in tools or () if tool.get("type") == "function"]
    nested = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in functions
    ]
    return nested or None
