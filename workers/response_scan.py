"""``ResponseScan``: token usage and error events of an answer, read as its bytes go by.

No body is copied or parsed as a whole: a few byte searches a chunk, and of all usage objects
the first and the last are parsed. What is split over chunks is found all the same; a tail
of at most 4 KB is kept for that. Quotes in the model's text are escaped in JSON, so it
cannot look like a usage object. Standard library only, Python 3.10.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from workers.engine_errors import MAX_ERROR_BYTES

MAX_USAGE_BYTES = 4096
"""A usage object longer than this stays unknown."""
_MAX_MISSES = 256
"""After so many objects named usage that are none, no further one is parsed."""
_KEEP = 64
"""Longer than anything that must be seen in one piece before a usage or error object."""

_DECODER = json.JSONDecoder()
_NEEDLE = b'"usage"'
_TOKENS = b'_tokens"'
_USUAL = (b'"usage":{', b'"usage": {')
# Between JSON tokens; an event's data may go on in a second data line.
_GAP = rb"(?:\s|data:)*"
_BEFORE_USAGE = re.compile(_NEEDLE + _GAP + rb":" + _GAP + rb"(?=\{)")
_MAY_BE_USAGE = re.compile(_NEEDLE + _GAP + rb"(?::" + _GAP + rb")?(?:d|da|dat|data)?\Z")
_DATA_LINE = re.compile(rb"\r?\n(?:data:)?")
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")

_ERROR, _FAILED = b"error", b"response.failed"
_ERROR_EVENT = re.compile(
    rb"(?:event: ?(?:error|response\.failed)\r?\ndata: ?(?=\{)"
    rb'|data: ?(?=\{\s{0,8}"error"\s{0,8}:\s{0,8}[{"]))'
)

_PREAMBLES = tuple(
    b"event: response." + name + b"\n" for name in (b"created", b"in_progress", b"queued")
)


class Usage(NamedTuple):
    """Tokens of one answer; None = it does not say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


_NOTHING = Usage()


def is_before_prefill(chunk: bytes) -> bool:
    """True for what vLLM streams before its engine has done anything.

    These are keep-alive comments and the first two events of the responses endpoint. A
    chat's empty role delta is not one: it is made from the engine's first output.
    """
    if chunk.startswith(b":"):
        return chunk.find(b"data:") < 0
    return chunk.startswith(_PREAMBLES) and chunk.find(b"\n\n") == len(chunk) - 2


