from __future__ import annotations

import gzip
from itertools import pairwise
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProtocolConfiguration,
)
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision.ticket import Decision
from extproc.errors import BodyTooLarge, QueueFull
from extproc.policy import RequestPolicy
from extproc.replies import DESTINATION, LEASE, MAX_PIECE_BYTES, ProcessingResponse
from extproc.request.identity import MAX_HEADER_CHARS
from extproc.request.reader import read_request
from extproc.stream import Arrived, ProtocolViolation, RequestStream, ResponseStarted, Step
from tests.support.builders import Fleet
from tests.test_replies import set_headers

FULL = ProcessingMode.FULL_DUPLEX_STREAMED
BUFFERED = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)
BODILESS = (ProcessingMode.NONE, ProcessingMode.STREAMED)
DECISION = Decision("lease-1", ("10.0.0.1:8000", "[fd00::5]:8000"), 16, 40, 0.0)
DESTINATIONS = "10.0.0.1:8000,[fd00::5]:8000"
PATH = HeaderValue(key=":path", raw_value=b"/v1/chat/completions")


def request_headers(
    *headers: HeaderValue,
    ends: bool = False,
    mode: int | None = FULL,
    metadata: dict[str, Any] | None = None,
) -> ProcessingRequest:
    config = None if mode is None else ProtocolConfiguration(request_body_mode=mode)  # type: ignore[arg-type]
    message = ProcessingRequest(
        request_headers=HttpHeaders(
            headers=HeaderMap(headers=headers or (PATH,)), end_of_stream=ends
        ),
        protocol_config=config,
    )
    for namespace, fields in (metadata or {}).items():
        message.metadata_context.filter_metadata[namespace].update(fields)
    return message


def request_body(body: bytes, ends: bool = False) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=ends))


def response_headers(
    *headers: HeaderValue, attributes: dict[str, Any] | None = None
) -> ProcessingRequest:
    message = ProcessingRequest(response_headers=HttpHeaders(headers=HeaderMap(headers=headers)))
    if attributes is not None:
        fields = Struct()
        fields.update(attributes)
        message.attributes["envoy.filters.http.ext_proc"].CopyFrom(fields)
    return message


TRAILERS = ProcessingRequest(request_trailers=HttpTrailers())
RESPONSE_BODY = ProcessingRequest(response_body=HttpBody(body=b"x"))
RESPONSE_TRAILERS = ProcessingRequest(response_trailers=HttpTrailers())


class Dialogue:
    """A scripted Envoy: messages in, answers out, the decision as soon as it is asked for."""

    def __init__(self, max_body_bytes: int = 10_000_000, body: bytes | None = None) -> None:
        self.stream = RequestStream(max_body_bytes)
        self.body = body
        self.answers: list[ProcessingResponse] = []
        self.arrived: Arrived | None = None
        self.started: ResponseStarted | None = None

    def send(self, *messages: ProcessingRequest) -> Dialogue:
        for message in messages:
            step = self.stream.receive(message)
            self.answers += step.answers
            if isinstance(step.event, Arrived):
                assert self.arrived is None, "decided twice"
                self.arrived = step.event
                self.answers += self.stream.answer(DECISION, self.body)
            elif step.event is not None:
                self.started = step.event
        return self

    @property
    def kinds(self) -> list[str | None]:
        return [answer.WhichOneof("response") for answer in self.answers]

    @property
    def streamed(self) -> list[tuple[bytes, bool]]:
        """Streamed body answers: bytes and end mark."""
        bodies = [each for each in self.answers if each.HasField("request_body")]
        mutations = [each.request_body.response.body_mutation for each in bodies]
        assert all(each.WhichOneof("mutation") == "streamed_response" for each in mutations)
        parts = [each.streamed_response for each in mutations]
        return [(part.body, part.end_of_stream) for part in parts]


def body_messages(chunks: list[bytes], trailers: bool = False) -> list[ProcessingRequest]:
    last = len(chunks) - 1
    sent = [request_body(c, ends=n == last and not trailers) for n, c in enumerate(chunks)]
    return [*sent, TRAILERS] if trailers else sent


