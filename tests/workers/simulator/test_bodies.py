from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from workers.simulator.dialects import ChatDialect, CompletionsDialect, Dialect
from workers.simulator.embeddings import EmbeddingsDialect
from workers.simulator.errors import ApiError
from workers.simulator.options import decode_body, read_options
from workers.simulator.other_dialects import MessagesDialect, ResponsesDialect
from workers.simulator.prompt import Prompter

from .client import Json

DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(), CompletionsDialect(), EmbeddingsDialect(), MessagesDialect(),
    ResponsesDialect(),
)  # fmt: skip

junk = st.sampled_from((None, True, 0, -1, 7, 1.5, "", "word", "é😀", [], {}, [[]], [{}]))


def mostly(sound: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """What a client sends, now and then with junk in its place."""
    return st.integers(0, 9).flatmap(lambda roll: junk if roll == 9 else sound)


text = mostly(st.sampled_from(("hello", "two words", "")))
kinds = st.sampled_from(("text", "input_text", "tool_use", "tool_result", "image", "function_call"))
part = st.fixed_dictionaries(
    {}, optional={"type": mostly(kinds), "text": text, "input": mostly(st.just({"a": 1})),
                  "content": text, "id": text, "name": text}
)  # fmt: skip
content = mostly(text | st.lists(mostly(part), max_size=2))
function = st.fixed_dictionaries({}, optional={"name": text, "arguments": text})
call = st.fixed_dictionaries({}, optional={"function": mostly(function), "id": text})
message = st.fixed_dictionaries(
    {"role": mostly(st.sampled_from(("user", "assistant", "system", "tool")))},
    optional={"content": content, "type": mostly(kinds), "output": content, "name": text,
              "tool_calls": mostly(st.lists(mostly(call), max_size=2))},
)  # fmt: skip
messages = mostly(st.lists(mostly(message), min_size=1, max_size=3))
tool = st.fixed_dictionaries({}, optional={"type": mostly(st.just("function")), "name": text})
body = st.fixed_dictionaries(
    {
        "messages": messages,
        "input": text | messages,
        "prompt": text | mostly(st.lists(text | st.just([1, 2]), max_size=2)),
    },
    optional={
        "tools": mostly(st.lists(mostly(tool), max_size=2)),
        "system": content,
        "instructions": text,
        "chat_template_kwargs": mostly(st.just({"x": 1})),
        "continue_final_message": junk,
        "add_generation_prompt": junk,
        "documents": junk,
        "stream_options": junk,
        "model": junk,
        "n": junk,
    },
)


@pytest.fixture(scope="module")
def prompter(model_dir: Path) -> Prompter:
    return Prompter(model_dir)


@settings(max_examples=200)
@given(dialect=st.sampled_from(DIALECTS), given_body=body)
def test_every_body_is_understood_or_refused(
    prompter: Prompter, dialect: Dialect, given_body: Json
) -> None:
    try:
        prompts = dialect.prompts(prompter, given_body)
        event(f"{type(dialect).__name__}: understood")
        read_options(given_body)
    except ApiError:
        event(f"{type(dialect).__name__}: refused")
    else:
        assert all(type(token) is int for ids in prompts for token in ids)


def test_a_lone_surrogate_is_bad_json() -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        decode_body(b'{"prompt": "a\\ud800b"}')
