"""The Envoy dialogue of one request, as a pure state machine.

Envoy's messages go in, answers and events come out; nothing here waits. The shell sends
the answers in order, and acts on the event: decide on an arrived request, note that the
response started. Full duplex (headers and body arrive unasked, the answer starts with the
headers) and BUFFERED (headers are answered at once, the decision rides on the body) are
the same machine with another place for the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode

from extproc import replies
from extproc.errors import BodyTooLarge, KvgateError, Refusal
from extproc.replies import ProcessingRequest, ProcessingResponse
from extproc.scheduler import Decision

_WANTED_HEADERS = frozenset(
    {":path", ":method", "content-type", "content-encoding", "x-request-id"}
)
_ATTRIBUTES = "envoy.filters.http.ext_proc"
_MAX_HEADER_CHARS = 4_096
"""Headers are cut to this length before anything looks at them."""

_MAX_REQUEST_ID_CHARS = 256
_MAX_ERROR_CHARS = 32

_BUFFERED = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)
_BODILESS = (ProcessingMode.NONE, ProcessingMode.STREAMED)


class ProtocolViolation(KvgateError):
    """Envoy sent a message that does not belong here."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The whole request is here: decide, then call ``answer`` or ``refuse``.

    ``body`` is None where Envoy's mode shows a body too late or not at all.
    """

    headers: Mapping[str, str]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    """Response headers came: call ``answer_response``."""

    status: int
    served_by: str | None
    attempts: int
    engine_error: str | None = None


@dataclass(slots=True)
class Step:
    """What one message leads to."""

    answers: list[ProcessingResponse] = field(default_factory=list)
    event: Arrived | ResponseStarted | None = None
    refusal: Refusal | None = None


class _State(Enum):
    HEADERS = auto()
    BODY = auto()
    DECIDING = auto()
    ANSWERED = auto()
    ENVOY_ANSWERED = auto()
    REFUSED = auto()


class RequestStream:
    """One request's dialogue.

    Args:
        max_body_bytes: a longer request body is refused with 413 as soon as it is seen.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._state = _State.HEADERS
        self._mode: int = ProcessingMode.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = 0
        self._has_body = False
        self._ends_with_trailers = False
        self._hidden: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """The client has its refusal: nothing more is to come."""
        return self._state is _State.REFUSED

    def receive(self, message: ProcessingRequest) -> Step:
        """Take Envoy's next message.

        Raises:
            ProtocolViolation: the message cannot come at this point.
        """
        kind = message.WhichOneof("request")
        if kind == "request_headers" and self._state is _State.HEADERS:
            return self._on_headers(message)
        if kind == "request_body":
            return self._on_body(message)
        if kind == "request_trailers":
            return self._on_trailers()
        if kind == "response_headers" and self._state is _State.BODY:
            # Envoy answered by itself: a body over its own buffer limit, say.
            self._state = _State.ENVOY_ANSWERED
            return Step(self.answer_response([]))
        if self._state in (_State.ANSWERED, _State.ENVOY_ANSWERED):
            if kind == "response_headers" and self._state is _State.ANSWERED:
                started = _response_started(message)
                self._hidden = () if started.engine_error is None else (replies.ENGINE_ERROR,)
                return Step(event=started)
            if kind == "response_body":
                return Step([replies.response_body_answer()])
            if kind == "response_trailers":
                return Step([replies.response_trailers_answer()])
        raise ProtocolViolation(f"{kind} while {self._state.name}")

    def answer(self, decision: Decision) -> list[ProcessingResponse]:
        """Everything that Envoy waits for, now that the request has a worker."""
        self._state = _State.ANSWERED
        destination = ",".join(decision.endpoints)
        headers = [(replies.LEASE, decision.id)]
        request_id = self._headers.get("x-request-id", "")
        if len(request_id) > _MAX_REQUEST_ID_CHARS:
            # Engines refuse header fields of some 8 KB; the id is only a label.
            headers.append(("x-request-id", request_id[:_MAX_REQUEST_ID_CHARS]))
        if self._mode in _BUFFERED and self._has_body:
            return [replies.buffered_body_answer(headers, destination)]
        answers = [replies.headers_answer(headers, destination)]
        if self._has_body and self._mode not in _BODILESS:
            body = b"".join(self._pieces)
            answers += replies.streamed_body(body, ends_stream=not self._ends_with_trailers)
        if self._ends_with_trailers:
            answers.append(replies.request_trailers_answer())
        self._pieces.clear()
        return answers

    def refuse(self, refusal: Refusal, decision_id: str | None = None) -> list[ProcessingResponse]:
        """The client gets this refusal and Envoy ends the stream."""
        self._state = _State.REFUSED
        self._pieces.clear()
        return [replies.refusal_answer(refusal, decision_id)]

    def answer_response(self, headers: list[tuple[str, str]]) -> list[ProcessingResponse]:
        """Let the response pass, with these headers added."""
        return [replies.response_headers_answer(headers, self._hidden)]

    def _on_headers(self, message: ProcessingRequest) -> Step:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
        self._headers = _wanted(message)
        ends = message.request_headers.end_of_stream
        self._has_body = not ends
        if ends or self._mode in _BODILESS:
            return self._arrived()
        self._state = _State.BODY
        return Step([replies.continue_headers()]) if self._mode in _BUFFERED else Step()

    def _on_body(self, message: ProcessingRequest) -> Step:
        if self._state is _State.ANSWERED and self._mode in _BODILESS:
            return Step([replies.continue_body()])
        if self._state is not _State.BODY:
            raise ProtocolViolation(f"request_body while {self._state.name}")
        body = message.request_body
        self._size += len(body.body)
        if self._size > self._max_body_bytes:
            refusal = BodyTooLarge(f"The request body is over {self._max_body_bytes} bytes.")
            return Step(self.refuse(refusal), refusal=refusal)
        self._pieces.append(body.body)
        # A buffered body is whole, whatever its mark says when trailers follow.
        return self._arrived() if body.end_of_stream or self._mode in _BUFFERED else Step()

    def _on_trailers(self) -> Step:
        if self._state is _State.ANSWERED:
            return Step([replies.request_trailers_answer()])
        if self._state is not _State.BODY:
            raise ProtocolViolation(f"request_trailers while {self._state.name}")
        self._ends_with_trailers = True
        return self._arrived()

    def _arrived(self) -> Step:
        self._state = _State.DECIDING
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        body = self._pieces[0] if self._pieces else b""
        shown = not self._has_body or self._mode not in _BODILESS
        return Step(event=Arrived(self._headers, body if shown else None))


