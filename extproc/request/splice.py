"""``edit_top_level``: change members of a JSON object and leave every other byte alone.

Numbers, key order, spaces and fields that kvgate does not know reach the engine as they
were sent. msgspec finds where values end, in C and without building them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from extproc.errors import InvalidJson, InvalidRequest

MAX_MEMBERS = 1_024
"""Members of the object; engines know some sixty fields."""

_UTF8_BOM = b"\xef\xbb\xbf"
_SPACE = rb"[ \t\n\r]*+"
_KEY = re.compile(_SPACE + rb'("(?:[^"\\]++|\\.)*+")' + _SPACE + rb":" + _SPACE, re.DOTALL)
_AFTER = re.compile(_SPACE + rb"[,}]")

_FOREIGN = tuple(
    (word, re.compile(pattern), stand_in)
    for word, pattern, stand_in in (
        (rb"\u", rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", rb"\\u0000"),
        (b"NaN", rb"NaN(?<![\w.+-]NaN)(?![\w.+-])", b"100"),
        (b"Infinity", rb"Infinity(?<![\w.+-]Infinity)(?![\w.+-])", b"1" * 8),
        (b"Infinity", rb"-Infinity(?<![\w.+-]-Infinity)(?![\w.+-])", b"-" + b"1" * 8),
    )
)
"""What engines' JSON reader takes and msgspec does not, and stand-ins of the same length.
Patterns start with literal text, which makes them ten times as fast."""


class _Key:
    """A key that equals no other, so that msgspec keeps every member of a repeated one."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Member:
    """One member. Offsets into the body; ``start`` to ``end`` is all between two commas."""

    name: str
    start: int
    key_start: int
    key_end: int
    value_start: int
    value_end: int
    end: int


def edit_top_level(body: bytes, changes: Mapping[str, bytes | None]) -> bytes:
    """The object with these members set to JSON values, or removed where the value is None.

    A member keeps its place. One that is repeated stays once, however its keys are spelled,
    so that every reader sees the same value. New members go first. Strings are not looked
    into: what is not UTF-8 there is the engine's to refuse.

    Args:
        body: UTF-8, with or without a byte order mark.

    Raises:
        InvalidJson: not JSON.
        InvalidRequest: JSON, but no object, or one of more than ``MAX_MEMBERS`` members.
    """
    mark = _UTF8_BOM if body.startswith(_UTF8_BOM) else b""
    body = body.removeprefix(mark)
    members = _members(body)
    view = memoryview(body)
    todo = dict(changes)
    kept: list[bytes | memoryview] = []
    for member in members:
        if member.name not in changes:
            kept.append(view[member.start : member.end])
            continue
        value = todo.pop(member.name, None)
        if value is not None:
            kept.append(_changed(body, member, value))
    new = [_quoted(name) + b":" + value for name, value in todo.items() if value is not None]
    opened = body.index(b"{") + 1
    closed = members[-1].end if members else opened
    return b"".join([mark, view[:opened], *_with_commas([*new, *kept]), view[closed:]])


def _members(body: bytes) -> list[_Member]:
    found: list[_Member] = []
    start = body.find(b"{") + 1
    for length in _value_lengths(body):
        # msgspec has read it: both patterns match right here.
        key = next(_KEY.finditer(body, start))
        value_end = key.end() + length
        after = next(_AFTER.finditer(body, value_end)).end()
        found.append(
            _Member(
                name=_unquoted(key[1]),
                start=start,
                key_start=key.start(1),
                key_end=key.end(1),
                value_start=key.end(),
                value_end=value_end,
                end=after - 1,
            )
        )
        start = after
    return found


def _value_lengths(body: bytes) -> list[int]:
    """Bytes of each member's value, in order."""
    try:
        return _decoded_lengths(body)
    except msgspec.ValidationError:
        raise _no_object() from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _decoded_lengths(_tame(body))
    except msgspec.ValidationError:
        raise _no_object() from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidJson("The request body is not valid JSON.") from None


def _no_object() -> InvalidRequest:
    return InvalidRequest("The request body must be a JSON object.")


def _tame(body: bytes) -> bytes:
    for word, pattern, stand_in in _FOREIGN:
        if word in body:
            body = pattern.sub(stand_in, body)
    return body


def _decoded_lengths(body: bytes) -> list[int]:
    count = 0

    def keep(_type: type, _name: str) -> _Key:
        nonlocal count
        count += 1
        if count > MAX_MEMBERS:
            raise InvalidRequest(f"The request body has more than {MAX_MEMBERS} fields.")
        return _Key()

    fields = msgspec.json.decode(body, type=dict[_Key, msgspec.Raw], dec_hook=keep)
    return [len(memoryview(value)) for value in fields.values()]


def _changed(body: bytes, member: _Member, value: bytes) -> bytes:
    before = body[member.start : member.key_start]
    colon = body[member.key_end : member.value_start]
    after = body[member.value_end : member.end]
    return b"".join((before, _quoted(member.name), colon, value, after))


def _with_commas(chunks: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    return [piece for chunk in chunks for piece in (b",", chunk)][1:]


def _quoted(name: str) -> bytes:
    return msgspec.json.encode(name)


def _unquoted(key: bytes) -> str:
    name = json.loads(key) if b"\\" in key else key[1:-1].decode()
    return str(name)
