from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from workers.simulator.errors import ApiError
from workers.simulator.model import SPECIAL_TOKENS, VOCAB_SIZE, make_model_dir
from workers.simulator.prompt import Prompter, SegmentPrompter, anthropic_to_chat, responses_to_chat
from workers.simulator.speaker import Speaker

from .client import Json


@pytest.fixture(scope="module")
def prompter(model_dir: Path) -> Prompter:
    return Prompter(model_dir)


@pytest.fixture(scope="module")
def segment_prompter(model_dir: Path) -> SegmentPrompter:
    return SegmentPrompter(model_dir)


@pytest.fixture(scope="module")
def speaker(prompter: Prompter) -> Speaker:
    return Speaker(prompter.tokenizer)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text()), min_size=1))
def test_tokenising_by_segment_gives_the_same_ids(
    prompter: Prompter, segment_prompter: SegmentPrompter, turns: list[tuple[str, str]]
) -> None:
    body = {"messages": [{"role": role, "content": content} for role, content in turns]}
    for _ in range(2):
        assert segment_prompter.chat(body) == prompter.chat(body)
    for _, text in turns:
        assert segment_prompter.text(text) == prompter.text(text)


def test_a_complete_model_directory_is_left_alone(model_dir: Path) -> None:
    before = os.stat(model_dir / "tokenizer.json").st_mtime_ns
    assert make_model_dir(model_dir) == model_dir
    assert os.stat(model_dir / "tokenizer.json").st_mtime_ns == before
    assert not list(model_dir.parent.glob(".*"))


def test_an_incomplete_model_directory_is_made_anew(tmp_path: Path, model_dir: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "tokenizer.json").write_text("{")
    make_model_dir(half)
    made = (half / "tokenizer.json").read_bytes()
    assert made == (model_dir / "tokenizer.json").read_bytes()


def test_the_tokenizer_has_its_special_tokens(prompter: Prompter) -> None:
    assert prompter.tokenizer.get_vocab_size() == VOCAB_SIZE
    for token in SPECIAL_TOKENS:
        assert len(prompter.text(token)) == 1


def test_a_chat_is_rendered_with_tools_and_calls(prompter: Prompter) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "two"},
    ]
    body = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    text = prompter.tokenizer.decode(prompter.chat(body), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief\n\n")
    function = '{"name": "f", "description": null, "parameters": null}'
    assert f'{{"type": "function", "function": {function}}}\n' in text
    assert text.endswith(
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n\n"
        '<call>{"name": "f", "arguments": {"a": 1}}</call><|im_end|>\n'
        "<|im_start|>tool\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


@given(prompt=st.binary(max_size=8), tokens=st.integers(1, 200), choice=st.integers(0, 3),
       opens=st.booleans())  # fmt: skip
def test_an_answer_cut_anywhere_tokenises_to_its_own_ids(
    prompter: Prompter, speaker: Speaker, prompt: bytes, tokens: int, choice: int, opens: bool
) -> None:
    answer = speaker.answer(prompt, tokens, choice, opens)
    text = answer.text(0, tokens)
    assert prompter.text(text) == answer.token_ids
    assert opens == (not text.startswith(" "))
    turn = "<|im_start|>assistant\n"
    around = prompter.text(f"{turn}{text}<|im_end|>\n")
    assert around == prompter.text(turn) + answer.token_ids + prompter.text("<|im_end|>\n")


def test_a_tokenizer_without_english_words_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"x": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(ValueError, match="too few English words"):
        Speaker(tokenizer)


def test_responses_bodies_become_chats() -> None:
    assert responses_to_chat({"input": "hi", "instructions": "short"})["messages"] == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "hi"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ]
    chat = responses_to_chat({"input": items, "tools": [{"type": "function", "name": "f"}]})
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool"]
    assert chat["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert chat["tools"] == [{"type": "function", "function": {"name": "f"}}]


def test_anthropic_bodies_become_chats() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "1",
              "content": [{"type": "text", "text": "done"}]}  # fmt: skip
    body: Json = {
        "system": [{"type": "text", "text": "short"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }
    chat = anthropic_to_chat(body)
    roles = [message["role"] for message in chat["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    assert chat["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert chat["messages"][3] == {"role": "tool", "tool_call_id": "1", "content": "done"}
    assert chat["tools"][0]["function"]["parameters"] == {"type": "object"}


@pytest.mark.parametrize("prompt", [None, [], [1, "a"], [[]], [True], {"a": 1}, [1, 99_999]])
def test_prompts_of_a_wrong_shape_are_refused(prompter: Prompter, prompt: object) -> None:
    with pytest.raises(ApiError):
        prompter.completions(prompt)


@pytest.mark.parametrize("messages", [None, "hi", ["hi"], [{"content": "no role"}]])
def test_messages_of_a_wrong_shape_are_refused(prompter: Prompter, messages: object) -> None:
    with pytest.raises(ApiError):
        prompter.chat({"messages": messages})
    with pytest.raises(ApiError):
        anthropic_to_chat({"messages": messages})
