"""Prompts as token ids, made the engine's way: the whole text at once.

This is deliberately not the gateway's path. The gateway tokenises by segment and reads
bodies with its own code; if the two disagree, the cache shows it. Only the chat template
is shared, through :mod:`extproc.tokens`. Benchmarks, where eight engines share two cores, may
ask for segments here too (:class:`SegmentPrompter`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from extproc.tokens.cache import ByteBoundedLru
from extproc.tokens.messages import normalise_messages, normalise_tools
from extproc.tokens.template import ChatTemplate, TemplateFailure
from extproc.tokens.tokenizer import SegmentTokenizer
from workers.simulator.errors import ApiError, malformed

Json = dict[str, Any]

_SEGMENT_CACHE_BYTES = 32 << 20

_PART_KINDS = frozenset(
    ("text", "input_text", "output_text", "refusal", "thinking", "tool_use", "tool_result",
     "image_url", "input_image", "image", "input_audio", "audio_url", "video_url")
)  # fmt: skip


class Prompter:
    """One model's tokenizer and template."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._template = ChatTemplate.load(model_dir)

    def text(self, text: str, special: bool = True) -> list[int]:
        """Ids of plain text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def chat(self, body: Json) -> list[int]:
        """Ids of a chat body's messages, through the template."""
        messages = _messages(body)
        tools = _objects(body, "tools")
        if tools == []:
            raise ApiError(400, "`tools` must not be an empty array.", "tools")
        if self._template is None:
            raise ApiError(400, "this model has no chat template")
        extra = body.get("chat_template_kwargs")
        if not isinstance(extra, dict | None):
            raise malformed("chat_template_kwargs must be an object", "chat_template_kwargs")
        try:
            rendered = self._template.render(
                normalise_messages(
                    messages,
                    self._template.content_format,
                    takes_developer=self._template.takes_developer,
                ),
                tools=normalise_tools(tools),
                documents=body.get("documents"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                continue_final_message=body.get("continue_final_message", False),
                extra=extra,
            )
        except TemplateFailure as failure:
            raise ApiError(400, str(failure)) from None
        return self.text(rendered, special=bool(body.get("add_special_tokens", False)))

    def completions(self, prompt: Any, field: str = "prompt") -> list[list[int]]:
        """Ids of each prompt: a string, a list of strings, ids, or a list of id lists."""
        if isinstance(prompt, str):
            return [self.text(prompt)]
        if prompt is None:
            raise ApiError(400, f"{field} must be given", field)
        if prompt == []:
            raise ApiError(400, f"{field} must not be empty")
        if not isinstance(prompt, list):
            raise malformed(f"{field} must be a string or a list", field)
        if all(isinstance(item, str) for item in prompt):
            return [self.text(item) for item in prompt]
        if _are_ids(prompt):
            return [self._checked(prompt)]
        if all(isinstance(item, list) and _are_ids(item) for item in prompt):
            return [self._checked(item) for item in prompt]
        raise malformed(f"{field} must hold strings or token ids", f"{field}.0")

    def _checked(self, ids: list[int]) -> list[int]:
        size = self.tokenizer.get_vocab_size()
        if any(token < 0 for token in ids):
            raise malformed("token ids must not be negative", "prompt.0")
        if any(token >= size for token in ids):
            raise ApiError(400, f"token ids must be below the vocabulary size {size}")
        return ids


class SegmentPrompter(Prompter):
    """The same ids at a small part of the cost, for text that comes again."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        self._segments = SegmentTokenizer.load(model_dir)
        self._known: ByteBoundedLru[str, list[int]] = ByteBoundedLru(_SEGMENT_CACHE_BYTES)

    def text(self, text: str, special: bool = True) -> list[int]:
        """Ids of plain text; texts that specials wrap are taken whole."""
        if special:
            return super().text(text, special)
        return [number for piece in self._segments.split(text) for number in self._ids(piece)]

    def _ids(self, piece: str) -> list[int]:
        ids = self._known.get(piece)
        if ids is None:
            known = self._segments.special_ids.get(piece)
            found = self._segments.encode_quickly([piece])[0] if known is None else known
            ids = found.tolist()
            self._known.put(piece, ids, len(piece) + 8 * len(ids))
        return ids


def responses_to_chat(body: Json) -> Json:
    """Chat body of a Responses body."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise malformed("input must be a string or a list of items", "input")
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    given_tools = _objects(body, "tools") or []
    tools = [_nested_tool(tool) for tool in given_tools if tool.get("type") == "function"]
    return {"messages": system + [_item_to_message(item) for item in items], "tools": tools or None}


def anthropic_to_chat(body: Json) -> Json:
    """Chat body of an Anthropic Messages body."""
    given = _messages(body)
    system = _joined_text(body.get("system"), "")
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in given:
        messages += _turn(message)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in _objects(body, "tools") or ()
    ]
    return {"messages": messages, "tools": tools or None}


def _turn(message: Json) -> list[Json]:
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message["role"], "content": content}]
    blocks = [block for block in content if isinstance(block, dict)]
    results = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _joined_text(block.get("content"), "\n"),
        }
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [
        _call(block.get("id"), block.get("name"), json.dumps(block.get("input") or {}))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    parts = [b for b in blocks if b.get("type") not in ("tool_use", "tool_result")]
    own: Json = {"role": message["role"], "content": parts or None}
    if calls:
        own["tool_calls"] = calls
    return results + ([own] if parts or calls else [])


def _item_to_message(item: Json) -> Json:
    kind = item.get("type")
    if kind == "function_call":
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "content": item.get("output"),
            "tool_call_id": item.get("call_id"),
        }
    return {"role": item.get("role", "user"), "content": item.get("content")}


def _call(call_id: Any, name: Any, arguments: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _nested_tool(tool: Json) -> Json:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _joined_text(content: Any, separator: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return separator.join(str(p.get("text") or "") for p in parts if isinstance(p, dict))


def _objects(body: Json, field: str) -> list[Json] | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise malformed(f"{field} must be a list of objects", field)
    return value


def _messages(body: Json) -> list[Json]:
    value = body.get("messages")
    if not isinstance(value, list):
        raise malformed("messages must be a list", "messages")
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise malformed("a message must be an object with a role", f"messages.{place}")
        content = message.get("content")
        if isinstance(content, list) and not all(map(_is_part, content)):
            raise ApiError(400, "a part of a message's content is of no known kind")
    if not value:
        raise ApiError(400, "messages must not be empty")
    return value


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return isinstance(part, str)
    kind = part.get("type", "text")
    return isinstance(kind, str) and kind in _PART_KINDS


def _are_ids(items: list[Any]) -> bool:
    return bool(items) and all(type(item) is int for item in items)
