from __future__ import annotations

import copy
from typing import Any

import pytest

from extproc.tokens.messages import MEDIA_MARK, count_media_parts, normalise_messages
from extproc.tokens.template import ContentFormat

IMAGE = {"type": "image_url", "image_url": {"url": "u"}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def normal(message: dict[str, Any], content_format: ContentFormat = "string") -> dict[str, Any]:
    (found,) = normalise_messages([message], content_format)
    return found


def content(given: Any, content_format: ContentFormat = "string") -> Any:
    return normal({"role": "user", "content": given}, content_format)["content"]


class TestContent:
    """BP1: every shape of content has a normal form for both kinds of template."""

    @pytest.mark.parametrize(
        ("given", "as_text", "as_parts"),
        [
            ("a", "a", [text("a")]),
            ("", "", []),
            (None, "", []),
            ([], "", []),
            ([text("a"), text("b")], "a\nb", [text("a"), text("b")]),
            (["a", {"text": "b"}], "a\nb", [text("a"), text("b")]),
            ([{"type": "refusal", "refusal": "no"}], "no", [text("no")]),
            ([{"type": "thinking", "thinking": "hm"}], "hm", [text("hm")]),
            ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb",
             [text("a"), text("b")]),
            ([{"type": "text"}, {"type": "text", "text": 5}], "\n", [text(""), text("")]),
            ([text("a"), IMAGE], MEDIA_MARK + "\na", [text(MEDIA_MARK), text("a")]),
            ([IMAGE, 7], MEDIA_MARK, [text(MEDIA_MARK)]),
        ],
    )  # fmt: skip
    def test_it_becomes_text_or_parts(self, given: Any, as_text: str, as_parts: Any) -> None:
        assert content(given, "string") == as_text
        assert content(given, "openai") == as_parts

    def test_missing_content_is_empty(self) -> None:
        assert normal({"role": "assistant"}) == {"role": "assistant", "content": ""}

    def test_parts_that_are_not_text_are_counted(self) -> None:
        messages = [{"content": [text("a"), IMAGE, None]}, {"content": "text"}, {}]
        assert count_media_parts(messages) == 2


class TestFields:
    def test_what_templates_read_is_kept_and_the_rest_dropped(self) -> None:
        kept = {"name": "n", "tool_call_id": "t", "reasoning": "r", "reasoning_content": "rc"}
        message = {"role": "tool", "content": "c", **kept, "refusal": "x", "audio": None}
        assert normal(message) == {"role": "tool", "content": "c", **kept}

    def test_null_fields_are_absent(self) -> None:
        message = {"role": "user", "content": "c", "name": None}
        assert normal(message) == {"role": "user", "content": "c"}

    def test_the_callers_messages_stay_as_they_were(self) -> None:
        calls = [{"function": {"name": "f", "arguments": "{}"}}]
        messages = [{"role": "assistant", "content": [text("a")], "tool_calls": calls}]
        before = copy.deepcopy(messages)
        normalise_messages(messages, "openai")[0]["tool_calls"][0]["function"]["name"] = "g"
        assert messages == before


class TestToolCalls:
    @pytest.mark.parametrize(
        ("arguments", "decoded"),
        [
            ('{"a": [1]}', {"a": [1]}),
            ("", {}),
            (None, {}),
            ({"a": 1}, {"a": 1}),
            ("not json", "not json"),
            ("{", "{"),
            ("[" * 100_000, "[" * 100_000),
        ],
    )
    def test_arguments_are_decoded_where_they_can_be(self, arguments: Any, decoded: Any) -> None:
        """BP3: never a 500, also for nesting that Python's reader gives up on."""
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call]}
        assert normal(message)["tool_calls"] == [
            {"id": "1", "function": {"name": "f", "arguments": decoded}}
        ]

    @pytest.mark.parametrize("call", ["odd", {"id": "1"}, {"function": None}])
    def test_a_call_of_another_shape_stays_as_it_is(self, call: Any) -> None:
        assert normal({"role": "assistant", "tool_calls": [call]})["tool_calls"] == [call]

    def test_only_an_assistant_calls_tools(self) -> None:
        assert "tool_calls" not in normal({"role": "user", "tool_calls": []})
        assert "tool_calls" not in normal({"role": "assistant", "tool_calls": None})
