"""Answers in every form that vLLM gives, as Hypothesis strategies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from workers.response_scan import Usage

Event = tuple[str | None, Any]


@dataclass(frozen=True)
class Answer:
    """A whole answer and the usage that it tells."""

    content: bytes
    usage: Usage
    sse: bool


counts = st.integers(0, 10**7)
TRICKS = (
    'say "usage": {"prompt_tokens": 7}',
    '{"error": {"message": "EngineCore encountered an issue"}}',
    'data: {"error": {"code": 500}}\n\ndata: x',
    "event: error\ndata: {}\n\n",
    "[DONE]",
    "é😀\r\n",
)
texts = st.one_of(st.text(max_size=12), st.sampled_from(TRICKS))


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    prompt = draw(counts)
    cached = draw(st.none() | st.integers(0, prompt))
    return Usage(prompt, draw(counts), cached)


def openai_usage(usage: Usage) -> dict[str, Any]:
    details = None if usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": 1,
        "completion_tokens": usage.output_tokens,
        "prompt_tokens_details": details,
    }


def responses_usage(usage: Usage) -> dict[str, Any]:
    details = None if usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.output_tokens,
    }


def anthropic_usage(usage: Usage) -> dict[str, Any]:
    told: dict[str, Any] = {"output_tokens": usage.output_tokens}
    told["input_tokens"] = (usage.prompt_tokens or 0) - (usage.cached_tokens or 0)
    if usage.cached_tokens is not None:
        told |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached_tokens}
    return told


def chat_events(contents: list[str], usage: Usage) -> list[Event]:
    deltas = [
        (None, {"choices": [{"index": 0, "delta": {"content": text}}], "usage": None})
        for text in contents
    ]
    return [*deltas, (None, {"choices": [], "usage": openai_usage(usage)})]


def continuous_events(contents: list[str], usage: Usage) -> list[Event]:
    early = openai_usage(usage._replace(output_tokens=0))
    deltas = [(None, {"choices": [{"text": text}], "usage": early}) for text in contents]
    return [*deltas, (None, {"choices": [], "usage": openai_usage(usage)})]


def responses_events(contents: list[str], usage: Usage) -> list[Event]:
    first = {"type": "response.created", "response": {"usage": None, "error": None}}
    deltas = [("response.output_text.delta", {"delta": text}) for text in contents]
    last = {"output": contents, "usage": responses_usage(usage), "user": None}
    done = {"type": "response.completed", "response": last}
    return [("response.created", first), *deltas, ("response.completed", done)]


def anthropic_events(contents: list[str], usage: Usage) -> list[Event]:
    begin = anthropic_usage(usage._replace(output_tokens=0, cached_tokens=None))
    deltas = [("content_block_delta", {"delta": {"text": text}}) for text in contents]
    return [
        ("message_start", {"message": {"content": [], "usage": begin}}),
        *deltas,
        ("message_delta", {"delta": {}, "usage": anthropic_usage(usage)}),
        ("message_stop", {"type": "message_stop"}),
    ]


def sse(events: list[Event], *, newline: str = "\n", space: str = " ", done: bool = True) -> bytes:
    lines = []
    for name, document in events:
        head = f"event:{space}{name}{newline}" if name else ""
        lines.append(f"{head}data:{space}{json.dumps(document)}{newline}{newline}")
    if done:
        lines.append(f"data:{space}[DONE]{newline}{newline}")
    return "".join(lines).encode()


STREAMS = (chat_events, continuous_events, responses_events, anthropic_events)


@st.composite
def streams(draw: st.DrawFn) -> Answer:
    """A streamed answer; sometimes cut before its end."""
    usage = draw(usages())
    events = draw(st.sampled_from(STREAMS))(draw(st.lists(texts, max_size=4)), usage)
    newline, space = draw(st.sampled_from(["\n", "\r\n"])), draw(st.sampled_from(["", " "]))
    return Answer(sse(events, newline=newline, space=space, done=draw(st.booleans())), usage, True)


@st.composite
def documents(draw: st.DrawFn) -> Answer:
    """An answer in one piece."""
    usage = draw(usages())
    form = draw(st.sampled_from([openai_usage, responses_usage, anthropic_usage]))
    document = {"choices": draw(st.lists(texts, max_size=3)), "usage": form(usage), "metrics": None}
    indent = draw(st.sampled_from([None, 2]))
    return Answer(json.dumps(document, indent=indent).encode(), usage, False)


answers = st.one_of(streams(), documents())


@st.composite
def cuts(draw: st.DrawFn, content: bytes) -> list[bytes]:
    """The content in chunks, none of them empty."""
    whole = st.just(len(content) + 1)
    size = draw(st.one_of(st.just(1), st.integers(2, 40), whole))
    if draw(st.booleans()):
        return [content[at : at + size] for at in range(0, len(content), size)]
    places = draw(st.lists(st.integers(0, len(content)), max_size=8))
    edges = sorted({0, *places, len(content)})
    return [content[at:to] for at, to in pairwise(edges)]
