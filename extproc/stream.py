"""The Envoy dialogue of one request, as a pure state machine.

Envoy's messages go in, answers and events come out; nothing here waits. The shell sends
the answers in order, and acts on the event: decide on an arrived request, note that the
response started. Full duplex (headers and body arrive unasked, the answer starts with the
headers) and BUFFERED (headers are answered at once, the decision rides on the body) are
the same machine with another place for the decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, NamedTuple

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from google.protobuf.struct_pb2 import Struct

from extproc import replies
from extproc.decision.ticket import Decision
from extproc.errors import BodyTooLarge, KvgateError, Refusal
from extproc.replies import ProcessingRequest, ProcessingResponse
from extproc.request.identity import MAX_HEADER_CHARS, MetadataPath
from extproc.request.reader import SESSION_HEADER
from extproc.request.subset import subset_hint

_WANTED_HEADERS = frozenset(
    {":path", ":method", "content-type", "content-encoding", "x-request-id", SESSION_HEADER}
)
_ATTRIBUTES = "envoy.filters.http.ext_proc"
_MAX_REQUEST_ID_CHARS = 256
_MAX_ERROR_CHARS = 32

_BUFFERED = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)
_BODILESS = (ProcessingMode.NONE, ProcessingMode.STREAMED)


class ProtocolViolation(KvgateError):
    """Envoy sent a message that does not belong here."""


class Arrived(NamedTuple):
    """The whole request is here: decide, then call ``answer``, ``refuse`` or ``reply``.

    ``body`` is None where Envoy's mode shows a body too late or not at all. ``metadata`` has
    what was asked for and is there: text, numbers and switches, ``()`` for anything else.
    ``subset``: workers that the gateway allows, None for all.
    """

    headers: dict[str, str]
    body: bytes | None
    metadata: Mapping[MetadataPath, Any] = MappingProxyType({})
    subset: frozenset[str] | None = None


class ResponseStarted(NamedTuple):
    """Response headers came: call ``answer_response``."""

    status: int
    served_by: str | None
    attempts: int
    engine_error: str | None = None


class Step(NamedTuple):
    """What one message leads to."""

    answers: Sequence[ProcessingResponse] = ()
    event: Arrived | ResponseStarted | None = None
    refusal: Refusal | None = None


class _State(Enum):
    HEADERS = auto()
    BODY = auto()
    DECIDING = auto()
    ANSWERED = auto()
    ENVOY_ANSWERED = auto()
    REPLIED = auto()


class RequestStream:
    """One request's dialogue.

    Args:
        max_body_bytes: a longer request body is refused with 413 as soon as it is seen.
        identity_headers: headers for the event to carry; one that came twice has its values
            joined by commas, so that nobody takes the first for the only one.
        metadata_paths: values of Envoy's filter metadata for the event to carry.
    """

    def __init__(
        self,
        max_body_bytes: int,
        identity_headers: Set[str] = frozenset(),
        metadata_paths: Set[MetadataPath] = frozenset(),
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._identity_headers = identity_headers
        self._metadata_paths = metadata_paths
        self._state = _State.HEADERS
        self._mode: int = ProcessingMode.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] = {}
        self._metadata: dict[MetadataPath, Any] = {}
        self._subset: frozenset[str] | None = None
        self._request_id = ""
        self._pieces: list[bytes] = []
        self._size = 0
        self._has_body = False
        self._ends_with_trailers = False
        self._hidden: tuple[str, ...] = ()

    @property
    def replied(self) -> bool:
        """The client has its whole answer from kvgate: nothing more is to come."""
        return self._state is _State.REPLIED

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
        if kind == "response_headers" and self._state in (_State.HEADERS, _State.BODY):
            # Envoy answered by itself: an earlier filter's 401, or a body over its own limit.
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

    def answer(self, decision: Decision, body: bytes | None = None) -> list[ProcessingResponse]:
        """Everything that Envoy waits for, now that the request has a worker.

        Args:
            body: what the worker gets in place of the client's body; None leaves that alone.

        Raises:
            ValueError: kvgate was shown no body that it could replace.
        """
        shown = self._has_body and self._mode not in _BODILESS
        if body is not None and not shown:
            raise ValueError("there is no body to replace")
        self._state = _State.ANSWERED
        destination = ",".join(decision.endpoints)
        headers = [(replies.LEASE, decision.id)]
        if decision.prefiller:
            headers.append((replies.PREFILLER, decision.prefiller))
        if len(self._request_id) > _MAX_REQUEST_ID_CHARS:
            # Engines refuse header fields of some 8 KB; the id is only a label.
            headers.append(("x-request-id", self._request_id[:_MAX_REQUEST_ID_CHARS]))
        if self._mode in _BUFFERED and self._has_body:
            return [replies.buffered_body_answer(headers, destination, body)]
        answers = [replies.headers_answer(headers, destination)]
        if shown:
            sent = b"".join(self._pieces) if body is None else body
            answers += replies.streamed_body(sent, ends_stream=not self._ends_with_trailers)
        if self._ends_with_trailers:
            answers.append(replies.request_trailers_answer())
        self._pieces.clear()
        return answers

    def refuse(self, refusal: Refusal, decision_id: str | None = None) -> list[ProcessingResponse]:
        """The client gets this refusal and Envoy ends the stream."""
        return self._end(replies.refusal_answer(refusal, decision_id))

    def reply(
        self, status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()
    ) -> list[ProcessingResponse]:
        """The client gets this JSON from kvgate, no worker anything, and Envoy ends the stream."""
        return self._end(replies.json_answer(status, body, headers))

    def answer_response(self, headers: list[tuple[str, str]]) -> list[ProcessingResponse]:
        """Let the response pass, with these headers added."""
        return [replies.response_headers_answer(headers, self._hidden)]

    def _end(self, answer: ProcessingResponse) -> list[ProcessingResponse]:
        self._state = _State.REPLIED
        self._pieces.clear()
        return [answer]

    def _on_headers(self, message: ProcessingRequest) -> Step:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
        headers = message.request_headers.headers.headers
        self._headers = wanted_headers(headers, self._identity_headers)
        self._request_id = self._headers.get("x-request-id", "")
        filters = message.metadata_context.filter_metadata
        self._metadata = wanted_metadata(filters, self._metadata_paths)
        self._subset = subset_hint(filters)
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
        piece = body.body  # a copy, every time that it is asked for
        self._size += len(piece)
        if self._size > self._max_body_bytes:
            refusal = BodyTooLarge(f"The request body is over {self._max_body_bytes} bytes.")
            return Step(self.refuse(refusal), refusal=refusal)
        self._pieces.append(piece)
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
        shown_body = body if shown else None
        event = Arrived(self._headers, shown_body, self._metadata, self._subset)
        # The stream lives as long as the response; an API key need not.
        self._headers, self._metadata = {}, {}
        return Step(event=event)


def wanted_headers(headers: Iterable[Any], joined: Set[str]) -> dict[str, str]:
    """The headers that decisions read, undecodable bytes replaced, cut to a bounded length.

    Of a name that comes twice the first counts, or with a name in ``joined`` all do.

    Args:
        headers: messages with ``key`` and either ``raw_value`` or ``value``.
    """
    found: dict[str, str] = {}
    for header in headers:
        key = header.key.lower()
        again = key in found
        if key in joined or (key in _WANTED_HEADERS and not again):
            raw = header.raw_value
            value = raw.decode("utf-8", "replace") if raw else header.value
            found[key] = (f"{found[key]},{value}" if again else value)[:MAX_HEADER_CHARS]
    return found


def wanted_metadata(
    filters: Mapping[str, Struct], paths: Set[MetadataPath]
) -> dict[MetadataPath, Any]:
    """Values of filter metadata at these paths, as :class:`Arrived` has them."""
    found = {path: _at(filters[path[0]], path[1:]) for path in paths if path[0] in filters}
    return {path: value for path, value in found.items() if value is not None}


def _at(struct: Struct, keys: tuple[str, ...]) -> str | float | bool | tuple[()] | None:
    """The value below ``keys``: text cut to a bounded length, ``()`` for lists and objects."""
    *above, last = keys
    for key in above:
        if key not in struct.fields:
            return None
        struct = struct.fields[key].struct_value
    if last not in struct.fields:
        return None
    value = struct.fields[last]
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return value.string_value[:MAX_HEADER_CHARS]
    if kind == "number_value":
        return value.number_value
    if kind == "bool_value":
        return value.bool_value
    return None if kind in (None, "null_value") else ()


def _response_started(message: ProcessingRequest) -> ResponseStarted:
    status, engine_error = 0, None
    for header in message.response_headers.headers.headers:
        key = header.key
        if key == ":status":
            text = header.raw_value or header.value.encode()
            status = int(text) if text.isdigit() else 0
        elif key == replies.ENGINE_ERROR:
            text = header.raw_value or header.value.encode()
            engine_error = text.decode("ascii", "replace")[:_MAX_ERROR_CHARS]
    served_by, attempts = None, 1
    if _ATTRIBUTES in message.attributes:
        fields = message.attributes[_ATTRIBUTES].fields
        if "upstream.address" in fields:
            served_by = fields["upstream.address"].string_value or None
        if "upstream.request_attempt_count" in fields:
            attempts = int(fields["upstream.request_attempt_count"].number_value)
    return ResponseStarted(status, served_by, attempts, engine_error)