def check_full_duplex(chunks: list[bytes], trailers: bool = False) -> Dialogue:
    """What must hold for every layout of chunks."""
    talk = Dialogue().send(request_headers(), *body_messages(chunks, trailers))
    body = b"".join(chunks)
    assert talk.arrived is not None
    assert talk.arrived.body == body
    first, *rest = talk.answers
    assert first.WhichOneof("response") == "request_headers"
    assert set_headers(first) == {LEASE: "lease-1", DESTINATION: DESTINATIONS}
    assert talk.kinds.count("request_headers") == 1
    parts = talk.streamed
    assert b"".join(part for part, _ in parts) == body
    assert all(len(part) <= MAX_PIECE_BYTES for part, _ in parts)
    ends = [end for _, end in parts]
    if trailers:
        assert not any(ends)
        assert rest[-1].WhichOneof("response") == "request_trailers"
        assert talk.kinds.count("request_trailers") == 1
    else:
        assert ends == [False] * (len(parts) - 1) + [True]
        assert len(parts) == len(rest)
    return talk


class TestFullDuplex:
    """PR1: headers answer first, streamed kinds only, one end mark and it is the last."""

    @pytest.mark.parametrize("trailers", [False, True], ids=["", "trailers"])
    @pytest.mark.parametrize(
        "chunks",
        [
            [b"whole"],
            [b"one", b"two", b"three"],
            [b"%d," % number for number in range(50)],
            [b"a", b""],
            [b""],
            [b"", b"a", b"", b"b", b""],
            [b"x" * 200_000, b"y" * 62_000, b"z"],
            [b'{"a": "\xf0\x9f', b'\x99\x82"}'],
            [b"\xef\xbb\xbf{}"],
            [gzip.compress(b"{}")[:9], gzip.compress(b"{}")[9:]],
        ],
        ids=[
            "1",
            "3",
            "50",
            "empty last",
            "empty",
            "empty ones",
            "large",
            "split code point",
            "byte order mark",
            "gzip",
        ],
    )
    def test_any_layout_of_chunks_is_answered_in_order(
        self, chunks: list[bytes], trailers: bool
    ) -> None:
        check_full_duplex(chunks, trailers)

    @given(chunks=st.lists(st.binary(max_size=30), min_size=1, max_size=20), trailers=st.booleans())
    def test_any_chunks_at_all(self, chunks: list[bytes], trailers: bool) -> None:
        check_full_duplex(chunks, trailers)

    @given(cuts=st.lists(st.integers(0, 80), max_size=6).map(sorted))
    def test_a_body_is_the_same_however_it_is_cut(self, cuts: list[int]) -> None:
        """BP3: borders inside code points included."""
        body = '{"model": "sim", "messages": [{"role": "user", "content": "é🙂東"}]}'.encode()
        edges = [0, *(cut for cut in cuts if cut < len(body)), len(body)]
        chunks = [body[a:b] for a, b in pairwise(edges)]
        talk = check_full_duplex(chunks)
        assert talk.arrived is not None
        read = read_request(talk.arrived.headers, talk.arrived.body, RequestPolicy())
        assert read == read_request({":path": "/v1/chat/completions"}, body, RequestPolicy())

    def test_pieces_are_of_62_000_bytes(self) -> None:
        talk = check_full_duplex([b"x" * 100_000, b"y" * 24_001])
        assert [len(part) for part, _ in talk.streamed] == [62_000, 62_000, 1]

    def test_nothing_is_said_before_the_decision(self) -> None:
        stream = RequestStream(100)
        assert stream.receive(request_headers()) == Step()
        assert stream.receive(request_body(b"a")) == Step()
        step = stream.receive(request_body(b"b", ends=True))
        assert not step.answers
        assert step.event == Arrived({":path": "/v1/chat/completions"}, b"ab")

    def test_a_request_without_a_body_gets_its_headers_answer_alone(self) -> None:
        talk = Dialogue().send(request_headers(ends=True))
        assert talk.kinds == ["request_headers"]
        assert talk.arrived is not None
        assert talk.arrived.body == b""

    def test_trailers_without_a_body_come_last(self) -> None:
        talk = Dialogue().send(request_headers(), TRAILERS)
        assert talk.kinds[0] == "request_headers"
        assert talk.kinds[-1] == "request_trailers"
        assert not any(end for _, end in talk.streamed)

    def test_an_envoy_that_does_not_tell_its_mode_is_in_full_duplex(self) -> None:
        talk = Dialogue().send(request_headers(mode=None), request_body(b"x", ends=True))
        assert talk.streamed == [(b"x", True)]


