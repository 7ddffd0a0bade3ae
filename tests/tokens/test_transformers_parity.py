"""TK1: prompts are those of transformers' ``apply_chat_template``, which vLLM calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from extproc.request.openai import chat_profile
from extproc.request.profile import ChatPrompt
from extproc.tokens.messages import normalise_messages
from extproc.tokens.template import ChatTemplate
from tests.support.builders import keyed_one, model_keyer, pool_policy

OPENAI_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- for part in message['content'] %}
        {%- if part.type == 'text' %}{{ part.text }}{% endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TRIMMING_TEMPLATE = """\
{% for message in messages %}
{% generation %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endgeneration %}
{% endfor %}
{{ bos_token }}{{ mood }}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <eine> Stadt & Region",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SYSTEM = {"role": "system", "content": "You are brief."}
USER = {"role": "user", "content": "Wie ist das Wetter in Köln? 🙂"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "grau"}'}
ANSWER = {"role": "assistant", "content": "Grau."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "Und"}, {"type": "text", "text": "morgen?"}],
}
PREFILL = {"role": "assistant", "content": " Morgen wird es "}

BODIES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "parts": {"messages": [SYSTEM, USER, ANSWER, PARTS]},
    "tools": {"messages": [USER], "tools": [WEATHER]},
    "tools and system": {"messages": [SYSTEM, USER], "tools": [WEATHER, WEATHER]},
    "tool results": {"messages": [USER, CALL, RESULT, ANSWER, PARTS], "tools": [WEATHER]},
    "no turn to generate": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "template argument": {"messages": [USER], "chat_template_kwargs": {"mood": "calm"}},
    "continued": {
        "messages": [USER, PREFILL],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued, its text elsewhere too": {
        "messages": [USER, {"role": "assistant", "content": "im_end"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> PreTrainedTokenizerFast:
    loaded = PreTrainedTokenizerFast.from_pretrained(str(model_dir))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def prompt_of(body: dict[str, Any]) -> ChatPrompt:
    (prompt,) = chat_profile(json.dumps({"model": "sim", **body}).encode()).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def options_of(prompt: ChatPrompt) -> dict[str, Any]:
    return {
        "tools": prompt.tools,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
    }


def texts(
    template: ChatTemplate, source: str | None, prompt: ChatPrompt, reference: Any
) -> tuple[str, str]:
    """What kvgate renders, and what transformers renders from the same messages."""
    messages = normalise_messages(prompt.messages, template.content_format)
    ours = template.render(messages, extra=prompt.template_kwargs, **options_of(prompt))
    theirs = reference.apply_chat_template(
        messages,
        chat_template=source,
        tokenize=False,
        **options_of(prompt),
        **prompt.template_kwargs,
    )
    return ours, theirs


@pytest.mark.parametrize("name", BODIES)
def test_the_models_own_template_renders_alike(
    model_dir: Path, reference: PreTrainedTokenizerFast, name: str
) -> None:
    template = ChatTemplate.load(model_dir)
    assert template is not None
    ours, theirs = texts(template, None, prompt_of(BODIES[name]), reference)
    assert ours == theirs


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("source", [OPENAI_TEMPLATE, TRIMMING_TEMPLATE], ids=["parts", "trimming"])
def test_other_kinds_of_templates_render_alike(
    reference: PreTrainedTokenizerFast, source: str, name: str
) -> None:
    template = ChatTemplate(source, {"bos_token": reference.bos_token})
    assert template.content_format == ("openai" if source is OPENAI_TEMPLATE else "string")
    ours, theirs = texts(template, source, prompt_of(BODIES[name]), reference)
    assert ours == theirs


@pytest.mark.parametrize("name", BODIES)
def test_prompts_have_the_length_of_the_engines(
    model_dir: Path, reference: PreTrainedTokenizerFast, name: str
) -> None:
    """From the body's bytes to the number of tokens, against the whole-text tokenizer."""
    prompt = prompt_of(BODIES[name])
    keyer = model_keyer(model_dir, pool=pool_policy(block_size_tokens=1))
    keys = keyed_one(keyer, prompt)
    expected = reference.apply_chat_template(
        normalise_messages(prompt.messages, "string"),
        return_dict=False,
        **options_of(prompt),
        **prompt.template_kwargs,
    )
    assert (keys.tokens, keys.exact) == (len(expected), True)
    assert len(keys.keys) == len(expected) - 1
