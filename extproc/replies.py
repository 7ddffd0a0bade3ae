"""Envoy messages that kvgate sends, built in one place.

Header values go into the bytes field alone: Envoy ignores the text field, and both set is
an error. Bodies are echoed in pieces that every Envoy build takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

from extproc.errors import Refusal

MAX_PIECE_BYTES = 62_000
"""Envoy builds refuse streamed body pieces over 64 KiB."""

DESTINATION = "x-gateway-destination-endpoint"
METADATA_NAMESPACE = "envoy.lb"
LEASE = "x-kvgate-lease"
PREFILLER = "x-prefiller-host-port"
"""Who computes the prompt, for the sidecar of the worker that answers it. Whoever sends it
chooses an address that the sidecar calls: a client's never passes."""

REFUSAL = "x-kvgate-refusal"
"""Code of a refusal."""

REASON = "x-kvgate-reason"
"""What admission found missing."""

DEFAULT_RETRY_AFTER_S = 1.0
"""Told with a retryable refusal that knows no better time."""

_UNAUTHORIZED = 401

ENGINE_ERROR = "x-kvgate-engine-error"
"""How the worker's middleware marks error answers; for kvgate and Envoy, not for clients."""

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

__all__ = ["ProcessingRequest", "ProcessingResponse"]


def headers_answer(headers: Iterable[tuple[str, str]], destination: str) -> ProcessingResponse:
    """Answer request headers: set ``headers`` and the destination, there and as metadata."""
    reply = ProcessingResponse()
    _set(reply.request_headers.response, headers)
    _set_destination(reply, reply.request_headers.response, destination)
    return reply


def continue_headers() -> ProcessingResponse:
    """Answer request headers with nothing: the decision comes with the body."""
    return ProcessingResponse(request_headers=HeadersResponse())


def buffered_body_answer(
    headers: Iterable[tuple[str, str]], destination: str, body: bytes | None = None
) -> ProcessingResponse:
    """Answer a buffered body: headers as in :func:`headers_answer`, and another body if given.

    With another body goes its length: Envoy fails a request whose header tells the old one.
    """
    reply = ProcessingResponse()
    response = reply.request_body.response
    _set(response, headers)
    if body is not None:
        _set(response, [("content-length", str(len(body)))])
        response.body_mutation.body = body
    _set_destination(reply, response, destination)
    return reply


def continue_body() -> ProcessingResponse:
    """Answer a body piece that kvgate has no use for."""
    return ProcessingResponse(request_body=BodyResponse())


def streamed_body(body: bytes, *, ends_stream: bool) -> Iterator[ProcessingResponse]:
    """Echo a body byte for byte; with ``ends_stream`` exactly the last piece says so."""
    last = max(0, len(body) - 1) // MAX_PIECE_BYTES
    for number in range(last + 1):
        piece = body[number * MAX_PIECE_BYTES : (number + 1) * MAX_PIECE_BYTES]
        reply = ProcessingResponse()
        streamed = reply.request_body.response.body_mutation.streamed_response
        streamed.body = piece
        streamed.end_of_stream = ends_stream and number == last
        yield reply


def request_trailers_answer() -> ProcessingResponse:
    """Let request trailers pass."""
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_headers_answer(
    headers: Iterable[tuple[str, str]], remove: Iterable[str] = ()
) -> ProcessingResponse:
    """Answer response headers, adding what the client may see and taking out what it may not."""
    reply = ProcessingResponse()
    response = reply.response_headers.response
    response.SetInParent()  # an answer that changes nothing is an answer
    _set(response, headers)
    response.header_mutation.remove_headers.extend(remove)
    return reply


def response_body_answer() -> ProcessingResponse:
    """Let a response body piece pass, should a mesh send one."""
    return ProcessingResponse(response_body=BodyResponse())


def response_trailers_answer() -> ProcessingResponse:
    """Let response trailers pass."""
    return ProcessingResponse(response_trailers=TrailersResponse())


def refusal_answer(refusal: Refusal, decision_id: str | None = None) -> ProcessingResponse:
    """A complete answer to the client: status, reason headers, OpenAI-shaped body."""
    headers = refusal_headers(refusal)
    if decision_id is not None:
        headers.append(("x-kvgate-decision-id", decision_id))
    return _immediate(refusal.http_status, error_body(refusal), headers, refusal.code)


def refusal_headers(refusal: Refusal) -> list[tuple[str, str]]:
    """What a refusal's headers say: why, and whether and when to try again."""
    headers = [(REFUSAL, refusal.code)]
    if refusal.reason is not None:
        headers.append((REASON, refusal.reason))
    wait_s = retry_after_s(refusal)
    if wait_s is not None:
        headers.append(("retry-after", str(max(1, math.ceil(wait_s)))))
        headers.append(("retry-after-ms", str(round(wait_s * 1000))))
    else:
        headers.append(("x-should-retry", "false"))
    if refusal.http_status == _UNAUTHORIZED:
        # HTTP wants to be told by which scheme the caller could do better.
        headers.append(("www-authenticate", "Bearer"))
    return headers


def retry_after_s(refusal: Refusal) -> float | None:
    """When to come back; None where that is of no use."""
    if not refusal.retryable:
        return None
    return DEFAULT_RETRY_AFTER_S if refusal.retry_after_s is None else refusal.retry_after_s


def json_answer(
    status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()
) -> ProcessingResponse:
    """A complete answer to the client that is no refusal: a dry run's decision."""
    return _immediate(status, body, headers, "answered")


def _immediate(
    status: int, body: bytes, headers: Iterable[tuple[str, str]], details: str
) -> ProcessingResponse:
    reply = ProcessingResponse()
    answer = reply.immediate_response
    answer.status.code = status
    answer.body = body
    answer.details = f"kvgate_{details}"
    _add_headers(answer.headers, (("content-type", "application/json"), *headers))
    return reply


def error_body(refusal: Refusal) -> bytes:
    """OpenAI's error shape."""
    error = {
        "message": refusal.message,
        "type": refusal.error_type,
        "param": refusal.param,
        "code": refusal.code,
    }
    return msgspec.json.encode({"error": error})


# Messages are filled where they stand: handing a finished one to a constructor copies it, at
# every level, which for a piece of a body costs ten times more.


def _set(response: CommonResponse, headers: Iterable[tuple[str, str]]) -> None:
    _add_headers(response.header_mutation, headers)


def _add_headers(mutation: HeaderMutation, headers: Iterable[tuple[str, str]]) -> None:
    add = mutation.set_headers.add
    for name, value in headers:
        header = add(append_action=_OVERWRITE).header
        header.key = name
        header.raw_value = value.encode("utf-8", "replace")


def _set_destination(reply: ProcessingResponse, response: CommonResponse, destination: str) -> None:
    """The destination as header and metadata; a prefiller's header only where kvgate set it."""
    mutation = response.header_mutation
    if all(option.header.key != PREFILLER for option in mutation.set_headers):
        mutation.remove_headers.append(PREFILLER)
    _set(response, [(DESTINATION, destination)])
    namespace = reply.dynamic_metadata.fields[METADATA_NAMESPACE].struct_value
    namespace.fields[DESTINATION].string_value = destination
