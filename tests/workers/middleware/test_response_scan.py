"""Usage and error events are found in any cut of any answer (case ST1)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.middleware import bodies
from tests.workers.middleware.bodies import Answer
from workers.engine_errors import error_text
from workers.response_scan import ResponseScan, Usage, is_before_prefill

USAGE = Usage(1011, 5, 992)


def scanned(chunks: Iterable[bytes], *, sse: bool = True) -> ResponseScan:
    scan = ResponseScan(sse=sse)
    for chunk in chunks:
        scan.feed(chunk)
    return scan


def byte_by_byte(content: bytes) -> list[bytes]:
    return [content[at : at + 1] for at in range(len(content))]


@given(bodies.answers, st.data())
def test_any_cut_of_any_answer_gives_its_usage(answer: Answer, data: st.DataObject) -> None:
    scan = scanned(data.draw(bodies.cuts(answer.content)), sse=answer.sse)
    assert scan.usage == answer.usage
    assert scan.error is None


PIECES = (
    *(b'"usage"', b"usage", b":", b"{", b"}", b",", b" ", b'"', b"null", b"\n", b"\r\n"),
    *(b'"prompt_tokens":12', b'"output_tokens":3', b"data:", b"data: ", b"event: error\n"),
    *(b'"error"', b'{"error":{"code":503', b"event: response.failed\r\n"),
    *(b"x" * 70, b"y" * 4_100),
    *(b'data: {"usage":{"prompt_tokens":%d}}\n\n' % count for count in range(3)),
)


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.booleans(), st.data())
def test_any_cut_of_any_bytes_gives_the_same(
    pieces: list[bytes], sse: bool, data: st.DataObject
) -> None:
    content = b"".join(pieces)
    whole = scanned([content], sse=sse)
    cut = scanned(data.draw(bodies.cuts(content)), sse=sse)
    assert (cut.usage, cut.error) == (whole.usage, whole.error)


def test_the_data_line_of_an_error_is_found_wherever_its_event_line_begins() -> None:
    content = b'xevent: response.failed\ndata: {"error":{"code":503}}\n\n'
    for chunks in ([content], byte_by_byte(content)):
        assert scanned(chunks).error == b'{"error":{"code":503}}'


@pytest.mark.parametrize("events", bodies.STREAMS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_usage_is_found_one_byte_at_a_time(events: object, newline: str) -> None:
    assert callable(events)
    content = bodies.sse(events(["hello"], USAGE), newline=newline)
    assert scanned(byte_by_byte(content)).usage == USAGE


def test_a_cut_in_the_middle_of_the_word_usage_changes_nothing() -> None:
    content = bodies.sse(bodies.chat_events(["a"], USAGE))
    at = content.rindex(b"usage") + 2
    assert scanned([content[:at], content[at:]]).usage == USAGE


def test_a_cut_before_the_blank_line_changes_nothing() -> None:
    content = bodies.sse(bodies.chat_events(["a"], USAGE), done=False)
    assert scanned([content[:-1], content[-1:]]).usage == USAGE


def test_usage_chunk_and_done_may_come_apart_or_together() -> None:
    usage, done = bodies.sse(bodies.chat_events([], USAGE), done=False), b"data: [DONE]\n\n"
    assert scanned([usage, done]).usage == scanned([usage + done]).usage == USAGE


@pytest.mark.parametrize("size", [1, 1_000, 400_000])
def test_usage_is_found_in_a_final_event_of_300_kb(size: int) -> None:
    content = bodies.sse(bodies.responses_events(["x" * 300_000], USAGE))
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    assert scanned(chunks).usage == USAGE


def test_a_stream_cut_before_its_usage_tells_none() -> None:
    content = bodies.sse(bodies.chat_events(["a"], USAGE), done=False)
    assert scanned([content[: content.rindex(b"usage")]]).usage == Usage()
    assert scanned([content[: content.rindex(b"cached")]]).usage == Usage()


def test_null_after_a_usage_does_not_erase_it() -> None:
    events = [*bodies.chat_events([], USAGE), (None, {"choices": [], "usage": None})]
    assert scanned([bodies.sse(events)]).usage == USAGE


def test_the_last_of_several_usages_wins() -> None:
    events = bodies.chat_events([], Usage(1011, 1, 0)) + bodies.chat_events([], USAGE)
    assert scanned([bodies.sse(events)]).usage == USAGE


def test_a_delta_with_output_tokens_alone_keeps_the_input_told_before() -> None:
    begin = {"message": {"usage": {"input_tokens": 20, "output_tokens": 1}}}
    end = {"usage": {"output_tokens": 15}}
    content = bodies.sse([("message_start", begin), ("message_delta", end)], done=False)
    assert scanned([content]).usage == Usage(20, 15, None)


def test_data_of_several_lines_is_one_event() -> None:
    content = b'data: {"choices":[],"usage":\ndata: {"prompt_tokens": 3,\ndata: "x": 1}}\n\n'
    assert scanned([content]).usage == scanned(byte_by_byte(content)).usage == Usage(3, None, None)


def test_a_usage_object_over_the_cap_stays_unknown_and_the_next_is_found() -> None:
    huge = {"usage": {"prompt_tokens": 1, "x": "y" * 5_000}}
    assert scanned([bodies.sse([(None, huge)])]).usage == Usage()
    content = bodies.sse([(None, huge), *bodies.chat_events([], USAGE)])
    assert scanned([content]).usage == scanned(byte_by_byte(content)).usage == USAGE


@pytest.mark.parametrize(
    "usage", [{}, {"prompt_tokens": -1}, {"prompt_tokens": True}, {"prompt_tokens": "9"}, [1], 7]
)
def test_what_is_no_usage_is_no_usage(usage: object) -> None:
    assert scanned([json.dumps({"usage": usage}).encode()], sse=False).usage == Usage()


def test_null_in_every_chunk_before_the_usage_does_no_harm() -> None:
    null = bodies.sse([(None, {"choices": [], "usage": None})], done=False)
    assert scanned([null] * 1_000 + [bodies.sse(bodies.chat_events([], USAGE))]).usage == USAGE


@pytest.mark.parametrize("sse", [True, False])
def test_a_document_full_of_false_usages_is_given_up_on(sse: bool) -> None:
    false, true = b'"usage":{"a":1},', b'"usage":{"prompt_tokens":1}'
    assert scanned([false * 200 + true], sse=sse).usage == Usage(1, None, None)
    assert scanned([false * 300 + true], sse=sse).usage == Usage()


def test_a_long_gap_after_the_word_usage_costs_no_time() -> None:
    gap = b'"usage"' + b" \n" * 2_000
    began_s = time.monotonic()
    assert scanned([gap + b"x", gap], sse=False).usage == Usage()
    assert time.monotonic() - began_s < 1.0


def test_deeply_nested_garbage_is_survived() -> None:
    garbage = b'"usage":{"a":' + b"[" * 3_000 + b"}"
    assert scanned([garbage], sse=False).usage == Usage()


def test_what_is_kept_between_chunks_is_bounded() -> None:
    scan = scanned([b'data: {"error":{"m":"' + b"x" * 9_000, b'"usage":{', b"y" * 3_000])
    assert len(scan._carry) < 5_000


ERRORS = {
    "chat": b'data: {"error": {"message": "m", "type": "t", "code": 503}}\n\n',
    "messages": b'event: error\ndata: {"type":"error","error":{"type":"t","message":"m"}}\n\n',
    "crlf": b'event: error\r\ndata: {"type":"error","error":{"type":"t","message":"m"}}\r\n\r\n',
    "no space": b'data:{"error":"m"}\n\n',
    "responses": b"event: response.failed\n"
    b'data: {"type":"response.failed","response":{"error":{"code":"x","message":"m"}}}\n\n',
}


@pytest.mark.parametrize("form", ERRORS)
def test_an_error_event_is_found_in_any_place_and_cut(form: str) -> None:
    before = bodies.sse(bodies.chat_events(["error"], USAGE), done=False)
    for head in (b"", before):
        for content in (head + ERRORS[form], head + ERRORS[form] + b"data: [DONE]\n\n"):
            for chunks in ([content], byte_by_byte(content), [head, content[len(head) :]]):
                scan = scanned(chunks)
                assert scan.error is not None
                assert error_text(scan.error)[1].endswith("m")


def test_only_the_first_error_event_counts() -> None:
    scan = scanned([ERRORS["chat"], ERRORS["no space"]])
    assert scan.error is not None
    assert error_text(scan.error) == (503, "t  m")


def test_an_error_event_that_is_cut_off_is_still_one() -> None:
    assert scanned([ERRORS["chat"][:40]]).error is not None


def test_errors_are_not_looked_for_in_a_document() -> None:
    assert scanned([b'{"error":{"code":1}}'], sse=False).error is None


@pytest.mark.parametrize(
    ("chunk", "early"),
    [
        (b": keep-alive\n\n", True),
        (b'event: response.created\ndata: {"a":1}\n\n', True),
        (b'event: response.in_progress\ndata: {"a":1}\n\n', True),
        (b"event: response.created\ndata: {}\n\nevent: response.output_text.delta\n\n", False),
        (b": keep-alive\n\ndata: {}\n\n", False),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', False),
        (b"event: message_start\ndata: {}\n\n", False),
    ],
)
def test_what_vllm_sends_before_prefill_is_known(chunk: bytes, early: bool) -> None:
    assert is_before_prefill(chunk) is early
