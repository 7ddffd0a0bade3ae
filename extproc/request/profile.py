"""``RequestProfile``: everything a decision needs to know about one request.

Bodies are decoded only as far as the decision needs; the bytes that go to the engine stay
as they came. What kvgate cannot read (multipart, unknown encodings, unknown paths) becomes
a profile without prompts and is routed by load.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from extproc.request.identity import DEFAULT_IDENTITY, Identity
from extproc.tokens.template import Messages


class Endpoint(Enum):
    """What a path asks for; the value is the metric label."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    PASS = "pass"  # noqa: S105

    @property
    def generates(self) -> bool:
        """Whether the engine generates tokens for it."""
        return self not in (Endpoint.EMBEDDINGS, Endpoint.PASS)


class ChatPrompt(msgspec.Struct, frozen=True):
    """A prompt that the model's chat template renders."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    media_parts: int = 0


class TextPrompt(msgspec.Struct, frozen=True):
    """A prompt given as text."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, frozen=True):
    """A prompt given as token ids."""

    token_ids: list[int]


class UnknownPrompt(msgspec.Struct, frozen=True):
    """A prompt whose tokens only the engine knows; ``chars`` is its rough size."""

    chars: int


Prompt = ChatPrompt | TextPrompt | TokenPrompt | UnknownPrompt


class RequestProfile(msgspec.Struct, frozen=True):
    """One request as admission and routing see it.

    ``model`` is None only where the body names none and the path needs none. ``counted``
    is False for requests without a body (model lists, health pages): they are booked on
    their worker but take no part in admission. ``editable``: the body is a plain JSON object,
    whose members may be changed on the way; ``isolated``: ``cache_salt`` is kvgate's and must
    get there. ``fingerprint`` is a hash of the body, by which a request that comes back is
    known; 0 if there is none. ``session`` is the client's session id, ``subset`` the addresses
    or ips that the gateway allows, None for all.
    """

    endpoint: Endpoint
    model: str | None = None
    prompts: tuple[Prompt, ...] = ()
    stream: bool = False
    max_output_tokens: int | None = None
    cache_salt: str = ""
    counted: bool = True
    body_bytes: int = 0
    editable: bool = False
    isolated: bool = False
    fingerprint: int = 0
    identity: Identity = DEFAULT_IDENTITY
    session: str = ""
    subset: frozenset[str] | None = None

    @property
    def degradable(self) -> bool:
        """Whether kvgate knows which members say how long the answer is, and by which model."""
        return self.editable and self.endpoint is not Endpoint.PASS
