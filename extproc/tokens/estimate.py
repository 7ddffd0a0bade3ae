"""How many tokens a prompt has where it is not tokenised."""

from __future__ import annotations

from extproc.request.profile import Prompt, TextPrompt, TokenPrompt, UnknownPrompt
from extproc.tokens.text_keys import CHARS_PER_TOKEN

_COUNTED_TYPES = frozenset({"text", "input_text", "output_text", "function", "object"})


def estimated_tokens(prompt: Prompt, media_part_tokens: int) -> int:
    """At least one for any prompt, but for a list of no token ids.

    Args:
        media_part_tokens: charge for each part that is not text.
    """
    if isinstance(prompt, TokenPrompt):
        return len(prompt.token_ids)
    if isinstance(prompt, UnknownPrompt):
        return 1 + prompt.chars // CHARS_PER_TOKEN
    if isinstance(prompt, TextPrompt):
        return 1 + len(prompt.text) // CHARS_PER_TOKEN
    chars = _text_chars([prompt.messages, prompt.tools, prompt.documents])
    return 1 + chars // CHARS_PER_TOKEN + prompt.media_parts * media_part_tokens


def _is_counted(kind: object) -> bool:
    return isinstance(kind, str) and kind in _COUNTED_TYPES


def _text_chars(value: object) -> int:
    """Characters of every string in JSON data, media payloads left out."""
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict) and _is_counted(item.get("type", "text")):
            stack.extend(item.values())
    return total
