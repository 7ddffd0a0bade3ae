"""``EngineError``: why the engine failed a request, from its status and its error body.

The text of an error may quote what the client sent, so below 500 it decides between two
harmless classes only: no client can make a worker look dead (case HE1). Standard library
only, Python 3.10: the middleware runs in the engine's own environment.
"""

from __future__ import annotations

import asyncio
import json
from enum import Enum
from typing import Any

MAX_ERROR_BYTES = 4096
"""Of an error body, no more is looked at."""


class EngineError(str, Enum):  # noqa: UP042 - StrEnum needs Python 3.11, engines may have 3.10
    """Class of a request's end; the value is told to the agent and in a response header."""

    NONE = "none"
    CLIENT = "client"
    """The request is wrong (4xx); it says nothing about the worker."""
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    """The engine refuses more work: 429, or 503 by --max-num-queued-reqs or -tokens."""
    KV_EXHAUSTED = "kv_exhausted"
    ENGINE_DEAD = "engine_dead"
    SHUTTING_DOWN = "shutting_down"
    STREAM_ERROR = "stream_error"
    """An error event under HTTP 200 that says nothing more exact."""
    CLIENT_GONE = "client_gone"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


_TOO_LONG = (
    "maximum context length",
    "maximum model length",
    "max_model_len",
    "longer than the maximum",
    "input_tokens",
)
_SERVER_TEXTS = (
    (
        EngineError.SHUTTING_DOWN,
        ("cannot schedule new futures after shutdown", "shutting down"),
    ),
    (
        EngineError.ENGINE_DEAD,
        ("enginecore encountered an issue", "enginedeaderror", "engine is dead", "enginecore died"),
    ),
    (
        EngineError.QUEUE_FULL,
        ("currently busy and cannot accept", "prefill token backlog limit", "queue is full"),
    ),
    (
        EngineError.KV_EXHAUSTED,
        (
            "kv cache is full",
            "kv cache pool is full",
            "not enough kv cache",
            "no available memory for the cache",
            "out of memory",
        ),
    ),
)
_MAX_CAUSES = 8
_VAGUE = (EngineError.CLIENT, EngineError.OTHER)


def classify(status: int, text: str) -> EngineError:
    """Class of an error answer; ``text`` is what :func:`error_text` gives."""
    text = text.lower()
    if status == 429:
        return EngineError.QUEUE_FULL
    if status >= 500:
        return _server_error(text)
    if status == 413 or any(phrase in text for phrase in _TOO_LONG):
        return EngineError.TOO_LONG
    return EngineError.CLIENT


def classify_event(code: int, text: str) -> EngineError:
    """Class of an error event in a stream that began with HTTP 200."""
    error = classify(code, text)
    return EngineError.STREAM_ERROR if error in _VAGUE else error


def classify_exception(error: BaseException) -> EngineError:
    """Class of what the engine's application raised instead of answering.

    Frameworks wrap exceptions, so the causes are looked at too.
    """
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return EngineError.CLIENT_GONE
    found: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if found is None:
            break
        kind = classify(500, f"{type(found).__name__} {found}"[:MAX_ERROR_BYTES])
        if kind is not EngineError.OTHER:
            return kind
        found = found.__cause__ or found.__context__
    return EngineError.OTHER


def error_text(body: bytes) -> tuple[int, str]:
    """Code of the error object in ``body`` (500 if it has none), its type, param and message.

    A body that is cut or no JSON is taken as text as it is.
    """
    body = body[:MAX_ERROR_BYTES]
    try:
        error = _error_object(json.loads(body))
    except (ValueError, RecursionError):
        return 500, body.decode("utf-8", "replace")
    code = error.get("code")
    text = " ".join(str(error.get(key) or "") for key in ("type", "param", "message"))
    return (code if isinstance(code, int) and 400 <= code <= 599 else 500), text


def _server_error(text: str) -> EngineError:
    for error, phrases in _SERVER_TEXTS:
        if any(phrase in text for phrase in phrases):
            return error
    return EngineError.OTHER


def _error_object(document: Any) -> dict[str, Any]:
    """The error of OpenAI's and Anthropic's bodies and of a failed response's event."""
    holders = [document, document.get("response")] if isinstance(document, dict) else []
    for holder in holders:
        if isinstance(holder, dict) and isinstance(holder.get("error"), dict):
            error: dict[str, Any] = holder["error"]
            return error
    # {"message": ..., "code": ...}, {"detail": ...}, {"error": "..."}
    if not isinstance(document, dict):
        return {}
    return {**document, "message": document.get("message") or document.get("error")}
