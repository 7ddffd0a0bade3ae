from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.errors import InvalidRequest
from extproc.request.profile import ChatPrompt, Endpoint, UnknownPrompt
from extproc.request.responses import responses_profile


def prompt(given: Any, **fields: Any) -> ChatPrompt:
    body = {"model": "sim", "input": given, **fields}
    (found,) = responses_profile(json.dumps(body).encode()).prompts
    assert isinstance(found, ChatPrompt)
    return found


def test_the_plain_fields_are_read() -> None:
    fields = {"model": "m", "input": "Hi", "stream": True, "max_output_tokens": 3}
    body = json.dumps({**fields, "cache_salt": "s"}).encode()
    profile = responses_profile(body)
    assert profile.endpoint is Endpoint.RESPONSES
    assert (profile.model, profile.stream, profile.max_output_tokens) == ("m", True, 3)
    assert (profile.cache_salt, profile.body_bytes) == ("s", len(body))


@pytest.mark.parametrize("given", ["Hi", ["Hi"], [{"type": "message", "content": "Hi"}]])
def test_text_is_the_users(given: Any) -> None:
    assert prompt(given).messages == [{"role": "user", "content": "Hi"}]


def test_missing_input_is_an_empty_message() -> None:
    assert prompt(None).messages == [{"role": "user", "content": ""}]
    assert prompt([]).messages == []


def test_instructions_are_the_system_message() -> None:
    assert prompt("Hi", instructions="Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_tool_round_becomes_call_and_result() -> None:
    """BP1: null content with tool calls, then the tool's own message."""
    call = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "42"}
    function = {"name": "get", "arguments": "{}"}
    assert prompt([call, output]).messages == [
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]  # fmt: skip


def test_images_are_counted() -> None:
    """BP1: an image part has a charge of its own."""
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": "u"}]
    assert prompt([{"role": "user", "content": parts}]).media_parts == 1


def test_flat_function_tools_take_the_nested_form() -> None:
    tools = [{"type": "function", "name": "get", "parameters": {}}, {"type": "web_search"}]
    nested = [{"type": "function", "function": {"name": "get", "parameters": {}}}]
    assert prompt("Hi", tools=tools).tools == nested
    assert prompt("Hi", tools=tools[1:]).tools is None
    assert prompt("Hi", tools=None).tools is None


def test_a_stored_response_makes_the_prompt_unknown() -> None:
    body = json.dumps({"model": "sim", "input": "Hi", "previous_response_id": "r"}).encode()
    assert responses_profile(body).prompts == (UnknownPrompt(len(body)),)


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt(5)
    assert caught.value.param == "input"
