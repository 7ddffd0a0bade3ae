"""The fields of a request body that steer generation, checked as vLLM checks them."""

from __future__ import annotations

import json
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
    if not raw:
        raise malformed("the body is empty")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise malformed("the body is not valid JSON", str(_place_of_error(raw))) from None
    if not isinstance(body, dict):
        raise malformed("the body must be a JSON object")
    return body


def _place_of_error(raw: bytes) -> int:
    try:
        json.loads(raw.decode("utf-8", "replace"))
    except json.JSONDecodeError as error:
        return error.pos
    except RecursionError:
        pass
    return 0


def read_options(body: Json) -> Options:
    """Options of a body; fields it does not know are ignored.

    Raises:
        ApiError: a known field has a bad value.
    """
    stream_options = body.get("stream_options")
    return Options(
        model=_model(body.get("model")),
        max_tokens=_max_tokens(body),
        choices=_choices(body),
        stream=body.get("stream") is True,
        include_usage=isinstance(stream_options, dict)
        and stream_options.get("include_usage") is True,
        cache_salt=_cache_salt(body.get("cache_salt")),
        return_token_ids=body.get("return_token_ids") is True,
    )


def _model(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise malformed("model must be a string", "model")
    return value


def _max_tokens(body: Json) -> int:
    for field in _MAX_TOKENS_FIELDS:
        if body.get(field) is not None:
            tokens = _whole_number(body[field], field)
            if tokens < 1:
                raise ApiError(400, f"{field} must be at least 1, got {tokens}", field)
            return tokens
    return DEFAULT_MAX_TOKENS


def _choices(body: Json) -> int:
    choices = body.get("n", 1)
    # vLLM takes a null for more than one choice of a greedy request, and names no field.
    if choices is None:
        raise ApiError(400, "n must be an integer")
    choices = _whole_number(choices, "n")
    if not 1 <= choices <= MAX_CHOICES:
        raise ApiError(400, f"n must be 1 to {MAX_CHOICES}, got {choices}")
    return choices


def _whole_number(value: object, field: str) -> int:
    if type(value) is not int:
        raise malformed(f"{field} must be an integer", field)
    return value


def _cache_salt(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        text = "Parameter 'cache_salt' must be a non-empty string if provided."
        raise ApiError(400, text, "cache_salt")
    if len(value) > MAX_SALT_CHARS or _BAD_SALT.search(value):
        raise ApiError(
            400,
            f"Parameter 'cache_salt' must have at most {MAX_SALT_CHARS} characters and no "
            "'@', '/', '\\' or NUL.",
            "cache_salt",
        )
    return value
