from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import InvalidJson, InvalidRequest, Refusal
from extproc.policy import RequestPolicy
from extproc.replies import error_body
from extproc.request.openai import (
    ChatBody,
    chat_profile,
    completion_profile,
    decode,
    embedding_profile,
)
from extproc.request.profile import (
    ChatPrompt,
    Endpoint,
    RequestProfile,
    TextPrompt,
    TokenPrompt,
    UnknownPrompt,
)
from extproc.request.reader import read_request

CANARY = "SECRET-CANARY-123"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "sim", **fields}).encode()


def chat(**fields: Any) -> RequestProfile:
    return chat_profile(body(**{"messages": [{"role": "user", "content": "Hi"}], **fields}))


def chat_prompt(**fields: Any) -> ChatPrompt:
    (prompt,) = chat(**fields).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def completion(**fields: Any) -> RequestProfile:
    return completion_profile(body(**fields))


class TestChat:
    def test_a_bare_chat_has_the_api_defaults(self) -> None:
        profile = chat()
        assert profile.endpoint is Endpoint.CHAT
        assert (profile.model, profile.stream, profile.max_output_tokens) == ("sim", False, None)
        assert (profile.cache_salt, profile.counted) == ("", True)
        assert profile.body_bytes == len(body(messages=[{"role": "user", "content": "Hi"}]))
        assert profile.prompts == (ChatPrompt([{"role": "user", "content": "Hi"}]),)

    def test_fields_that_change_the_prompt_are_kept(self) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        prompt = chat_prompt(
            tools=tools,
            documents=[{"title": "t"}],
            add_generation_prompt=False,
            continue_final_message=True,
            chat_template_kwargs={"enable_thinking": False},
        )
        assert (prompt.tools, prompt.documents) == (tools, [{"title": "t"}])
        assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
        assert prompt.template_kwargs == {"enable_thinking": False}

    def test_null_means_the_default(self) -> None:
        names = (
            "tools", "documents", "add_generation_prompt", "continue_final_message",
            "chat_template_kwargs", "chat_template", "stream", "cache_salt", "max_tokens",
        )  # fmt: skip
        assert chat(**dict.fromkeys(names)).prompts == chat().prompts
        assert (chat(stream=None).stream, chat(cache_salt=None).cache_salt) == (False, "")

    def test_forbidden_tools_are_in_the_prompt_all_the_same(self) -> None:
        """vLLM leaves them there unless it is told otherwise by a flag."""
        tools = [{"type": "function", "function": {"name": "f"}}]
        for choice in ("none", "auto", {"type": "function"}):
            assert chat_prompt(tools=tools, tool_choice=choice).tools == tools

    def test_reasoning_effort_is_a_template_argument_and_asks_for_thinking(self) -> None:
        assert chat_prompt(reasoning_effort="low").template_kwargs == {
            "reasoning_effort": "low",
            "enable_thinking": True,
        }
        given = {"enable_thinking": True, "reasoning_effort": "high"}
        prompt = chat_prompt(reasoning_effort="none", chat_template_kwargs=given)
        assert prompt.template_kwargs == {"reasoning_effort": "none", "enable_thinking": True}
        assert chat_prompt(reasoning_effort="none").template_kwargs["enable_thinking"] is False

    @pytest.mark.parametrize(
        ("fields", "limit"),
        [
            ({"max_tokens": 5}, 5),
            ({"max_completion_tokens": 7}, 7),
            ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
            ({"max_tokens": 5, "max_completion_tokens": 0}, 0),
        ],
    )
    def test_the_newer_output_limit_wins(self, fields: dict[str, int], limit: int) -> None:
        assert chat(**fields).max_output_tokens == limit

    def test_a_template_of_the_callers_own_makes_the_prompt_unknown(self) -> None:
        messages = [{"role": "user", "content": "12345678"}, {"role": "user"}, {"content": None}]
        assert chat(messages=messages, chat_template="{{ x }}").prompts == (UnknownPrompt(8),)

    def test_stream_and_salt_are_read(self) -> None:
        profile = chat(stream=True, cache_salt="s1")
        assert (profile.stream, profile.cache_salt) == (True, "s1")


class TestContentShapes:
    """BP1: every shape of content is accepted, and parts that are not text are counted."""

    @pytest.mark.parametrize(
        ("message", "media"),
        [
            ({"role": "user", "content": "text"}, 0),
            ({"role": "user", "content": [{"type": "text", "text": "a"}]}, 0),
            ({"role": "user", "content": ["a", {"text": "no type"}]}, 0),
            ({"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, 1),
            ({"role": "user", "content": [IMAGE, IMAGE]}, 2),
            ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, 1),
            ({"role": "user", "content": [17, None]}, 2),
            ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, 0),
            ({"role": "assistant", "tool_calls": [{"id": "1"}]}, 0),
            ({"role": "tool", "content": "42", "tool_call_id": "1"}, 0),
            ({"role": "developer", "content": "Be brief."}, 0),
            ({"role": "user", "content": {"odd": 1}}, 0),
        ],
    )
    def test_it_becomes_a_chat_prompt(self, message: dict[str, Any], media: int) -> None:
        prompt = chat_prompt(messages=[message])
        assert prompt.messages == [message]
        assert prompt.media_parts == media


