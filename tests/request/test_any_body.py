"""BP1, BP3: from any JSON whatever to a size, or to a refusal that is the caller's to mend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.errors import BadRequest
from extproc.policy import RequestPolicy
from extproc.request.profile import RequestProfile
from extproc.request.reader import read_request
from tests.support.builders import keyed, keyer, model_keyer

PATHS = ("chat/completions", "completions", "embeddings", "responses", "messages")
WORDS = st.sampled_from(
    ["role", "user", "assistant", "tool", "content", "text", "type", "image_url", "tool_calls",
     "function", "arguments", "name", "input", "tool_use", "tool_result", "function_call",
     "function_call_output", "output", "refusal", "thinking", "{", "[1]", "", "\ud800"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats(allow_nan=True) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(WORDS, VALUES, max_size=5), max_size=4)
BODIES = st.fixed_dictionaries(
    {"messages": OBJECTS},
    optional={
        "prompt": VALUES,
        "input": OBJECTS | VALUES,
        "system": OBJECTS | WORDS,
        "tools": OBJECTS,
        "documents": OBJECTS,
        "instructions": WORDS,
        "continue_final_message": st.booleans(),
        "chat_template": WORDS,
        "chat_template_kwargs": st.dictionaries(WORDS, VALUES, max_size=3),
    },
)


def read(path: str, body: dict[str, Any]) -> RequestProfile | None:
    raw = json.dumps({"model": "sim", **body}).encode()
    try:
        return read_request({":path": f"/v1/{path}"}, raw, RequestPolicy())
    except BadRequest:
        return None


@settings(max_examples=60)
@given(path=st.sampled_from(PATHS), body=BODIES)
def test_any_json_gets_a_size_or_a_bad_request(
    model_dir: Path, path: str, body: dict[str, Any]
) -> None:
    profile = read(path, body)
    if profile is not None:
        for maker in (model_keyer(model_dir), keyer()):
            sizes = [each.tokens for each in keyed(maker, profile)]
            assert len(sizes) == len(profile.prompts)
            assert all(size >= 0 for size in sizes)


@pytest.mark.parametrize("path", ["chat/completions", "embeddings", "responses", "messages"])
@pytest.mark.parametrize("kind", [[], {}, 5, None, True])
def test_a_part_of_an_odd_type_is_media(path: str, kind: Any) -> None:
    """BP1: what cannot be read is charged, never an error of ours."""
    message = {"role": "user", "content": [{"type": kind, "text": "a"}]}
    body = {"input" if path == "responses" else "messages": [message]}
    profile = read(path, body)
    assert profile is not None
    (keys,) = keyed(keyer(media_part_tokens=500), profile)
    assert keys.tokens >= 500
