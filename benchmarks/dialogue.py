"""Envoy's side of a request, as the bytes that arrive on the gRPC stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)
from google.protobuf.struct_pb2 import Struct

ENVOY_READ_BYTES = 64 * 1024
"""Envoy hands a body over as it reads it from its connection."""
_REQUEST_HEADERS = {
    ":scheme": "http",
    ":method": "POST",
    ":authority": "llm.example",
    ":path": "/v1/chat/completions",
    "content-type": "application/json",
    "authorization": "Bearer " + "x" * 48,
    "user-agent": "OpenAI/Python 1.109.1",
    "accept": "application/json",
    "x-forwarded-for": "127.0.0.1",
    "x-forwarded-proto": "http",
    "x-request-id": "0f2b8a52-6a7e-4b44-9d55-0a2f0b9f3c11",
}
_RESPONSE_HEADERS = {
    ":status": "200",
    "content-type": "application/json",
    "content-length": "512",
    "x-envoy-upstream-service-time": "12",
}


@dataclass(frozen=True)
class Dialogue:
    """Serialised messages of one request: before the decision, and the response headers."""

    request: list[bytes]
    response: bytes


def make_dialogue(body: bytes) -> Dialogue:
    """What Envoy sends for a chat completion with this body, full duplex."""
    mode = ProcessingMode.FULL_DUPLEX_STREAMED
    request = ProcessingRequest(
        request_headers=HttpHeaders(
            headers=_map({**_REQUEST_HEADERS, "content-length": len(body)})
        ),
        protocol_config=ProtocolConfiguration(request_body_mode=mode),
    )
    messages = [request]
    for start in range(0, len(body), ENVOY_READ_BYTES):
        piece = HttpBody(body=body[start : start + ENVOY_READ_BYTES])
        messages.append(ProcessingRequest(request_body=piece))
    messages.append(ProcessingRequest(request_body=HttpBody(end_of_stream=True)))
    return Dialogue([each.SerializeToString() for each in messages], _response())


def _response() -> bytes:
    attributes = Struct()
    attributes.update({"upstream.request_attempt_count": 1})
    message = ProcessingRequest(response_headers=HttpHeaders(headers=_map(_RESPONSE_HEADERS)))
    message.attributes["envoy.filters.http.ext_proc"].CopyFrom(attributes)
    serialised: bytes = message.SerializeToString()
    return serialised


def _map(headers: Mapping[str, object]) -> HeaderMap:
    values = [
        HeaderValue(key=name, raw_value=str(value).encode()) for name, value in headers.items()
    ]
    return HeaderMap(headers=values)