class TestCompletions:
    @pytest.mark.parametrize(
        ("given", "prompts"),
        [
            ("text", (TextPrompt("text"),)),
            ("", (TextPrompt(""),)),
            (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
            ([1, 2, 3], (TokenPrompt([1, 2, 3]),)),
            ([[1, 2], [3]], (TokenPrompt([1, 2]), TokenPrompt([3]))),
            (["a", [1]], (TextPrompt("a"), TokenPrompt([1]))),
            ([], ()),
            (None, ()),
        ],
    )
    def test_a_prompt_has_four_shapes(self, given: Any, prompts: tuple[Any, ...]) -> None:
        profile = completion(prompt=given)
        assert profile.endpoint is Endpoint.COMPLETIONS
        assert profile.prompts == prompts

    @pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [[1], 1]])
    def test_token_ids_among_other_items_are_refused(self, prompt: list[Any]) -> None:
        with pytest.raises(InvalidRequest, match="'prompt' mixes token ids") as caught:
            completion(prompt=prompt)
        assert caught.value.param == "prompt"

    def test_special_tokens_are_added_unless_declined(self) -> None:
        assert completion(prompt="a", add_special_tokens=False).prompts == (TextPrompt("a", False),)
        assert completion(prompt="a", add_special_tokens=None).prompts == (TextPrompt("a", True),)

    def test_output_is_limited_to_sixteen_tokens_unless_said(self) -> None:
        """The API's own default."""
        assert completion(prompt="a").max_output_tokens == 16
        assert completion(prompt="a", max_tokens=0).max_output_tokens == 0

    def test_stream_salt_and_size_are_read(self) -> None:
        profile = completion(prompt="a", stream=True, cache_salt="s")
        assert (profile.stream, profile.cache_salt) == (True, "s")
        assert profile.body_bytes == len(body(prompt="a", stream=True, cache_salt="s"))


class TestEmbeddings:
    @pytest.mark.parametrize(
        ("given", "prompts"),
        [("a", (TextPrompt("a"),)), ([1, 2], (TokenPrompt([1, 2]),)), (None, ())],
    )
    def test_input_has_the_shapes_of_a_prompt(self, given: Any, prompts: tuple[Any, ...]) -> None:
        profile = embedding_profile(body(input=given, cache_salt="s"))
        assert profile.endpoint is Endpoint.EMBEDDINGS
        assert (profile.prompts, profile.max_output_tokens) == (prompts, 0)
        assert (profile.cache_salt, profile.stream) == ("s", False)
        assert profile.body_bytes == len(body(input=given, cache_salt="s"))

    def test_messages_become_a_chat_without_a_turn_to_generate(self) -> None:
        messages = [{"role": "user", "content": [IMAGE]}]
        profile = embedding_profile(body(messages=messages))
        expected = ChatPrompt(messages, add_generation_prompt=False, media_parts=1)
        assert profile.prompts == (expected,)

    def test_mixed_input_is_refused_by_its_name(self) -> None:
        with pytest.raises(InvalidRequest, match="'input' mixes") as caught:
            embedding_profile(body(input=["a", 1]))
        assert caught.value.param == "input"

    def test_special_tokens_can_be_declined(self) -> None:
        profile = embedding_profile(body(input="a", add_special_tokens=False))
        assert profile.prompts == (TextPrompt("a", False),)


class TestDecode:
    @pytest.mark.parametrize(
        "raw",
        [b"", b"{", b"nothing", b'{"a": 1,}', b'{"model": "\xff"}',
         b'{"tool_choice": ' + b"[" * 200_000],
    )  # fmt: skip
    def test_what_is_not_json_is_refused(self, raw: bytes) -> None:
        with pytest.raises(InvalidJson) as caught:
            decode(raw, ChatBody)
        assert caught.value.message == "The request body is not valid JSON."

    @pytest.mark.parametrize(
        ("raw", "param"),
        [
            (b"[]", None),
            (b'{"model": 5}', "model"),
            (b'{"messages": {}}', "messages"),
            (b'{"messages": [{}, 1]}', "messages[1]"),
            (b'{"messages": [], "top_p": NaN, "tools": 5}', "tools"),
        ],
    )
    def test_the_wrong_shape_is_refused_by_its_path(self, raw: bytes, param: str | None) -> None:
        with pytest.raises(InvalidRequest, match="wrong shape") as caught:
            decode(raw, ChatBody)
        assert caught.value.param == param

    @pytest.mark.parametrize("extra", [b"NaN", b"-Infinity", b'"\\ud800"'])
    def test_what_engines_accept_beyond_json_is_accepted(self, extra: bytes) -> None:
        chat = decode(b'{"model": "sim", "x": ' + extra + b"}", ChatBody)
        assert chat.model == "sim"

    def test_lone_surrogates_in_messages_are_kept(self) -> None:
        raw = b'{"messages": [{"role": "user", "content": "a\\ud800"}]}'
        assert decode(raw, ChatBody).messages[0]["content"] == "a\ud800"

    def test_unknown_fields_are_skipped(self) -> None:
        assert decode(b'{"model": "sim", "new": {"deep": [1]}}', ChatBody).model == "sim"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(CANARY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just(CANARY), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "input", "tools", "stream", "cache_salt", "max_tokens",
     "chat_template_kwargs", "documents"]
)  # fmt: skip


@given(fields=st.dictionaries(FIELDS, JSON), cut=st.integers(0, 40))
def test_no_refusal_quotes_the_request(fields: dict[str, Any], cut: int) -> None:
    """SE3: a canary anywhere in a wrong body is in no message and no error body."""
    raw = json.dumps(fields).encode()
    refusals: list[Refusal] = []
    for path in ("chat/completions", "completions", "embeddings", "responses", "messages"):
        try:
            read_request({":path": f"/v1/{path}"}, raw[: len(raw) - cut], RequestPolicy())
        except Refusal as refusal:
            refusals.append(refusal)
    assert refusals or not cut
    for refusal in refusals:
        assert b"CANARY" not in f"{refusal} {refusal.param}".encode() + error_body(refusal)
