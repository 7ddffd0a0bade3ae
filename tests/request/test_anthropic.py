from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.errors import InvalidRequest
from extproc.request.anthropic import messages_profile
from extproc.request.profile import ChatPrompt, Endpoint

USER = {"role": "user", "content": "Hi"}


def prompt(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    body = {"model": "claude", "messages": list(messages), **fields}
    (found,) = messages_profile(json.dumps(body).encode()).prompts
    assert isinstance(found, ChatPrompt)
    return found


def test_the_plain_fields_are_read() -> None:
    fields = {"model": "m", "messages": [USER], "max_tokens": 9, "stream": True, "cache_salt": "s"}
    body = json.dumps(fields).encode()
    profile = messages_profile(body)
    assert profile.endpoint is Endpoint.MESSAGES
    assert (profile.model, profile.max_output_tokens) == ("m", 9)
    assert (profile.stream, profile.cache_salt, profile.body_bytes) == (True, "s", len(body))
    assert profile.prompts == (ChatPrompt([USER]),)


@pytest.mark.parametrize(
    "system",
    ["Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}, {}]],
)
def test_the_system_text_is_the_first_message(system: Any) -> None:
    assert prompt(USER, system=system).messages == [
        {"role": "system", "content": "Be brief."},
        USER,
    ]


def test_a_system_block_that_differs_in_every_request_is_left_out_as_the_engine_does() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    said = prompt(USER, system=[billing, {"type": "text", "text": "Be brief."}]).messages
    assert said == [{"role": "system", "content": "Be brief."}, USER]
    assert prompt(USER, system=[billing]).messages == [USER]


@pytest.mark.parametrize("system", [None, "", []])
def test_without_system_text_there_is_no_system_message(system: Any) -> None:
    assert prompt(USER, system=system).messages == [USER]


def test_text_blocks_stay_parts() -> None:
    blocks = [{"type": "text", "text": "a"}, "b"]
    assert prompt({"role": "user", "content": blocks}).messages == [
        {"role": "user", "content": blocks}
    ]


def test_a_tool_use_becomes_a_tool_call() -> None:
    """BP1: tool input is part of the prompt, as the JSON text that the engine makes."""
    use = {"type": "tool_use", "id": "t1", "name": "get", "input": {"q": 1}}
    call = {"id": "t1", "type": "function", "function": {"name": "get", "arguments": '{"q": 1}'}}
    text = {"type": "text", "text": "Let me see."}
    assert prompt({"role": "assistant", "content": [text, use]}).messages == [
        {"role": "assistant", "content": [text], "tool_calls": [call]}
    ]


def test_a_tool_use_alone_has_no_content_and_may_lack_input() -> None:
    (message,) = prompt({"role": "assistant", "content": [{"type": "tool_use"}]}).messages
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("42", "42"),
        (None, None),
        ([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "4\n2"),
        ([{"type": "image"}, "odd", {"text": 5}], "\n\n"),
    ],
)
def test_tool_results_come_before_the_message_that_brings_them(content: Any, text: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    said = {"type": "text", "text": "So?"}
    assert prompt({"role": "user", "content": [said, result]}).messages == [
        {"role": "tool", "tool_call_id": "t1", "content": text},
        {"role": "user", "content": [said]},
    ]


def test_a_message_of_results_alone_leaves_nothing_behind() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
    (message,) = prompt({"role": "user", "content": [result]}).messages
    assert message["role"] == "tool"


def test_tools_take_the_nested_form() -> None:
    schema = {"type": "object"}
    tool = {"name": "get", "description": "Gets.", "input_schema": schema}
    function = {"name": "get", "description": "Gets.", "parameters": schema}
    assert prompt(USER, tools=[tool]).tools == [{"type": "function", "function": function}]
    assert prompt(USER, tools=[]).tools is None


def test_images_are_counted() -> None:
    """BP1: an image block has a charge of its own."""
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    assert prompt({"role": "user", "content": [image, image]}).media_parts == 2


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt(USER, system=5)
    assert caught.value.param == "system"