def _wanted(message: ProcessingRequest) -> dict[str, str]:
    """The headers that decisions read, first one of each name, undecodable bytes replaced."""
    found: dict[str, str] = {}
    for header in message.request_headers.headers.headers:
        key = header.key.lower()
        if key in _WANTED_HEADERS and key not in found:
            raw = header.raw_value
            value = raw.decode("utf-8", "replace") if raw else header.value
            found[key] = value[:_MAX_HEADER_CHARS]
    return found


def _response_started(message: ProcessingRequest) -> ResponseStarted:
    status, engine_error = 0, None
    for header in message.response_headers.headers.headers:
        text = header.raw_value or header.value.encode()
        if header.key == ":status":
            status = int(text) if text.isdigit() else 0
        elif header.key == replies.ENGINE_ERROR:
            engine_error = text.decode("ascii", "replace")[:_MAX_ERROR_CHARS]
    served_by, attempts = None, 1
    if _ATTRIBUTES in message.attributes:
        fields = message.attributes[_ATTRIBUTES].fields
        if "upstream.address" in fields:
            served_by = fields["upstream.address"].string_value or None
        if "upstream.request_attempt_count" in fields:
            attempts = int(fields["upstream.request_attempt_count"].number_value)
    return ResponseStarted(status, served_by, attempts, engine_error)
