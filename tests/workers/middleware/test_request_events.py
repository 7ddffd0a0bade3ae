"""Datagrams are small, come back as they were, and garbage is told from them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.request_events import (
    Ended,
    EngineError,
    Event,
    FirstChunk,
    Hello,
    Started,
    decode,
    encode,
    valid_lease,
)

INSTANCE = "0123456789abcdef"
whole = st.integers(0, 2**53 - 1)
instances = st.text("0123456789abcdef", min_size=16, max_size=16)
seconds = st.floats(0, 1e10).map(lambda number: round(number, 6))
leases = st.none() | st.from_regex(r"\A[A-Za-z0-9_.:-]{1,128}\Z")
labels = st.sampled_from(["chat", "transcriptions"])
events = st.one_of(
    st.builds(Hello, instances, whole, st.booleans(), whole, whole),
    st.builds(Started, instances, whole, leases, labels, seconds),
    st.builds(FirstChunk, instances, whole, seconds),
    st.builds(
        Ended,
        *(instances, whole, leases, st.integers(0, 599), st.sampled_from(EngineError)),
        *(seconds, st.none() | seconds, *[st.none() | whole] * 3, st.booleans()),
    ),
)


@given(events)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    back = decode(encode(event))
    assert back == event
    assert type(back) is type(event)


@given(events)
def test_a_datagram_has_under_300_bytes(event: Event) -> None:
    assert len(encode(event)) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=12),
)


@given(st.binary(max_size=300))
def test_garbage_is_no_event(datagram: bytes) -> None:
    assert decode(datagram) is None


@given(st.sampled_from("hsfex"), st.lists(json_values, max_size=12))
def test_fields_of_other_types_are_no_event(kind: str, fields: list[object]) -> None:
    assert decode(json.dumps([1, kind, *fields]).encode()) is None


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        b"[]",
        b"{}",
        b"1",
        b"[1]",
        b'[1,["s"]]',
        b'[1,{"a":1}]',
        b"[" * 400,
        b"\xff\xfe",
        encode(FirstChunk(INSTANCE, 1, 0.5)).replace(b"[1", b"[2", 1),
        encode(FirstChunk(INSTANCE, 1, 0.5)).replace(b"0.5", b"NaN"),
        encode(FirstChunk(INSTANCE, 1, 0.5)).replace(b"0.5", b"-1"),
        encode(FirstChunk(INSTANCE, 1, 0.5)).replace(b"0.5", b"1e999"),
        encode(FirstChunk(INSTANCE, 1, 0.5))[:-1],
    ],
)
def test_cut_foreign_and_future_datagrams_are_no_event(datagram: bytes) -> None:
    assert decode(datagram) is None


@pytest.mark.parametrize("lease", ["lease-1", "a" * 128, "!#~"])
def test_usual_lease_ids_are_told(lease: str) -> None:
    assert valid_lease(lease) == lease


@pytest.mark.parametrize("lease", ["", "a" * 129, 'quo"te', "back\\slash", "a b", "é", "a\nb"])
def test_other_lease_ids_are_not(lease: str) -> None:
    assert valid_lease(lease) is None
