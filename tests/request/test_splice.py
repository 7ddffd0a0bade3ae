from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import InvalidJson, InvalidRequest
from extproc.request.splice import MAX_MEMBERS, edit_top_level

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(["model", "max_tokens", "cache_salt", "n", "é", '"', "\\", ""])
SPACES = st.text(" \t\n\r", max_size=2)
CHANGES = st.dictionaries(NAMES, st.none() | VALUES, max_size=4)


def spelled(name: str, how: int) -> str:
    """A key as JSON, one of three ways."""
    if how == 2:
        return '"' + "".join(f"\\u{ord(char):04x}" for char in name) + '"'
    return json.dumps(name, ensure_ascii=how == 1)


@st.composite
def chunks(draw: st.DrawFn) -> tuple[str, str]:
    """A member's name, and its text with spaces anywhere."""
    name, value = draw(NAMES), draw(VALUES)
    key = spelled(name, draw(st.integers(0, 2)))
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    return name, draw(SPACES) + key + draw(SPACES) + ":" + draw(SPACES) + text + draw(SPACES)


MEMBERS = st.lists(chunks(), max_size=8)
MARKS = st.sampled_from([b"", b"\xef\xbb\xbf"])


def body_of(members: list[tuple[str, str]], mark: bytes = b"", around: str = "") -> bytes:
    text = around + "{" + ",".join(text for _, text in members) + "}" + around
    return mark + text.encode()


def encoded(changes: dict[str, Any]) -> dict[str, bytes | None]:
    return {
        name: None if value is None else json.dumps(value).encode()
        for name, value in changes.items()
    }


class TestAnyObject:
    @given(members=MEMBERS, changes=CHANGES, mark=MARKS, around=SPACES)
    def test_it_reads_as_the_object_updated(
        self, members: list[tuple[str, str]], changes: dict[str, Any], mark: bytes, around: str
    ) -> None:
        body = body_of(members, mark, around)
        wanted = json.loads(body)
        for name, value in changes.items():
            wanted.pop(name, None)
            if value is not None:
                wanted[name] = value
        assert json.loads(edit_top_level(body, encoded(changes))) == wanted

    @given(members=MEMBERS, changes=CHANGES, mark=MARKS, around=SPACES)
    def test_members_that_do_not_change_keep_every_byte_and_their_order(
        self, members: list[tuple[str, str]], changes: dict[str, Any], mark: bytes, around: str
    ) -> None:
        edited = edit_top_level(body_of(members, mark, around), encoded(changes))
        left = [text for name, text in members if name not in changes]
        rest = edited.decode("utf-8-sig").removeprefix(around + "{")
        for text in left:
            _, found, rest = rest.partition(text)
            assert found
        assert edited.startswith(mark + around.encode() + b"{")
        assert edited.endswith(b"}" + around.encode())

    @given(members=MEMBERS, changes=CHANGES, mark=MARKS)
    def test_no_reader_sees_another_value_whichever_of_two_keys_it_believes(
        self, members: list[tuple[str, str]], changes: dict[str, Any], mark: bytes
    ) -> None:
        edited = edit_top_level(body_of(members, mark), encoded(changes))
        pairs: list[tuple[str, Any]] = json.loads(edited, object_pairs_hook=list)
        for name, value in changes.items():
            seen = [given for key, given in pairs if key == name]
            text = json.dumps(value)
            assert seen == ([] if value is None else [json.loads(text, object_pairs_hook=list)])

    @given(members=MEMBERS, changes=CHANGES)
    def test_twice_is_as_once(
        self, members: list[tuple[str, str]], changes: dict[str, Any]
    ) -> None:
        once = edit_top_level(body_of(members), encoded(changes))
        assert edit_top_level(once, encoded(changes)) == once

    @given(members=MEMBERS, mark=MARKS, around=SPACES)
    def test_no_change_is_no_change(
        self, members: list[tuple[str, str]], mark: bytes, around: str
    ) -> None:
        body = body_of(members, mark, around)
        assert edit_top_level(body, {}) == body == edit_top_level(body, {"absent": None})


class TestExamples:
    @pytest.mark.parametrize(
        ("body", "edited"),
        [
            (b"{}", b'{"a":1}'),
            (b" { } ", b' {"a":1 } '),
            (b'{"b": 1.0e0}', b'{"a":1,"b": 1.0e0}'),
            (b'{"b":0,"a":2,"c":[{"a":3}]}', b'{"b":0,"a":1,"c":[{"a":3}]}'),
            (b'{"a":{"a":[2]} , "b":"}\\"{"}', b'{"a":1 , "b":"}\\"{"}'),
            (b'{"a" : 2,\n "b":0, "a":3}', b'{"a" : 1,\n "b":0}'),
            (b'{ "\\u0061" : 2, "a": 3 }', b'{ "a" : 1}'),
            (b'{"b":"a","c":"\\"a\\":2"}', b'{"a":1,"b":"a","c":"\\"a\\":2"}'),
        ],
    )
    def test_setting(self, body: bytes, edited: bytes) -> None:
        assert edit_top_level(body, {"a": b"1"}) == edited

    @pytest.mark.parametrize(
        ("body", "edited"),
        [
            (b'{"a":1}', b"{}"),
            (b'{"a":1, "b":2}', b'{ "b":2}'),
            (b'{"b":2, "a":1 }', b'{"b":2}'),
            (b'{"a":1,"b":2,"a":3}', b'{"b":2}'),
            (b'{"A":1}', b'{"A":1}'),
        ],
    )
    def test_removing(self, body: bytes, edited: bytes) -> None:
        assert edit_top_level(body, {"a": None}) == edited

    def test_new_members_go_first_in_the_order_given(self) -> None:
        assert edit_top_level(b'{"x":0}', {"b": b"1", "a": b'"\\n"'}) == b'{"b":1,"a":"\\n","x":0}'