class TestBuffered:
    """PR1: never a streamed body answer; the decision rides on the body."""

    @pytest.mark.parametrize("mode", BUFFERED)
    @pytest.mark.parametrize("ends", [True, False])
    def test_headers_go_on_at_once_and_the_body_brings_the_destination(
        self, mode: int, ends: bool
    ) -> None:
        talk = Dialogue().send(request_headers(mode=mode))
        assert talk.kinds == ["request_headers"]
        assert set_headers(talk.answers[0]) == {}
        talk.send(request_body(b"whole", ends))
        assert talk.kinds == ["request_headers", "request_body"]
        assert set_headers(talk.answers[1])[DESTINATION] == DESTINATIONS
        assert not talk.answers[1].request_body.response.HasField("body_mutation")
        assert talk.arrived is not None
        assert talk.arrived.body == b"whole"

    @pytest.mark.parametrize("mode", BUFFERED)
    def test_without_a_body_the_decision_rides_on_the_headers(self, mode: int) -> None:
        talk = Dialogue().send(request_headers(mode=mode, ends=True))
        assert set_headers(talk.answers[0])[DESTINATION] == DESTINATIONS
        assert talk.kinds == ["request_headers"]

    @pytest.mark.parametrize("mode", BUFFERED)
    def test_trailers_after_the_body_pass(self, mode: int) -> None:
        talk = Dialogue().send(request_headers(mode=mode), request_body(b"x"), TRAILERS)
        assert talk.kinds == ["request_headers", "request_body", "request_trailers"]


class TestBodiless:
    """PR1: NONE and STREAMED: the decision rides on the headers, bodies are left alone."""

    @pytest.mark.parametrize("mode", BODILESS)
    def test_the_decision_rides_on_the_headers(self, mode: int) -> None:
        talk = Dialogue().send(request_headers(mode=mode))
        assert talk.kinds == ["request_headers"]
        assert set_headers(talk.answers[0])[DESTINATION] == DESTINATIONS

    @pytest.mark.parametrize(("ends", "body"), [(False, None), (True, b"")])
    @pytest.mark.parametrize("mode", BODILESS)
    def test_a_body_that_is_not_shown_is_told_from_one_that_is_not_there(
        self, mode: int, ends: bool, body: bytes | None
    ) -> None:
        talk = Dialogue().send(request_headers(mode=mode, ends=ends))
        assert talk.arrived is not None
        assert talk.arrived.body == body

    def test_pieces_that_come_later_pass_untouched(self) -> None:
        chunks = [request_body(b"x" * 200), request_body(b"", ends=True)]
        talk = Dialogue(max_body_bytes=100)
        talk.send(request_headers(mode=ProcessingMode.STREAMED), *chunks, TRAILERS)
        kinds = ["request_headers", "request_body", "request_body", "request_trailers"]
        assert talk.kinds == kinds
        assert not any(
            each.request_body.response.HasField("body_mutation") for each in talk.answers[1:3]
        )


