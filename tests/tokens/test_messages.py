from __future__ import annotations

import copy
from typing import Any

import pytest

from extproc.tokens.messages import (
    BILLING_HEADER,
    MEDIA_MARK,
    count_media_parts,
    normalise_messages,
    normalise_tools,
)
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
            ("", "", [text("")]),
            (None, "", []),
            ([], "", []),
            (7, "", []),
            ([text(""), text("a"), text("")], "a", [text(""), text("a"), text("")]),
            ([text("a"), text("b")], "a\nb", [text("a"), text("b")]),
            (["a", {"text": "b"}], "a\nb", [text("a"), text("b")]),
            ([{"type": "refusal", "refusal": "no"}], "no", [text("no")]),
            ([{"type": "thinking", "thinking": "hm"}], "hm", [text("hm")]),
            ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb",
             [text("a"), text("b")]),
            ([{"type": "text"}, {"type": "text", "text": 5}], "", [text(""), text("")]),
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


class TestRoles:
    def test_a_tools_text_is_text_for_every_template(self) -> None:
        parts = {"role": "tool", "content": [text("a"), text(""), text("b")]}
        assert normal(parts, "openai")["content"] == "a\n\nb"
        assert normal({"role": "tool", "content": "a"}, "openai")["content"] == "a"
        assert normal({"role": "tool"}, "openai")["content"] == ""
        image = {"role": "tool", "content": [text("a"), IMAGE]}
        assert normal(image, "openai")["content"] == [text(MEDIA_MARK), text("a")]

    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            (f"{BILLING_HEADER}: cch=1", ""),
            (f"{BILLING_HEADER}: cch=1\nYou are brief.", "You are brief."),
            ([text(f"{BILLING_HEADER}: 1"), text("a"), {"type": "text", "text": None}], "a"),
            ([f"{BILLING_HEADER}: 1\nb", text("a")], "b\na"),
            ([IMAGE, text("a")], MEDIA_MARK + "\na"),
            ("You are brief.", "You are brief."),
            (None, ""),
        ],
    )
    def test_a_systems_line_that_differs_in_every_request_is_left_out(
        self, given: Any, kept: str
    ) -> None:
        assert normal({"role": "system", "content": given})["content"] == kept

    def test_developers_speak_as_the_system_where_the_template_knows_none(self) -> None:
        messages = [
            {"role": "user", "content": "q"},
            {"role": "developer", "content": "d", "tools": [{"type": "function"}]},
            {"role": "system", "content": [text("s"), text("t")]},
            {"role": "developer", "content": ""},
        ]
        for content_format in ("string", "openai"):
            merged, user = normalise_messages(
                messages,
                content_format,
                takes_developer=False,  # type: ignore[arg-type]
            )
            assert merged == {"role": "system", "content": "d\n\ns\nt"}
            assert user["role"] == "user"
        assert normalise_messages(messages, "string")[1] == messages[1]

    def test_a_single_developer_at_the_start_stays_there(self) -> None:
        messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}]
        expected = [{"role": "system", "content": "d"}, messages[1]]
        assert normalise_messages(messages, "string", takes_developer=False) == expected
        assert normalise_messages(messages[1:], "string", takes_developer=False) == messages[1:]


class TestTools:
    def test_they_have_the_engines_fields_in_the_engines_order(self) -> None:
        function = {"strict": True, "x": 1, "parameters": {"b": 1, "a": 2}, "name": "f"}
        tools = [{"function": function, "type": "function", "y": 2}]
        (tool,) = normalise_tools(tools) or ()
        assert next(iter(tool.items())) == ("type", "function")
        assert list(tool["function"].items()) == [
            ("name", "f"),
            ("description", None),
            ("parameters", {"b": 1, "a": 2}),
            ("strict", True),
        ]
        assert "strict" not in (normalise_tools([{"function": {"strict": None}}]) or ())[0]

    def test_deferred_loading_is_told_twice(self) -> None:
        (tool,) = normalise_tools([{"function": {"name": "f"}, "defer_loading": True}]) or ()
        assert tool["defer_loading"] is tool["function"]["defer_loading"] is True

    def test_none_and_odd_ones_stay(self) -> None:
        assert normalise_tools(None) is None
        assert normalise_tools([]) == []
        assert normalise_tools([{"function": "odd"}]) == [{"function": "odd"}]


class TestFields:
    def test_what_templates_read_is_kept_and_the_rest_dropped(self) -> None:
        more = {"name": "n", "tool_call_id": "t", "refusal": "x", "audio": None}
        message = {"role": "tool", "content": "c", **more}
        assert normal(message) == {
            "role": "tool", "content": "c", "name": "n", "tool_call_id": "t"
        }  # fmt: skip
        assert normal({**message, "role": "user"}) == {"role": "user", "content": "c", "name": "n"}

    @pytest.mark.parametrize(
        "given",
        [
            {"reasoning": "r", "reasoning_content": "x"},
            {"reasoning_content": "r"},
            {"reasoning": "r"},
        ],
    )
    def test_an_assistants_reasoning_has_both_names(self, given: dict[str, str]) -> None:
        found = normal({"role": "assistant", "content": "c", **given})
        assert (found["reasoning"], found["reasoning_content"]) == ("r", "r")
        assert "reasoning" not in normal({"role": "user", "content": "c", **given})

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
            ("not json", {}),
            ("{", {}),
            ("[1]", {}),
            ([1], {}),
            ("[" * 100_000, {}),
        ],
    )
    def test_arguments_become_an_object(self, arguments: Any, decoded: Any) -> None:
        """BP3: never a 500, also for nesting that Python's reader gives up on."""
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call]}
        assert normal(message)["tool_calls"] == [
            {"id": "1", "function": {"name": "f", "arguments": decoded}}
        ]

    def test_a_call_has_the_engines_fields_in_the_engines_order(self) -> None:
        function = {"name": "f", "arguments": "{}", "x": 1}
        call = {"type": "function", "y": 2, "function": function, "id": "1"}
        (found,) = normal({"role": "assistant", "tool_calls": [call]})["tool_calls"]
        assert list(found) == ["id", "function", "type"]
        assert list(found["function"]) == ["arguments", "name"]

    @pytest.mark.parametrize("call", ["odd", {"id": "1"}, {"function": None}])
    def test_a_call_of_another_shape_stays_as_it_is(self, call: Any) -> None:
        assert normal({"role": "assistant", "tool_calls": [call]})["tool_calls"] == [call]

    def test_only_an_assistant_calls_tools(self) -> None:
        assert "tool_calls" not in normal({"role": "user", "tool_calls": []})
        assert "tool_calls" not in normal({"role": "assistant", "tool_calls": None})
        assert "tool_calls" not in normal({"role": "assistant", "tool_calls": []})