class TestOddBodies:
    """What the engine's own reader takes is edited; what it does not is refused."""

    @pytest.mark.parametrize(
        "value",
        [
            "NaN",
            "-Infinity",
            "[Infinity, NaN]",
            '"\\ud800"',
            '"\\\\ud800 \\udc00\\ud800"',
            '"NaN 1Infinity"',
            '{"\\uDFff": NaN}',
            "12345678901234567890.5e-30",
            "1E400",
            '"\\ud83d\\ude42"',
        ],
    )
    def test_any_value_of_pythons_json_keeps_its_bytes(self, value: str) -> None:
        body = f'{{"x": {value}, "a": {value}, "NaN": {value}}}'
        wanted = f'{{"x": {value}, "a": 1, "NaN": {value}}}'
        json.loads(body)
        assert edit_top_level(body.encode(), {"a": b"1", "100": None}) == wanted.encode()

    def test_text_that_is_not_utf8_is_left_to_the_engine(self) -> None:
        assert edit_top_level(b'{"x":"\xff"}', {"x": b"1", "a": None}) == b'{"x":1}'
        assert edit_top_level(b'{"x":"\xff"}', {"a": b"1"}) == b'{"a":1,"x":"\xff"}'

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b'{"a"}', b'{"a":1,}', b'{"a":1}x', b'{"a":1}{}', b"{a:1}", b'{"a":01}',
         b'{"a":"\x01"}', b'{"a":NaNNaN}', b'{"a":1NaN}', b'{"a":-NaN}', b'{"a":1e-Infinity}',
         b'{"a":+Infinity}', b'{"a":.NaN}', b'{"\xff":1}', b"\xef\xbb\xbf",
         b"\xef\xbb\xbf\xef\xbb\xbf{}", b"--x\r\nmultipart", b"\x1f\x8b\x08"],
    )  # fmt: skip
    def test_no_json(self, body: bytes) -> None:
        with pytest.raises(InvalidJson):
            edit_top_level(body, {"a": b"1"})
        with pytest.raises(ValueError):  # noqa: PT011  either of two kinds, of Python's own
            json.loads(body)

    def test_another_encoding_than_utf8_is_not_edited(self) -> None:
        with pytest.raises(InvalidJson):
            edit_top_level('{"a":2}'.encode("utf-16"), {"a": b"1"})

    @pytest.mark.parametrize("body", [b"[]", b"5", b'"a"', b"null", b" [NaN] ", b"NaN", b"[{}]"])
    def test_json_and_no_object(self, body: bytes) -> None:
        with pytest.raises(InvalidRequest, match="must be a JSON object"):
            edit_top_level(body, {"a": b"1"})

    @pytest.mark.parametrize("value", [b"1", b"NaN"])
    def test_endless_nesting_is_refused(self, value: bytes) -> None:
        body = b'{"a":' + b"[" * 100_000 + value + b"]" * 100_000 + b"}"
        with pytest.raises(InvalidJson):
            edit_top_level(body, {"a": b"1"})

    def test_the_number_of_members_is_bounded(self) -> None:
        members = [b'"k%d":0' % number for number in range(MAX_MEMBERS)]
        assert edit_top_level(b"{" + b",".join(members) + b"}", {"k7": None}).count(b":") == 1_023
        with pytest.raises(InvalidRequest, match="1024 fields"):
            edit_top_level(b"{" + b",".join([*members, b'"k":0']) + b"}", {})

    @given(body=st.binary(max_size=30) | st.text('{}[]":,\\uNaN1 e-', max_size=12).map(str.encode))
    def test_of_any_bytes_objects_are_edited_and_the_rest_refused(self, body: bytes) -> None:
        outcome: bytes | Exception
        try:
            outcome = edit_top_level(body, {"a": b"1"})
        except (InvalidJson, InvalidRequest) as refusal:
            outcome = refusal
        try:
            read = json.loads(body.decode("utf-8-sig"))
        except UnicodeDecodeError:
            return
        except ValueError:
            read = None
        assert isinstance(outcome, bytes) is isinstance(read, dict)
        if isinstance(outcome, bytes):
            assert json.loads(outcome) == {**read, "a": 1}


def test_12_mb_cost_no_more_than_copying_them_a_few_times() -> None:
    """Busy machines are slow; char by char in Python it would be seconds."""
    message = {"role": "user", "content": 'if x:\n    "é"\t' * 1_000}
    body = json.dumps({"model": "m", "messages": [message] * 700}, ensure_ascii=False).encode()
    assert len(body) > 12_000_000
    began_s = time.process_time()
    edited = edit_top_level(body, {"max_tokens": b"16"})
    assert time.process_time() - began_s < 0.5
    assert edited == b'{"max_tokens":16,' + body[1:]
