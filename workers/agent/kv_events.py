"""vLLM's KV cache events, decoded from one ZMQ payload.

A payload is a msgpack array ``[ts, [events], rank]``. Each event is a map with key
``type`` (vLLM 0.10 and later) or an array that starts with the type (before). Whatever
cannot be read is counted, never fatal: an engine upgrade must not stop the agent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes
"""The engine's own name of a block: 64 bits of its hash by default, or all of it."""


class Stored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """A run of full blocks entered the cache; one physical copy each."""

    # The order is that of the older, positional form.
    block_hashes: list[BlockHash]
    parent_hash: BlockHash | None = msgspec.field(default=None, name="parent_block_hash")
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    spec_kind: str | None = msgspec.field(default=None, name="kv_cache_spec_kind")
    locality: str | None = None
    """LOCAL or REMOTE, seen from the engine."""


class Removed(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """One physical copy of each block left the cache."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The whole cache is empty."""


class _OldStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_hash: BlockHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    spec_kind: str | None = None


class _OldRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _OldCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    rank: Any = None


KvEvent: TypeAlias = Stored | Removed | Cleared

_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_map = msgspec.msgpack.Decoder(Stored | Removed | Cleared).decode
_decode_array = msgspec.msgpack.Decoder(_OldStored | _OldRemoved | _OldCleared).decode


@dataclass(frozen=True, slots=True)
class Batch:
    """What one payload said."""

    ts: float | None
    """The engine's wall clock in seconds; None if the payload could not be read."""
    events: list[KvEvent] = field(default_factory=list)
    unreadable: int = 0
    """Events, or the whole payload, that could not be understood."""
    rank: int = 0
    """Data-parallel rank of the engine that speaks."""


def decode_batch(payload: bytes) -> Batch:
    """Decode a payload; what cannot be read is counted in ``unreadable``."""
    try:
        raw = _decode_batch(payload)
    except (msgspec.MsgspecError, RecursionError):
        return Batch(ts=None, unreadable=1)
    events: list[KvEvent] = []
    unreadable = 0
    for item in raw.events:
        try:
            events.append(_decode_event(bytes(item)))
        except (msgspec.MsgspecError, RecursionError):
            unreadable += 1
    return Batch(raw.ts, events, unreadable, raw.rank if isinstance(raw.rank, int) else 0)


def _decode_event(item: bytes) -> KvEvent:
    if not _is_array(item[0]):
        event: KvEvent = _decode_map(item)
        return event
    old = _decode_array(item)
    if isinstance(old, _OldStored):
        return Stored(*msgspec.structs.astuple(old))
    if isinstance(old, _OldRemoved):
        return Removed(*msgspec.structs.astuple(old))
    return Cleared()


def _is_array(head: int) -> bool:
    # msgpack: fixarray, array 16, array 32.
    return head & 0xF0 == 0x90 or head in (0xDC, 0xDD)
