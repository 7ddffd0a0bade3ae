"""What kvgate changes in a body: the cap on the answer's length, and the model's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from extproc.request.openai import decode
from extproc.request.profile import Endpoint
from extproc.request.splice import edit_top_level

OUTPUT_CAPS: Mapping[Endpoint, tuple[str, ...]] = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
}
"""Fields that cap the output, most important first; other endpoints generate nothing."""


class _Least(msgspec.Struct):
    min_tokens: Any = None


def shorten_output(body: bytes, endpoint: Endpoint, tokens: int) -> bytes:
    """The body with its output capped at ``tokens``, in every field that an engine may read.

    A ``min_tokens`` above that comes down with it, as engines refuse the pair otherwise.

    Raises:
        InvalidJson, InvalidRequest: the body is no JSON object.
    """
    changes: dict[str, bytes | None] = dict.fromkeys(OUTPUT_CAPS.get(endpoint, ()), b"%d" % tokens)
    if not changes:
        return body
    if b"min_tokens" in body:
        least = decode(body, _Least).min_tokens
        if isinstance(least, int | float) and least > tokens:
            changes["min_tokens"] = b"%d" % tokens
    return edit_top_level(body, changes)


def replace_model(body: bytes, name: str) -> bytes:
    """The body with another model's name.

    Raises:
        InvalidJson, InvalidRequest: the body is no JSON object.
    """
    return edit_top_level(body, {"model": msgspec.json.encode(name)})
