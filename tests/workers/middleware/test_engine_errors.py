"""Which class an engine's error has; texts are vLLM's own."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine_errors import (
    MAX_ERROR_BYTES,
    EngineError,
    classify,
    classify_event,
    classify_exception,
    error_text,
)

BUSY = "The engine is currently busy and cannot accept new requests. Please try again later"
BACKLOG = "The engine has reached its prefill token backlog limit. Please try again later"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
LONG = "This model's maximum context length is 8192 tokens. However, your prompt contains at least"
SHUT = "cannot schedule new futures after shutdown"


def openai(message: str, code: int, kind: str = "X", param: str | None = None) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def class_of(status: int, body: bytes) -> EngineError:
    return classify(status, error_text(body)[1])


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, LONG, EngineError.TOO_LONG),
        (400, "Input should be a valid integer", EngineError.CLIENT),
        (401, "Unauthorized", EngineError.CLIENT),
        (404, "The model `nope` does not exist.", EngineError.CLIENT),
        (413, "too large", EngineError.TOO_LONG),
        (429, "slow down", EngineError.QUEUE_FULL),
        (503, BUSY, EngineError.QUEUE_FULL),
        (503, BACKLOG, EngineError.QUEUE_FULL),
        (503, "The model is currently scaling. Please try again later.", EngineError.OTHER),
        (500, DEAD, EngineError.ENGINE_DEAD),
        (500, SHUT, EngineError.SHUTTING_DOWN),
        (500, "CUDA out of memory. Tried to allocate", EngineError.KV_EXHAUSTED),
        (500, "KV cache pool is full.", EngineError.KV_EXHAUSTED),
        (500, "Internal server error", EngineError.OTHER),
        (501, "not implemented", EngineError.OTHER),
    ],
)
def test_status_and_message_give_the_class(
    status: int, message: str, expected: EngineError
) -> None:
    assert class_of(status, openai(message, status)) is expected


def test_the_parameter_alone_tells_that_a_prompt_is_too_long() -> None:
    assert class_of(400, openai("no", 400, param="input_tokens")) is EngineError.TOO_LONG


def test_anthropic_errors_have_the_same_classes() -> None:
    error = {"type": "error", "error": {"type": "BadRequestError", "message": LONG}}
    assert class_of(400, json.dumps(error).encode()) is EngineError.TOO_LONG


@pytest.mark.parametrize("body", [b"", b"null", b"[1]", b'"x"', b"{", b'{"detail":"Not Found"}'])
def test_other_bodies_leave_it_to_the_status(body: bytes) -> None:
    assert class_of(404, body) is EngineError.CLIENT
    assert class_of(500, body) is EngineError.OTHER


def test_an_error_that_is_a_bare_string_is_read() -> None:
    assert class_of(500, json.dumps({"error": DEAD}).encode()) is EngineError.ENGINE_DEAD
    assert class_of(500, json.dumps({"message": DEAD}).encode()) is EngineError.ENGINE_DEAD


@given(st.integers(400, 499), st.sampled_from([DEAD, SHUT, BUSY, "out of memory"]))
def test_no_client_can_make_a_worker_look_dead(status: int, quoted: str) -> None:
    """HE1: an error below 500 may quote the client's own text."""
    harmless = {EngineError.CLIENT, EngineError.TOO_LONG, EngineError.QUEUE_FULL}
    kind = class_of(status, openai(f"The model `{quoted}` does not exist.", status))
    assert kind in harmless
    assert (kind is EngineError.QUEUE_FULL) == (status == 429)


@given(st.binary(max_size=200) | st.text().map(lambda text: json.dumps(text).encode()))
def test_any_body_has_a_text(body: bytes) -> None:
    code, text = error_text(body)
    assert 400 <= code <= 599
    assert isinstance(text, str)


def test_no_more_than_4_kb_is_looked_at() -> None:
    assert class_of(500, b"x" * MAX_ERROR_BYTES + DEAD.encode()) is EngineError.OTHER
    assert len(error_text(b"x" * 100_000)[1]) == MAX_ERROR_BYTES


@pytest.mark.parametrize("code", [None, "server_error", 200, 99, True])
def test_a_code_that_is_no_error_status_counts_as_500(code: object) -> None:
    assert error_text(json.dumps({"error": {"code": code}}).encode())[0] == 500


def test_an_error_event_is_a_stream_error_unless_it_says_more() -> None:
    assert classify_event(500, "Internal server error") is EngineError.STREAM_ERROR
    assert classify_event(400, "some value") is EngineError.STREAM_ERROR
    assert classify_event(500, DEAD) is EngineError.ENGINE_DEAD


def test_exceptions_have_classes_and_so_have_their_causes() -> None:
    assert classify_exception(RuntimeError(SHUT)) is EngineError.SHUTTING_DOWN
    assert classify_exception(asyncio.CancelledError()) is EngineError.CLIENT_GONE
    assert classify_exception(ValueError("x")) is EngineError.OTHER
    wrapped = RuntimeError("Caught handled exception, but response already started.")
    wrapped.__cause__ = ValueError(DEAD)
    assert classify_exception(wrapped) is EngineError.ENGINE_DEAD


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify_exception(first) is EngineError.OTHER


def test_a_class_reads_as_its_name() -> None:
    assert str(EngineError.ENGINE_DEAD) == f"{EngineError.ENGINE_DEAD}" == "engine_dead"
