"""The datagrams in which the engine's middleware tells the agent about its requests.

Each is a JSON array, ``[version, kind, fields...]``, under 300 bytes. None holds any text
of a request or an answer. Standard library only, Python 3.10: the sending side runs in the
engine's own environment.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Union

from workers.engine_errors import EngineError

__all__ = [
    "MAX_DATAGRAM_BYTES",
    "Ended",
    "EngineError",
    "Event",
    "FirstChunk",
    "Hello",
    "Started",
    "decode",
    "encode",
    "valid_lease",
]

VERSION = 1
MAX_DATAGRAM_BYTES = 512
"""A reader may cut what is longer; it is not ours."""

_INSTANCE = re.compile(r"[0-9a-f]{16}")
_LEASE = re.compile(r"[!#-\[\]-~]{1,128}")
_LABEL = re.compile(r"[a-z_]{1,24}")
_MAX_NUMBER = 2**53


class Hello(NamedTuple):
    """An API server process says that it lives: when it connects, and every few seconds."""

    instance: str
    """16 hex digits, drawn anew by every process."""
    pid: int
    reset: bool
    """All requests in flight follow as ``Started``, then a ``Hello`` without ``reset``:
    what is not among them has ended unheard."""
    in_flight: int
    dropped: int
    """Datagrams that this process could not send since its start."""


class Started(NamedTuple):
    """A request reached the engine."""

    instance: str
    number: int
    """Counts up in each process."""
    lease: str | None
    endpoint: str
    wall_s: float
    """Unix time."""


class FirstChunk(NamedTuple):
    """The first data of a streamed answer, so its prefill is over."""

    instance: str
    number: int
    ttft_s: float


class Ended(NamedTuple):
    """A request is over, one for each ``Started``."""

    instance: str
    number: int
    lease: str | None
    status: int
    """HTTP status that the client got; 0 if it got none."""
    error: EngineError
    duration_s: float
    ttft_s: float | None
    """None unless a streamed answer got as far as its first data."""
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    """Tokens as the answer's usage tells them; None if it does not."""
    streamed: bool


Event = Union[Hello, Started, FirstChunk, Ended]  # noqa: UP007 - evaluated, also by Python 3.10

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_KINDS: dict[type[Event], str] = {Hello: "h", Started: "s", FirstChunk: "f", Ended: "e"}


def encode(event: Event) -> bytes:
    """An event as a datagram."""
    fields = [round(field, 6) if isinstance(field, float) else field for field in event]
    return _ENCODER.encode([VERSION, _KINDS[type(event)], *fields]).encode()


def decode(datagram: bytes) -> Event | None:
    """The event of a datagram; None if it is none of ours."""
    if len(datagram) > MAX_DATAGRAM_BYTES:
        return None
    try:
        version, kind, *fields = json.loads(datagram)
        event_type, checks = _FIELDS[kind]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if version != VERSION or len(fields) != len(checks):
        return None
    if not all(check(field) for check, field in zip(checks, fields, strict=True)):
        return None
    event = event_type(*fields)
    return event._replace(error=EngineError(event.error)) if isinstance(event, Ended) else event


def valid_lease(text: str) -> str | None:
    """A lease id that fits a datagram; None for anything else."""
    return text if _LEASE.fullmatch(text) else None


Check = Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_error(value: Any) -> bool:
    return isinstance(value, str) and value in _ERRORS


def _is_text(pattern: re.Pattern[str]) -> Check:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_ERRORS = frozenset(error.value for error in EngineError)
_is_instance, _is_label = _is_text(_INSTANCE), _is_text(_LABEL)
_is_lease = _or_none(_is_text(_LEASE))
_is_count, _is_time = _or_none(_is_whole), _or_none(_is_seconds)

_FIELDS: dict[str, tuple[Callable[..., Event], tuple[Check, ...]]] = {
    "h": (Hello, (_is_instance, _is_whole, _is_bool, _is_whole, _is_whole)),
    "s": (Started, (_is_instance, _is_whole, _is_lease, _is_label, _is_seconds)),
    "f": (FirstChunk, (_is_instance, _is_whole, _is_seconds)),
    "e": (
        Ended,
        (
            *(_is_instance, _is_whole, _is_lease, _is_whole, _is_error),
            *(_is_seconds, _is_time, _is_count, _is_count, _is_count, _is_bool),
        ),
    ),
}