class TestEditedBodies:
    """The worker gets the body that it is given, in the same dialogue."""

    @pytest.mark.parametrize("size", [0, 1, MAX_PIECE_BYTES, 3 * MAX_PIECE_BYTES + 1])
    @pytest.mark.parametrize("trailers", [False, True])
    def test_full_duplex_streams_it_in_place_of_the_clients(
        self, size: int, trailers: bool
    ) -> None:
        body = bytes(range(256)) * (size // 256 + 1)
        talk = Dialogue(body=body[:size])
        talk.send(request_headers(), *body_messages([b"the", b"client's"], trailers))
        assert talk.kinds[0] == "request_headers"
        assert b"".join(part for part, _ in talk.streamed) == body[:size]
        ends = [end for _, end in talk.streamed]
        assert ends == [False] * (len(ends) - 1) + [not trailers]
        assert (talk.kinds[-1] == "request_trailers") is trailers

    @pytest.mark.parametrize("mode", BUFFERED)
    @pytest.mark.parametrize("body", [b"", b"other"])
    def test_buffered_it_replaces_the_clients(self, mode: int, body: bytes) -> None:
        talk = Dialogue(body=body).send(request_headers(mode=mode), request_body(b"whole", True))
        mutation = talk.answers[1].request_body.response.body_mutation
        assert (mutation.WhichOneof("mutation"), mutation.body) == ("body", body)
        assert set_headers(talk.answers[1])[DESTINATION] == DESTINATIONS

    @pytest.mark.parametrize(
        ("mode", "ends"), [(FULL, True), (BUFFERED[0], True), *((m, False) for m in BODILESS)]
    )
    def test_a_body_that_was_never_seen_cannot_be_replaced(self, mode: int, ends: bool) -> None:
        stream = RequestStream(100)
        stream.receive(request_headers(mode=mode, ends=ends))
        with pytest.raises(ValueError, match="no body to replace"):
            stream.answer(DECISION, b"{}")
        assert stream.answer(DECISION)[0].WhichOneof("response") == "request_headers"


class TestIdentity:
    """What tells whose a request is: as much as the policy reads, and in no shape to fool it."""

    PATHS = frozenset({("jwt", "payload", "sub"), ("jwt", "payload", "n"), ("other", "x")})

    def arrived(self, *headers: HeaderValue, **metadata: Any) -> Arrived:
        stream = RequestStream(10, frozenset({"x-tenant", "authorization"}), self.PATHS)
        event = stream.receive(request_headers(*headers, ends=True, metadata=metadata)).event
        assert isinstance(event, Arrived)
        return event

    def header(self, name: str, *values: str) -> Arrived:
        return self.arrived(*(HeaderValue(key=name, raw_value=each.encode()) for each in values))

    def test_the_headers_that_were_asked_for_arrive(self) -> None:
        assert self.header("X-Tenant", "a").headers == {"x-tenant": "a"}
        assert self.header("x-tenants", "a").headers == {}

    def test_of_two_copies_neither_passes_for_the_only_one(self) -> None:
        """SE1: whichever of them the gateway has set."""
        assert self.header("x-tenant", "a", "b").headers == {"x-tenant": "a,b"}
        assert self.header("x-tenant", "", "b").headers == {"x-tenant": ",b"}

    def test_a_value_is_cut(self) -> None:
        for values in (["a" * 70_000], ["a" * 8_000, "b" * 8_000]):
            assert len(self.header("authorization", *values).headers["authorization"]) == (
                MAX_HEADER_CHARS
            )

    def test_bytes_that_are_not_utf8_do_not_raise(self) -> None:
        """PR3: a tenant in the bytes field alone."""
        found = self.arrived(HeaderValue(key="x-tenant", raw_value=b"caf\xe9")).headers
        assert found == {"x-tenant": "caf\ufffd"}

    def test_metadata_that_was_asked_for_arrives_and_no_other(self) -> None:
        payload = {"sub": "acme", "n": 5, "email": "a@b.c"}
        found = self.arrived(PATH, jwt={"payload": payload}, third={"x": 1}).metadata
        assert found == {("jwt", "payload", "sub"): "acme", ("jwt", "payload", "n"): 5.0}

    @pytest.mark.parametrize(
        "metadata",
        [{}, {"jwt": {}}, {"jwt": {"payload": "x"}}, {"jwt": {"payload": {"sub": None}}},
         {"jwt": {"payload": {}}}, {"jwt": {"payload": None}}],
    )  # fmt: skip
    def test_metadata_may_be_missing_at_any_depth(self, metadata: dict[str, Any]) -> None:
        assert self.arrived(PATH, **metadata).metadata == {}

    @pytest.mark.parametrize(
        ("given", "found"),
        [(True, True), ("", ""), ([1], ()), ({"a": 1}, ()), ("a" * 70_000, "a" * MAX_HEADER_CHARS)],
    )
    def test_values_of_any_type_arrive_bounded(self, given: Any, found: Any) -> None:
        assert self.arrived(PATH, other={"x": given}).metadata == {("other", "x"): found}

    def test_the_stream_keeps_no_key_while_the_response_runs(self) -> None:
        """SE3."""
        stream = RequestStream(10, frozenset({"authorization"}), self.PATHS)
        key = HeaderValue(key="authorization", raw_value=b"SECRET-CANARY")
        stream.receive(request_headers(key, ends=True, metadata={"other": {"x": "CANARY"}}))
        stream.answer(DECISION)
        assert "CANARY" not in repr(vars(stream))


class TestHeaders:
    """PR3: incoming values are in the bytes field, or in the text field of older Envoys."""

    def headers(self, *values: HeaderValue) -> dict[str, str]:
        event = RequestStream(10).receive(request_headers(*values, ends=True)).event
        assert isinstance(event, Arrived)
        return dict(event.headers)

    def test_bytes_come_first_and_text_is_the_fallback(self) -> None:
        found = self.headers(
            HeaderValue(key=":path", raw_value=b"/bytes", value="/text"),
            HeaderValue(key=":method", value="GET"),
        )
        assert found == {":path": "/bytes", ":method": "GET"}

    def test_bytes_that_are_not_utf8_do_not_raise(self) -> None:
        found = self.headers(HeaderValue(key="x-request-id", raw_value=b"caf\xe9"))
        assert found == {"x-request-id": "caf\ufffd"}

    def test_names_have_no_case_and_the_first_of_two_counts(self) -> None:
        found = self.headers(
            HeaderValue(key="Content-Type", raw_value=b"application/json"),
            HeaderValue(key="content-type", raw_value=b"text/plain"),
        )
        assert found == {"content-type": "application/json"}

    def test_headers_that_no_decision_reads_are_not_kept(self) -> None:
        """SE1, SE3: neither a destination of the client's nor its key."""
        names = ("authorization", "cookie", DESTINATION, LEASE, "x-other")
        assert self.headers(*(HeaderValue(key=name, raw_value=b"x") for name in names)) == {}

    def test_a_long_request_id_is_cut(self) -> None:
        """PR5: 64 KiB of it are accepted."""
        found = self.headers(HeaderValue(key="x-request-id", raw_value=b"a" * 65_536))
        assert found["x-request-id"] == "a" * MAX_HEADER_CHARS

    def test_a_worker_gets_no_request_id_that_it_would_refuse(self) -> None:
        """PR5: engines take header fields of some 8 KB."""
        sent = {}
        for size in (256, 257, 65_536):
            header = HeaderValue(key="x-request-id", raw_value=b"a" * size)
            talk = Dialogue().send(request_headers(PATH, header, ends=True))
            sent[size] = set_headers(talk.answers[0]).get("x-request-id")
        assert sent == {256: None, 257: "a" * 256, 65_536: "a" * 256}

    def test_streams_with_one_request_id_have_leases_of_their_own(self) -> None:
        """PR5: and the end of one leaves the other's."""
        fleet = Fleet(workers=1)
        header = HeaderValue(key="x-request-id", raw_value=b"a")
        leases, tickets = [], []
        for _ in range(2):
            stream = RequestStream(100)
            stream.receive(request_headers(PATH, header, ends=True))
            ticket = fleet.arrive()
            assert ticket.decision is not None
            tickets.append(ticket)
            leases += [set_headers(answer)[LEASE] for answer in stream.answer(ticket.decision)]
        assert leases == [ticket.id for ticket in tickets]
        assert len(set(leases)) == 2
        fleet.scheduler.finish(tickets[0], 1.0)
        assert fleet.admission.running == 1
        fleet.scheduler.finish(tickets[1], 2.0)
        assert fleet.idle()

    def test_without_a_request_id_nothing_is_missing(self) -> None:
        """PR5."""
        assert self.headers(PATH) == {":path": "/v1/chat/completions"}


class TestRefusing:
    def test_a_refusal_is_the_only_answer(self) -> None:
        stream = RequestStream(100)
        stream.receive(request_headers())
        stream.receive(request_body(b"x", ends=True))
        assert not stream.replied
        (answer,) = stream.refuse(QueueFull("No."), "id-1")
        assert stream.replied
        assert answer.WhichOneof("response") == "immediate_response"
        assert set_headers(answer)["x-kvgate-decision-id"] == "id-1"

    @pytest.mark.parametrize("mode", [FULL, *BUFFERED, *BODILESS])
    def test_an_answer_of_our_own_is_the_only_one(self, mode: int) -> None:
        stream = RequestStream(100)
        stream.receive(request_headers(mode=mode))
        if mode not in BODILESS:
            stream.receive(request_body(b"x", ends=True))
        (answer,) = stream.reply(200, b'{"allow":true}', [("x-kvgate-decision-id", "id-1")])
        assert stream.replied
        assert answer.immediate_response.status.code == 200
        assert answer.immediate_response.body == b'{"allow":true}'
        assert set_headers(answer)["x-kvgate-decision-id"] == "id-1"
        assert stream._pieces == []

    @pytest.mark.parametrize(
        ("mode", "chunks"),
        [(FULL, [101]), (FULL, [50, 51]), (FULL, [100, 0, 1]), *((m, [101]) for m in BUFFERED)],
    )
    def test_a_body_over_the_limit_is_refused_as_soon_as_it_is_seen(
        self, mode: int, chunks: list[int]
    ) -> None:
        """MM1: and what came of it is let go."""
        stream = RequestStream(100)
        stream.receive(request_headers(mode=mode))
        for size in chunks[:-1]:
            assert stream.receive(request_body(b"x" * size)) == Step()
        step = stream.receive(request_body(b"x" * chunks[-1]))
        assert isinstance(step.refusal, BodyTooLarge)
        assert step.refusal.message == "The request body is over 100 bytes."
        (answer,) = step.answers
        assert answer.immediate_response.status.code == 413
        assert stream._pieces == []

    def test_a_body_of_exactly_the_limit_passes(self) -> None:
        talk = Dialogue(max_body_bytes=100)
        talk.send(request_headers(), request_body(b"x" * 60), request_body(b"x" * 40, ends=True))
        assert talk.arrived is not None
        assert talk.arrived.body == b"x" * 100

    @pytest.mark.parametrize(
        "message", [request_body(b"more"), TRAILERS, response_headers(), request_headers()]
    )
    def test_nothing_follows_a_refusal(self, message: ProcessingRequest) -> None:
        stream = RequestStream(100)
        stream.receive(request_headers(ends=True))
        stream.refuse(QueueFull("No."))
        with pytest.raises(ProtocolViolation, match="while REPLIED"):
            stream.receive(message)


class TestResponses:
    def started(self, *headers: HeaderValue, **attributes: Any) -> ResponseStarted:
        talk = Dialogue().send(request_headers(ends=True))
        talk.send(response_headers(*headers, attributes=attributes or None))
        assert talk.started is not None
        assert len(talk.answers) == 1
        return talk.started

    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (HeaderValue(key=":status", raw_value=b"200"), 200),
            (HeaderValue(key=":status", value="503"), 503),
            (HeaderValue(key=":status", raw_value=b"20x"), 0),
            (HeaderValue(key=":status"), 0),
            (HeaderValue(key="server", raw_value=b"200"), 0),
        ],
    )
    def test_the_status_is_read(self, header: HeaderValue, status: int) -> None:
        """PR3: from the bytes field first, and without raising."""
        other = HeaderValue(key="date", raw_value=b"\xff")
        assert self.started(other, header) == ResponseStarted(status, None, 1)

    def test_attributes_tell_who_served_and_after_how_many_tries(self) -> None:
        """RT1."""
        started = self.started(
            **{"upstream.address": "10.0.0.2:8000", "upstream.request_attempt_count": 2}
        )
        assert started == ResponseStarted(0, "10.0.0.2:8000", 2)

    def test_attributes_may_be_missing_or_empty(self) -> None:
        assert self.started(**{"upstream.address": ""}) == ResponseStarted(0, None, 1)
        assert self.started(**{"upstream.request_attempt_count": 3}) == ResponseStarted(0, None, 3)

    def test_the_response_gets_the_headers_that_are_given(self) -> None:
        (answer,) = RequestStream(1).answer_response([("x-kvgate-worker", "w")])
        assert answer.WhichOneof("response") == "response_headers"
        assert set_headers(answer) == {"x-kvgate-worker": "w"}

    def test_the_engines_error_class_is_read_and_kept_from_the_client(self) -> None:
        talk = Dialogue().send(request_headers(ends=True))
        talk.send(
            response_headers(
                HeaderValue(key=":status", raw_value=b"500"),
                HeaderValue(key="x-kvgate-engine-error", raw_value=b"engine_dead\xff"),
            )
        )
        assert talk.started is not None
        assert talk.started.status == 500
        assert talk.started.engine_error == "engine_dead\ufffd"
        (answer,) = talk.stream.answer_response([])
        mutation = answer.response_headers.response.header_mutation
        assert list(mutation.remove_headers) == ["x-kvgate-engine-error"]

    @pytest.mark.parametrize("mode", [FULL, *BUFFERED])
    def test_an_answer_of_envoys_own_passes_without_a_decision(self, mode: int) -> None:
        """A body over Envoy's own limit: its 413 comes while kvgate waits for the rest."""
        talk = Dialogue().send(request_headers(mode=mode))
        talk.answers.clear()
        talk.send(response_headers(), RESPONSE_BODY, RESPONSE_TRAILERS)
        assert talk.kinds == ["response_headers", "response_body", "response_trailers"]
        assert set_headers(talk.answers[0]) == {}
        assert (talk.arrived, talk.started) == (None, None)

    def test_an_answer_of_an_earlier_filter_passes_before_any_request(self) -> None:
        """A JWT filter's 401 must not become an error of ours."""
        talk = Dialogue().send(response_headers(), RESPONSE_BODY, RESPONSE_TRAILERS)
        assert talk.kinds == ["response_headers", "response_body", "response_trailers"]
        assert (talk.arrived, talk.started) == (None, None)

    @pytest.mark.parametrize(
        "message", [response_headers(), request_body(b"x", ends=True), TRAILERS]
    )
    def test_after_envoys_own_answer_nothing_is_decided(self, message: ProcessingRequest) -> None:
        talk = Dialogue().send(request_headers(), response_headers())
        with pytest.raises(ProtocolViolation, match="while ENVOY_ANSWERED"):
            talk.send(message)

    def test_bodies_and_trailers_of_responses_pass(self) -> None:
        talk = Dialogue().send(request_headers(ends=True))
        talk.send(response_headers(), RESPONSE_BODY, RESPONSE_TRAILERS)
        assert talk.kinds == ["request_headers", "response_body", "response_trailers"]


