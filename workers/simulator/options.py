"""The fields of a request body that steer generation, checked as vLLM checks them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from workers.simulator.errors import ApiError, malformed

Json = dict[str, Any]

DEFAULT_MAX_TOKENS = 16
MAX_SALT_CHARS = 128
MAX_CHOICES = 128
_BAD_SALT = re.compile(r"[@/\\\0]")
_MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class Options:
    """What a body asks for beside its prompt."""

    model: str | None
    max_tokens: int
    choices: int
    stream: bool
    include_usage: bool
    cache_salt: str | None
    return_token_ids: bool


def decode_body(raw: bytes) -> Json:
    """The body as an object.

    Raises:
        ApiError: it is not a JSON object.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise malformed("the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise malformed("the body must be a JSON object")
    return body


def read_options(body: Json) -> Options:
    """Options of a body; fields it does not know are ignored.

    Raises:
        ApiError: a known field has a bad value.
    """
    stream_options = body.get("stream_options")
    return Options(
        model=_model(body.get("model")),
        max_tokens=_max_tokens(body),
        choices=_whole_number(body.get("n"), "n", 1, MAX_CHOICES),
        stream=body.get("stream") is True,
        include_usage=isinstance(stream_options, dict)
        and stream_options.get("include_usage") is True,
        cache_salt=_cache_salt(body.get("cache_salt")),
        return_token_ids=body.get("return_token_ids") is True,
    )


def _model(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise malformed("model must be a string")
    return value


def _max_tokens(body: Json) -> int:
    for field in _MAX_TOKENS_FIELDS:
        if body.get(field) is not None:
            return _whole_number(body[field], field, 1)
    return DEFAULT_MAX_TOKENS


def _whole_number(value: object, field: str, least: int, most: int | None = None) -> int:
    if value is None:
        return least
    if type(value) is not int:
        raise malformed(f"{field} must be an integer")
    if value < least or (most is not None and value > most):
        raise ApiError(400, f"{field} must be at least {least}, got {value}", field)
    return value


def _cache_salt(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise malformed("Parameter 'cache_salt' must be a non-empty string if provided.")
    if len(value) > MAX_SALT_CHARS or _BAD_SALT.search(value):
        raise malformed(
            f"Parameter 'cache_salt' must have at most {MAX_SALT_CHARS} characters and no "
            "'@', '/', '\\' or NUL."
        )
    return value
