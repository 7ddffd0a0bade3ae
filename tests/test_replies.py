from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from extproc import replies
from extproc.errors import REFUSALS, InvalidRequest, QueueFull, Refusal, UnknownTenant
from extproc.replies import DESTINATION, LEASE, MAX_PIECE_BYTES, ProcessingResponse

WORKERS = "10.0.0.1:8000,[fd00::5]:8000"
HEADERS = [(LEASE, "abc"), ("x-odd", "é\ud800")]


def every_reply() -> dict[str, ProcessingResponse]:
    """One of each kind of answer that kvgate can send."""
    made = {
        "pick": replies.headers_answer(HEADERS, WORKERS),
        "continue headers": replies.continue_headers(),
        "buffered": replies.buffered_body_answer(HEADERS, WORKERS),
        "continue body": replies.continue_body(),
        "streamed": next(replies.streamed_body(b"x", ends_stream=True)),
        "request trailers": replies.request_trailers_answer(),
        "response": replies.response_headers_answer(HEADERS),
        "response body": replies.response_body_answer(),
        "response trailers": replies.response_trailers_answer(),
        "json": replies.json_answer(200, b"{}", [("x-kvgate-decision-id", "abc")]),
    }
    for kind in REFUSALS:
        refusal = kind("No.", param="p", retry_after_s=1.5, reason="quota:r")
        made[kind.code] = replies.refusal_answer(refusal, "id")
    return made


def messages(message: Message) -> Iterator[Message]:
    """A message and all that it is made of."""
    yield message
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            continue
        if hasattr(value, "items"):  # a map
            value = [item for item in value.values() if isinstance(item, Message)]
        for part in [value] if isinstance(value, Message) else value:
            yield from messages(part)


def set_headers(reply: ProcessingResponse) -> dict[str, str]:
    options = [each for each in messages(reply) if isinstance(each, HeaderValueOption)]
    return {each.header.key: each.header.raw_value.decode() for each in options}


class TestHeaderValues:
    """PR3: values travel in the bytes field alone, in every reply there is."""

    @pytest.mark.parametrize("name", every_reply())
    def test_text_is_empty_and_bytes_are_set(self, name: str) -> None:
        values = [each for each in messages(every_reply()[name]) if isinstance(each, HeaderValue)]
        assert all(each.value == "" and each.raw_value for each in values)
        silent = ("continue headers", "continue body", "streamed", "request trailers",
                  "response body", "response trailers")  # fmt: skip
        assert bool(values) is (name not in silent)

    @pytest.mark.parametrize("name", ["pick", "buffered", "response", "queue_full"])
    def test_what_the_client_sent_under_that_name_is_overwritten(self, name: str) -> None:
        """SE1: also the destination."""
        options = [
            each for each in messages(every_reply()[name]) if isinstance(each, HeaderValueOption)
        ]
        overwrite = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        assert {each.append_action for each in options} == {overwrite}

    @pytest.mark.parametrize("name", ["pick", "buffered"])
    def test_header_and_metadata_name_the_same_destination(self, name: str) -> None:
        reply = every_reply()[name]
        fields = reply.dynamic_metadata.fields[replies.METADATA_NAMESPACE].struct_value.fields
        assert fields[DESTINATION].string_value == WORKERS
        assert set_headers(reply) == {LEASE: "abc", "x-odd": "é?", DESTINATION: WORKERS}
        assert list(reply.dynamic_metadata.fields) == [replies.METADATA_NAMESPACE]

    def test_only_a_pick_has_metadata(self) -> None:
        with_metadata = [
            name for name, r in every_reply().items() if r.HasField("dynamic_metadata")
        ]
        assert with_metadata == ["pick", "buffered"]


class TestKinds:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("pick", "request_headers"),
            ("continue headers", "request_headers"),
            ("buffered", "request_body"),
            ("continue body", "request_body"),
            ("streamed", "request_body"),
            ("request trailers", "request_trailers"),
            ("response", "response_headers"),
            ("response body", "response_body"),
            ("response trailers", "response_trailers"),
            ("queue_full", "immediate_response"),
            ("json", "immediate_response"),
        ],
    )
    def test_each_answers_its_question(self, name: str, kind: str) -> None:
        assert every_reply()[name].WhichOneof("response") == kind

    def test_answers_to_the_response_change_headers_alone(self) -> None:
        assert set_headers(every_reply()["response"]) == {LEASE: "abc", "x-odd": "é?"}
        assert not every_reply()["buffered"].request_body.response.HasField("body_mutation")

    def test_a_buffered_body_is_replaced_whole(self) -> None:
        for body in (b"", b"{}", b"x" * 200_000):
            reply = replies.buffered_body_answer(HEADERS, WORKERS, body)
            mutation = reply.request_body.response.body_mutation
            assert (mutation.WhichOneof("mutation"), mutation.body) == ("body", body)
            assert set_headers(reply)[LEASE] == "abc"
            assert set_headers(reply)["content-length"] == str(len(body))
        assert "content-length" not in set_headers(every_reply()["buffered"])

    def test_an_answer_of_our_own_is_json_with_the_headers_given(self) -> None:
        reply = every_reply()["json"]
        assert reply.immediate_response.status.code == 200
        assert reply.immediate_response.body == b"{}"
        assert reply.immediate_response.details == "kvgate_answered"
        wanted = {"content-type": "application/json", "x-kvgate-decision-id": "abc"}
        assert set_headers(reply) == wanted