class TestOrder:
    """What cannot come is a violation, never an answer that Envoy did not ask for."""

    @pytest.mark.parametrize(
        "message",
        [request_body(b"x"), TRAILERS, RESPONSE_BODY, ProcessingRequest()],
    )
    def test_headers_come_first(self, message: ProcessingRequest) -> None:
        with pytest.raises(ProtocolViolation, match="while HEADERS"):
            RequestStream(10).receive(message)

    @pytest.mark.parametrize("message", [request_headers(), RESPONSE_BODY, RESPONSE_TRAILERS])
    def test_a_body_is_not_interrupted(self, message: ProcessingRequest) -> None:
        stream = RequestStream(10)
        stream.receive(request_headers())
        with pytest.raises(ProtocolViolation, match="while BODY"):
            stream.receive(message)

    @pytest.mark.parametrize("message", [request_body(b"x"), TRAILERS, response_headers()])
    def test_nothing_comes_while_it_is_decided(self, message: ProcessingRequest) -> None:
        stream = RequestStream(10)
        stream.receive(request_headers(ends=True))
        with pytest.raises(ProtocolViolation, match="while DECIDING"):
            stream.receive(message)

    @pytest.mark.parametrize("message", [request_body(b"x"), request_headers()])
    def test_a_request_does_not_start_again(self, message: ProcessingRequest) -> None:
        talk = Dialogue().send(request_headers(ends=True))
        with pytest.raises(ProtocolViolation, match="while ANSWERED"):
            talk.send(message)
