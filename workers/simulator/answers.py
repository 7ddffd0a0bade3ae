"""JSON answers as vLLM's server writes them: compact, and with no charset in their type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web


def json_answer(
    content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A response with this content."""
    return web.Response(
        body=msgspec.json.encode(content),
        status=status,
        headers=headers,
        content_type="application/json",
    )
