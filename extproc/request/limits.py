"""What kvgate changes in a body: the cap on the answer's length, model, salt, priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from extproc.request.openai import decode
from extproc.request.profile import Endpoint

OUTPUT_CAPS: Mapping[Endpoint, tuple[str, ...]] = {
    Endpoint.CHAT: ("max_completion_tokens", "max_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
}
"""Fields that cap the output, most important first; other endpoints generate nothing."""


class _Least(msgspec.Struct):
    min_tokens: Any = None


def output_caps(body: bytes, endpoint: Endpoint, tokens: int) -> dict[str, bytes]:
    """Members that cap the output at ``tokens``, every one that an engine may read.

    A ``min_tokens`` above that comes down with it, as engines refuse the pair otherwise.

    Raises:
        InvalidJson, InvalidRequest: the body is no JSON object.
    """
    cap = b"%d" % tokens
    changes = dict.fromkeys(OUTPUT_CAPS.get(endpoint, ()), cap)
    if changes and b"min_tokens" in body:
        least = decode(body, _Least).min_tokens
        if isinstance(least, int | float) and least > tokens:
            changes["min_tokens"] = cap
    return changes


def engine_members(model: str | None, salt: str | None, priority: int | None) -> dict[str, bytes]:
    """Members by which the engine is told another model, cache salt or priority."""
    told = {"model": model, "cache_salt": salt, "priority": priority}
    return {name: msgspec.json.encode(value) for name, value in told.items() if value is not None}
