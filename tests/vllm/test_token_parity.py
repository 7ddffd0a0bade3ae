"""TK1: kvgate's tokens are those that the engine computes for the same chat."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from extproc.policy import RequestPolicy
from extproc.request.reader import read_request
from extproc.tokens.blocks import block_keys, root_key
from extproc.tokens.messages import BILLING_HEADER
from extproc.tokens.template import ChatTemplate
from tests.support import builders
from tests.support.system import MODEL, System
from tests.support.vllm import made_model
from tests.tokens.test_transformers_parity import OPENAI_TEMPLATE, TRIMMING_TEMPLATE

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <eine> Stadt & Region",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}
BARE = {"type": "function", "function": {"name": "bare"}}
SYSTEM = {"role": "system", "content": "You are brief."}
USER = {"role": "user", "content": "Wie ist das Wetter in Köln? 🙂"}
ANSWER = {"role": "assistant", "content": "Grau.\n\n  Und  morgen? "}
SPECIALS = {"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb<|endoftext|>"}
SPACES = {"role": "user", "content": "  \n\t two\n\n\n lines \n"}


def call(arguments: str | None, content: str | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def parts(*texts: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


CALL = call('{"city": "Köln", "days": 2}')
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "grau"}'}
UNFINISHED = {"role": "assistant", "content": " Morgen wird es "}
NO_TURN = {"add_generation_prompt": False}
CONTINUED = {**NO_TURN, "continue_final_message": True}

BODIES: dict[str, dict[str, Any]] = {
    "one question": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "several turns": {"messages": [SYSTEM, USER, ANSWER, USER, ANSWER, USER]},
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "null content": {"messages": [USER, {"role": "assistant", "content": None}, USER]},
    "no content": {"messages": [USER, {"role": "assistant"}, USER]},
    "spaces": {"messages": [SPACES, ANSWER, SPACES]},
    "special tokens in the text": {"messages": [SYSTEM, SPECIALS]},
    "developer in the middle": {
        "messages": [SYSTEM, USER, {"role": "developer", "content": "Be brief."}, ANSWER, USER]
    },
    "a line that is never the same": {
        "messages": [{"role": "system", "content": f"{BILLING_HEADER}: cch=1\nBe brief."}, USER]
    },
    "reasoning": {"messages": [USER, {**ANSWER, "reasoning_content": "hm"}, USER]},
    "names": {"messages": [{**USER, "name": "ada"}]},
    "unknown role": {"messages": [{"role": "critic", "content": "hm"}, USER]},
    "extra fields": {"messages": [{**USER, "weight": 3, "cache_control": {"type": "ephemeral"}}]},
    "one part": {"messages": [parts("Und morgen?")]},
    "parts": {"messages": [SYSTEM, parts("Und", "morgen?")]},
    "parts of every role": {
        "messages": [parts("a", "b", role="system"), USER, parts("c", role="assistant"), USER]
    },
    "empty part": {"messages": [parts("", "x", "")]},
    "no parts": {"messages": [{"role": "user", "content": []}]},
    "a tool": {"messages": [USER], "tools": [WEATHER]},
    "tools and system": {"messages": [SYSTEM, USER], "tools": [WEATHER, CLOCK]},
    "tools that may not be called": {
        "messages": [USER], "tools": [WEATHER], "tool_choice": "none"
    },
    "a tool of a name only": {"messages": [USER], "tools": [BARE]},
    "a tool in another order": {"messages": [USER], "tools": [{"function": {
        "strict": True, "parameters": {}, "name": "f", "more": 1}, "type": "function"}]},
    "tool call and result": {"messages": [USER, CALL, RESULT], "tools": [WEATHER]},
    "two rounds of calls": {
        "messages": [SYSTEM, USER, CALL, RESULT, ANSWER, USER, CALL, RESULT],
        "tools": [WEATHER],
    },
    "call with text": {"messages": [USER, call('{"city": "Bonn"}', "Ich frage."), RESULT]},
    "call without arguments": {"messages": [USER, call(""), RESULT], "tools": [WEATHER]},
    "call with broken arguments": {"messages": [USER, call('{"a": '), RESULT, call("[1]"), RESULT]},
    "call with nested arguments": {
        "messages": [USER, call('{"a": [1, 2.50, null, true], "b": {"é": "\\u00fc"}}'), RESULT]
    },
    "result in parts": {"messages": [USER, CALL, parts("x", "y", role="tool") | {
        "tool_call_id": "c1"}]},
    "nothing to generate": {"messages": [USER, ANSWER], **NO_TURN},
    "continued": {"messages": [USER, UNFINISHED], **CONTINUED},
    "continued, parts": {
        "messages": [USER, parts("Das ", "Wetter", role="assistant")], **CONTINUED
    },
    "continued, its text elsewhere too": {
        "messages": [USER, {"role": "assistant", "content": "im_end"}], **CONTINUED
    },
    "template arguments": {"messages": [USER], "chat_template_kwargs": {"mood": "calm"}},
    "reasoning effort": {"messages": [USER], "reasoning_effort": "low"},
    "template arguments that turn generation off": {
        "messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}
    },
}  # fmt: skip
ASKING_TEMPLATE = """\
{{ reasoning_effort }}|{{ enable_thinking }}|{{ mood }}|{{ documents }}
{% for message in messages %}{{ message | tojson }}{{ message.content }}{% endfor %}
"""
TEMPLATES = {
    "own": None,
    "parts": OPENAI_TEMPLATE,
    "trimming": TRIMMING_TEMPLATE,
    "asking": ASKING_TEMPLATE,
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", BODIES)
def test_tokens_are_the_engines(rig: System, name: str, template: str) -> None:
    body = {"model": MODEL, **BODIES[name]}
    source = TEMPLATES[template]
    asked = {**body, "max_tokens": 1, "return_token_ids": True}
    if source is not None:
        asked["chat_template"] = source
    url = f"http://{rig.workers[0].address}/v1/chat/completions"
    answer = httpx.post(url, json=asked, timeout=30)
    assert answer.status_code == 200, answer.text
    engine_ids = answer.json()["prompt_token_ids"]

    # Blocks of one token: equal keys are equal tokens.
    model_dir = made_model("tiny")
    pool = builders.pool_policy(model=MODEL, block_size_tokens=1)
    keyer = builders.keyer(
        builders.tokenizer_of(model_dir),
        builders.template_of(model_dir)
        if source is None
        else ChatTemplate(source, {"bos_token": "<|endoftext|>"}),
        pool=pool,
    )
    headers = {":path": "/v1/chat/completions", "content-type": "application/json"}
    profile = read_request(headers, json.dumps(body).encode(), RequestPolicy())
    (keys,) = builders.keyed(keyer, profile)
    assert (keys.tokens, keys.exact) == (len(engine_ids), True)
    expected = block_keys(root_key(keyer.namespace, 1), engine_ids, 1)
    assert np.array_equal(keys.keys, expected)