class TestStreamedBodies:
    """PR1: the body goes back byte for byte, in pieces that every Envoy takes."""

    @pytest.mark.parametrize(
        ("size", "pieces"),
        [(0, 1), (1, 1), (MAX_PIECE_BYTES, 1), (MAX_PIECE_BYTES + 1, 2), (3 * MAX_PIECE_BYTES, 3)],
    )
    @pytest.mark.parametrize("ends_stream", [True, False])
    def test_the_last_piece_alone_ends_the_stream(
        self, size: int, pieces: int, ends_stream: bool
    ) -> None:
        body = bytes(range(256)) * (size // 256 + 1)
        answers = list(replies.streamed_body(body[:size], ends_stream=ends_stream))
        parts = [each.request_body.response.body_mutation.streamed_response for each in answers]
        assert b"".join(part.body for part in parts) == body[:size]
        assert max(len(part.body) for part in parts) <= MAX_PIECE_BYTES == 62_000
        ends = [part.end_of_stream for part in parts]
        assert ends == [False] * (pieces - 1) + [ends_stream]


def refused(refusal: Refusal, decision_id: str | None = None) -> tuple[dict[str, str], Any]:
    answer = replies.refusal_answer(refusal, decision_id)
    return set_headers(answer), answer.immediate_response


class TestRefusals:
    @pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.code)
    def test_status_reason_and_body_agree(self, kind: type[Refusal]) -> None:
        headers, answer = refused(kind("Why not.", param="model"))
        assert answer.status.code == kind.http_status
        assert headers["x-kvgate-refusal"] == kind.code
        assert headers["content-type"] == "application/json"
        assert answer.details == f"kvgate_{kind.code}"
        assert ("x-should-retry" in headers) is not kind.retryable
        assert json.loads(answer.body) == {
            "error": {
                "message": "Why not.",
                "type": kind.error_type,
                "param": "model",
                "code": kind.code,
            }
        }

    def test_there_is_nothing_else_to_read(self) -> None:
        common = {"content-type", "x-kvgate-refusal"}
        assert set(refused(QueueFull("No."))[0]) == common | {"retry-after", "retry-after-ms"}
        assert set(refused(InvalidRequest("No."))[0]) == common | {"x-should-retry"}

    @pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.code)
    def test_a_caller_learns_whether_and_when_to_come_back(self, kind: type[Refusal]) -> None:
        """TM1: every 429 and 503 says how long, not only the first."""
        headers, _ = refused(kind("No."))
        when = (headers.get("retry-after"), headers.get("retry-after-ms"))
        assert when == (("1", "1000") if kind.retryable else (None, None))
        assert headers.get("x-should-retry") == (None if kind.retryable else "false")
        assert kind.retryable is (kind.http_status in (429, 503))

    def test_who_is_not_known_is_told_how_to_be(self) -> None:
        assert refused(UnknownTenant("No."))[0]["www-authenticate"] == "Bearer"

    def test_what_was_missing_is_told_where_admission_says_it(self) -> None:
        headers, _ = refused(QueueFull("No.", reason="quota:gold"))
        assert headers["x-kvgate-reason"] == "quota:gold"

    def test_the_decision_id_is_told_where_there_is_one(self) -> None:
        assert refused(QueueFull("No."), "abc")[0]["x-kvgate-decision-id"] == "abc"

    @pytest.mark.parametrize(
        ("wait_s", "seconds", "millis"),
        [(0.0, "1", "0"), (0.2, "1", "200"), (1.0, "1", "1000"), (1.001, "2", "1001"),
         (2.0, "2", "2000"), (2.5, "3", "2500"), (3.0, "3", "3000"), (60.0, "60", "60000")],
    )  # fmt: skip
    def test_the_wait_is_told_in_whole_seconds_rounded_up_and_in_milliseconds(
        self, wait_s: float, seconds: str, millis: str
    ) -> None:
        headers, _ = refused(QueueFull("No.", retry_after_s=wait_s))
        assert (headers["retry-after"], headers["retry-after-ms"]) == (seconds, millis)

    @given(wait_s=st.floats(0, 1e4))
    def test_no_client_comes_back_before_its_time(self, wait_s: float) -> None:
        headers, _ = refused(QueueFull("No.", retry_after_s=wait_s))
        assert wait_s <= int(headers["retry-after"]) < max(1.1, wait_s + 1)
