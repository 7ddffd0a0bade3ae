from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.agent.kv_events import Cleared, Removed, Stored, decode_batch

CLEARED = bytes.fromhex("93cb41dac30dad9f797c9181a474797065b0416c6c426c6f636b73436c656172656400")
STORED = {
    "type": "BlockStored",
    "block_hashes": [12204319907483556814],
    "parent_block_hash": None,
    "token_ids": list(range(1, 33)),
    "block_size": 32,
    "lora_id": 1,
    "medium": "GPU",
    "lora_name": "ad1",
    "extra_keys": [["ad1", "zz"]],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "sess1",
}


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def test_the_bytes_of_a_real_engines_clear_are_read() -> None:
    batch = decode_batch(CLEARED)
    assert batch.events == [Cleared()]
    assert batch.ts == pytest.approx(1_795_962_550.49, abs=0.1)


def test_the_bytes_of_a_real_engines_store_begin_as_ours_do() -> None:
    # 93 cb <ts> 91 8b "type" "BlockStored": an array with one map of 11 fields.
    without_session = {key: value for key, value in STORED.items() if key != "session_id"}
    encoded = payload(without_session)
    assert encoded[:1] == b"\x93"
    assert encoded[10:].startswith(bytes.fromhex("918ba474797065ab426c6f636b53746f726564"))
    assert decode_batch(encoded).events == decode_batch(payload(STORED)).events


def test_every_field_of_a_store_is_read_and_unknown_fields_are_ignored() -> None:
    batch = decode_batch(payload(STORED))
    assert batch.events == [
        Stored(
            block_hashes=[12204319907483556814],
            token_ids=list(range(1, 33)),
            block_size=32,
            lora_id=1,
            medium="GPU",
            lora_name="ad1",
            extra_keys=[["ad1", "zz"]],
            group_idx=0,
            spec_kind="full_attention",
        )
    ]


def test_the_rank_of_the_batch_is_read() -> None:
    assert decode_batch(msgspec.msgpack.encode([1.5, [STORED], 3])).rank == 3


@pytest.mark.parametrize("rest", [[], [None], ["zero"], [0, "more"]])
def test_a_batch_without_a_usable_rank_is_of_rank_0(rest: list[object]) -> None:
    batch = decode_batch(msgspec.msgpack.encode([1.5, [STORED], *rest]))
    assert (batch.rank, len(batch.events), batch.unreadable) == (0, 1, 0)


def test_where_a_block_lies_is_read() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "locality": "REMOTE"}
    assert decode_batch(payload(event)).events == [Removed([1], "CPU", None, "REMOTE")]


def test_hashes_may_be_bytes() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [b"\x01" * 32]}
    assert decode_batch(payload(event)).events == [Removed([b"\x01" * 32])]


def test_removal_and_store_of_one_batch_keep_their_order() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}
    kinds = [type(event) for event in decode_batch(payload(removed, STORED)).events]
    assert kinds == [Removed, Stored]


def test_the_older_positional_form_is_read() -> None:
    batch = decode_batch(
        payload(
            ["BlockStored", [5], 4, [1, 2], 2, None],
            ["BlockRemoved", [5], "GPU"],
            ["AllBlocksCleared"],
        )
    )
    assert batch.unreadable == 0
    assert batch.events == [
        Stored(block_hashes=[5], parent_hash=4, token_ids=[1, 2], block_size=2),
        Removed([5], "GPU"),
        Cleared(),
    ]


def test_unknown_kinds_are_counted_and_the_rest_is_read() -> None:
    batch = decode_batch(payload({"type": "BlockDreamt"}, ["BlockDreamt"], 7, STORED))
    assert (len(batch.events), batch.unreadable) == (1, 3)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93", CLEARED[:-9], b"\x80", b"\x91\x01"])
def test_a_malformed_payload_is_counted(raw: bytes) -> None:
    batch = decode_batch(raw)
    assert (batch.ts, batch.events, batch.unreadable) == (None, [], 1)


@given(st.binary(max_size=200))
def test_no_payload_is_fatal(raw: bytes) -> None:
    decode_batch(raw)
    decode_batch(b"\x93\xcb" + raw)