class ResponseScan:
    """Fed with the chunks of one answer, in any cut."""

    __slots__ = (
        "_at_event_start",
        "_carry",
        "_error_complete",
        "_first",
        "_last",
        "_misses",
        "_sse",
        "error",
    )

    def __init__(self, *, sse: bool) -> None:
        self.error: bytes | None = None
        """Data of the first error event, at most 4 KB."""
        self._sse = sse
        self._first: Usage | None = None
        # The newest one after the first, not parsed: in some streams every chunk has one.
        self._last = b""
        self._misses = 0
        self._carry = b""
        # What is carried begins where an event begins.
        self._at_event_start = True
        self._error_complete = False

    @property
    def usage(self) -> Usage:
        """Each number as the last usage object has it, or else the first one."""
        first = self._first if self._first is not None else _NOTHING
        last = _usage(self._last)
        return first if last is None else _merged(first, last)

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes."""
        if (
            not self._carry
            and self._sse
            and _ERROR not in chunk
            and _FAILED not in chunk
            and chunk.endswith(_EVENT_ENDS)
            and (_NEEDLE not in chunk or self._take_newer(chunk))
        ):
            return  # Whole events and no error: nearly all chunks.
        self._feed(self._carry + chunk if self._carry else chunk)

    def _take_newer(self, chunk: bytes) -> bool:
        """Take the last usage of whole events unparsed; False if that is not so simple."""
        at = chunk.rfind(_NEEDLE)
        if self._first is None or not chunk.startswith(_USUAL, at):
            return False
        usage = chunk[at : at + MAX_USAGE_BYTES]
        if _TOKENS not in usage:
            return False
        self._last = usage
        return True

    def _feed(self, data: bytes) -> None:
        at = data.find(_NEEDLE)
        keep_from = len(data) - _KEEP if at < 0 else self._find_usage(data, at)
        if not self._sse:
            self._carry = data[max(0, keep_from) :]
            return
        if (_ERROR in data or _FAILED in data) and not self._error_complete:
            keep_from = min(keep_from, self._find_error(data))
        if data.endswith(_EVENT_ENDS):
            self._carry = b""
            self._at_event_start = True
        else:
            self._at_event_start = self._at_event_start and keep_from <= 0
            self._carry = data[max(0, keep_from) :]

    def _find_usage(self, data: bytes, at: int) -> int:
        """Take the usage objects of ``data``, the first of which may be at ``at``.

        Returns:
            Where the bytes begin that must be seen again, with those that follow.
        """
        while True:
            piece = data[at : at + MAX_USAGE_BYTES]
            end = _event_end(piece) if self._sse else -1
            taken = self._take_event(piece[:end]) if end >= 0 else self._take(piece)
            if not taken:
                if end < 0 and _may_go_on(piece):
                    return at
                self._misses += _BEFORE_USAGE.match(piece) is not None
            behind = at + len(_NEEDLE)
            at = data.find(_NEEDLE, behind)
            if at < 0:
                return max(behind, len(data) - _KEEP)

    def _take_event(self, piece: bytes) -> bool:
        """Take a piece that ends with its event, unparsed unless it is the first."""
        if self._first is None:
            return self._take(piece)
        if _TOKENS in piece and (piece.startswith(_USUAL) or _BEFORE_USAGE.match(piece)):
            self._last = piece
        return True

    def _take(self, piece: bytes) -> bool:
        """Take a piece if it is a usage object; False if it is none, or not whole."""
        usage = _usage(piece) if self._misses < _MAX_MISSES else None
        if usage is None:
            return False
        if usage == _NOTHING:
            self._misses += 1
        elif self._first is None:
            self._first = usage
        else:
            self._last = piece
        return True

    def _find_error(self, data: bytes) -> int:
        """Take the first error event; where it begins if it is not complete."""
        event = self._error_event(data)
        if event is None:
            return len(data)
        payload = data[event.end() : event.end() + MAX_ERROR_BYTES]
        end = _event_end(payload)
        self.error = payload if end < 0 else payload[:end]
        self._error_complete = end >= 0 or len(payload) == MAX_ERROR_BYTES
        # The newline before it is kept too: it must be found to begin a line again.
        return len(data) if self._error_complete else max(0, event.start() - 1)

    def _error_event(self, data: bytes) -> re.Match[bytes] | None:
        event = _ERROR_EVENT.search(data)
        while event is not None:
            at = event.start()
            if data[at - 1 : at] == b"\n" if at else self._at_event_start:
                return event
            # Its data line may begin a line although its event line does not.
            event = _ERROR_EVENT.search(data, at + 1)
        return None


def _event_end(piece: bytes) -> int:
    """Where the event ends that ``piece`` is part of; -1 if it goes on."""
    end = piece.find(_EVENT_ENDS[0])
    other = piece.find(_EVENT_ENDS[1], 0, end if end >= 0 else len(piece))
    return other if other >= 0 else end


def _may_go_on(piece: bytes) -> bool:
    """True if more bytes could make a usage object of ``piece``."""
    if len(piece) >= MAX_USAGE_BYTES:
        return False
    return _BEFORE_USAGE.match(piece) is not None or _MAY_BE_USAGE.match(piece) is not None


def _usage(piece: bytes) -> Usage | None:
    """The object named usage that ``piece`` begins with; None if it is none or not whole."""
    before = _BEFORE_USAGE.match(piece)
    if before is None or b"}" not in piece:
        return None
    text = piece[before.end() :]
    if b"\n" in text:
        text = _DATA_LINE.sub(b"\n", text)
    try:
        found, _ = _DECODER.raw_decode(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return _usage_of(found)


def _usage_of(found: dict[str, Any]) -> Usage:
    """The forms of OpenAI's chat and completions, of its responses, and of Anthropic."""
    if "prompt_tokens" in found:
        cached = _count(found.get("prompt_tokens_details"), "cached_tokens")
        return Usage(_count(found, "prompt_tokens"), _count(found, "completion_tokens"), cached)
    prompt, output = _count(found, "input_tokens"), _count(found, "output_tokens")
    if "input_tokens_details" in found:
        return Usage(prompt, output, _count(found["input_tokens_details"], "cached_tokens"))
    read, created = (_count(found, f"cache_{kind}_input_tokens") for kind in _ANTHROPIC)
    if prompt is not None:
        # Anthropic's input_tokens leaves out what the cache holds.
        prompt += (read or 0) + (created or 0)
    return Usage(prompt, output, read)


_ANTHROPIC = ("read", "creation")


def _count(holder: Any, key: str) -> int | None:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if type(value) is int and 0 <= value < 2**53 else None


def _merged(old: Usage, new: Usage) -> Usage:
    return Usage(*(was if now is None else now for was, now in zip(old, new, strict=True)))
