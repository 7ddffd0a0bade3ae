"""``read_request``: one HTTP request to one ``RequestProfile``.

The path says what the body should be; content type and encoding say whether it can be
read. Everything else passes through, routed by load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from extproc.errors import InvalidJson, InvalidRequest, MissingModel
from extproc.policy import RequestPolicy
from extproc.request.anthropic import messages_profile
from extproc.request.encoding import readable_json
from extproc.request.identity import DEFAULT_IDENTITY, Identity
from extproc.request.openai import (
    ModelOnly,
    chat_profile,
    completion_profile,
    decode,
    embedding_profile,
)
from extproc.request.profile import Endpoint, RequestProfile
from extproc.request.responses import responses_profile

_READERS: dict[str, Callable[[bytes], RequestProfile]] = {
    "/v1/chat/completions": chat_profile,
    "/v1/completions": completion_profile,
    "/v1/embeddings": embedding_profile,
    "/v1/responses": responses_profile,
    "/v1/messages": messages_profile,
}

SESSION_HEADER = "x-session-id"


def read_request(
    headers: Mapping[str, str],
    body: bytes | None,
    policy: RequestPolicy,
    identity: Identity = DEFAULT_IDENTITY,
    subset: frozenset[str] | None = None,
) -> RequestProfile:
    """Profile of a request.

    Args:
        headers: lower-case names, pseudo headers (``:path``, ``:method``) included.
        body: the whole body, empty if there is none, None if Envoy does not show it.
        identity: whose request it is.
        subset: workers that the gateway allows, None for all.

    Raises:
        InvalidJson, InvalidRequest, MissingModel: the caller must change the request.
    """
    if body is None:
        return RequestProfile(Endpoint.PASS, identity=identity, subset=subset)
    path = headers.get(":path", "/").partition("?")[0]
    read = _READERS.get(path) if headers.get(":method", "POST") == "POST" else None
    if read is None and not body:
        return RequestProfile(Endpoint.PASS, counted=False, identity=identity, subset=subset)
    plain = readable_json(
        body,
        headers.get("content-type", ""),
        headers.get("content-encoding", ""),
        policy.max_decoded_bytes,
    )
    if plain is None:
        return RequestProfile(Endpoint.PASS, body_bytes=len(body), identity=identity, subset=subset)
    encoded = headers.get("content-encoding", "").strip().lower() not in ("", "identity")
    if read is None:
        is_object, model = _model_hint(plain)
        return RequestProfile(
            Endpoint.PASS,
            model=model,
            body_bytes=len(body),
            editable=is_object and not encoded,
            identity=identity,
            subset=subset,
        )
    profile = read(plain)
    if not profile.model:
        raise MissingModel("The request body must name a 'model'.", param="model")
    session = headers.get(SESSION_HEADER, "")
    return replace(
        profile,
        identity=identity,
        editable=not encoded,
        session=session,
        subset=subset,
        fingerprint=xxh3_64_intdigest(body),
    )


def _model_hint(body: bytes) -> tuple[bool, str | None]:
    """Whether the body is a JSON object, and the model that it names."""
    try:
        model = decode(body, ModelOnly).model
    except (InvalidJson, InvalidRequest):
        return False, None
    return True, model if isinstance(model, str) else None
