"""Bodies, streams and errors of the HTTP API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fidelity.conftest import Book
from tests.fidelity.shapes import once, shape, sse_shapes
from tests.fidelity.subject import ADAPTER, Json, Subject
from tests.support.builders import tokenizer_of
from tests.support.system import MODEL
from tests.support.vllm import BLOCK_TOKENS
from workers.vllm_model import MAX_MODEL_LEN

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
EXACT: Json = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
SAMPLED: Json = {**EXACT, "temperature": 1, "seed": 1}
USAGE: Json = {"stream_options": {"include_usage": True}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def counted(answer: Json) -> Json:
    """Whole numbers of the usage; details apart, which depend on what ran before."""
    return {k: v for k, v in answer["usage"].items() if k == "completion_tokens"}


BODIES: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, {"messages": HELLO, **EXACT}),
    "chat of two choices": (CHAT, {"messages": HELLO, "n": 2, **SAMPLED}),
    "chat with token ids": (CHAT, {"messages": HELLO, "return_token_ids": True, **EXACT}),
    "chat with tools": (CHAT, {"messages": HELLO, "tools": [TOOL], **EXACT}),
    "completion": (COMPLETIONS, {"prompt": "Hello", **EXACT}),
    "completion of an adapter": (COMPLETIONS, {"model": ADAPTER, "prompt": "Hello", **EXACT}),
    "completion of token ids": (COMPLETIONS, {"prompt": [5, 6, 7], **EXACT}),
    "completion of several prompts": (COMPLETIONS, {"prompt": ["a b", "c"], "n": 2, **SAMPLED}),
    "completion with token ids": (
        COMPLETIONS, {"prompt": [[5, 6], [7]], "return_token_ids": True, **EXACT}
    ),
    "response": (RESPONSES, {"input": "Hello?", "max_output_tokens": 6, "ignore_eos": True}),
    "message": (MESSAGES, {"messages": HELLO[1:], "system": "Be brief.", "max_tokens": 6}),
}  # fmt: skip
STREAMS: dict[str, tuple[str, Json]] = {
    "streamed chat": (CHAT, {"messages": HELLO, **EXACT}),
    "streamed chat with usage": (CHAT, {"messages": HELLO, **EXACT, **USAGE}),
    "streamed chat of two choices": (CHAT, {"messages": HELLO, "n": 2, **SAMPLED, **USAGE}),
    "streamed completion": (COMPLETIONS, {"prompt": "Hello", **EXACT}),
    "streamed completion with usage": (COMPLETIONS, {"prompt": "Hello", **EXACT, **USAGE}),
    "streamed response": (RESPONSES, {"input": "Hello?", "max_output_tokens": 6}),
    "streamed message": (MESSAGES, {"messages": HELLO[1:], "max_tokens": 6}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_has_its_shape(subject: Subject, book: Book, name: str) -> None:
    path, body = BODIES[name]
    answer = await subject.post(path, {"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    content = answer.json()
    book.compare(name, {"content-type": answer.headers["content-type"], "body": shape(content)})
    if path in (CHAT, COMPLETIONS):
        book.compare(f"{name}: usage", counted(content))
        finished = [choice["finish_reason"] for choice in content["choices"]]
        book.compare(f"{name}: finish", [content["object"], finished])


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_has_its_events(subject: Subject, book: Book, name: str) -> None:
    path, body = STREAMS[name]
    shapes = sse_shapes(await subject.events_of(path, body))
    if "n" in body:  # choices take turns as they like
        shapes = sorted({json.dumps(item) for item in map(once, shapes)})
    book.compare(name, shapes)


async def test_a_stream_ends_with_the_reason_and_the_usage(subject: Subject, book: Book) -> None:
    events = await subject.events_of(CHAT, {"messages": HELLO, **EXACT, **USAGE})
    chunks = [json.loads(data) for _, data in events[:-1]]
    first, last, usage = chunks[0], chunks[-2], chunks[-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    book.compare("first delta", first["choices"][0]["delta"])
    book.compare("last finish reason", last["choices"][0]["finish_reason"])
    book.compare("usage of a stream", [usage["choices"], counted(usage)])


async def test_prompts_have_the_tokens_of_the_tokenizer(subject: Subject) -> None:
    tokenizer = tokenizer_of(subject.model_dir)
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
    rendered += "<|im_start|>assistant\n"
    expected = tokenizer.encode([rendered])[0].tolist()
    chat = {"model": MODEL, "messages": HELLO}
    tokens = (await subject.post("/tokenize", chat)).json()
    assert (tokens["tokens"], tokens["count"]) == (expected, len(expected))
    answer = (await subject.post(CHAT, {**chat, **EXACT, "return_token_ids": True})).json()
    assert answer["prompt_token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(expected)
    text = "naïve café - 東京 🙂 Привет\n\n"
    plain = (await subject.post("/tokenize", {"model": MODEL, "prompt": text})).json()
    assert plain["tokens"] == tokenizer.encode([text])[0].tolist()


async def test_a_chat_tells_what_it_found_and_left_in_the_cache(
    subject: Subject, book: Book
) -> None:
    await subject.idle()
    await subject.post("/reset_prefix_cache", {})
    body = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 200}], **EXACT}
    found = []
    for _ in range(2):
        usage = (await subject.post(CHAT, body)).json()["usage"]
        details = usage["prompt_tokens_details"]
        blocks = usage["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
        found += [(details["cached_tokens"], details["created_cache_tokens"])]
    assert blocks > 0
    book.compare("created and cached", [[c / blocks, n / blocks] for c, n in found])


async def test_request_ids_come_back(subject: Subject, book: Book) -> None:
    headers = {"X-Request-Id": "mine"}
    answer = await subject.post(CHAT, {"model": MODEL, "messages": HELLO}, headers=headers)
    refused = await subject.post(CHAT, {"model": "nobody", "messages": HELLO}, headers=headers)
    own = await subject.post(COMPLETIONS, {"model": MODEL, "prompt": "x"})
    facts = {
        "given": answer.headers.get("x-request-id"),
        "of a refusal": refused.headers.get("x-request-id"),
        "id": answer.json()["id"],
        "made up": own.json()["id"].removeprefix("cmpl-") == own.headers.get("x-request-id"),
    }
    book.compare("request ids", facts)


ERRORS: dict[str, tuple[str, Any]] = {
    "not JSON": (CHAT, b"{"),
    "no object": (CHAT, b"[]"),
    "no body": (CHAT, b""),
    "no messages": (CHAT, {}),
    "messages of text": (CHAT, {"messages": "hello"}),
    "a message of text": (CHAT, {"messages": ["hello"]}),
    "a message without a role": (CHAT, {"messages": [{"content": "x"}]}),
    "a part of no kind": (CHAT, {"messages": [{"role": "user", "content": [{"type": 3}]}]}),
    "a part of an unknown kind": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "smell", "smell": "x"}]}]}
    ),
    "empty tools": (CHAT, {"messages": HELLO, "tools": []}),
    "odd tools": (CHAT, {"messages": HELLO, "tools": "x"}),
    "an unknown model": (CHAT, {"model": "nobody", "messages": HELLO}),
    "an unknown model of completions": (COMPLETIONS, {"model": "nobody", "prompt": "x"}),
    "a model that is no text": (CHAT, {"model": 5, "messages": HELLO}),
    "no prompt": (COMPLETIONS, {}),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}),
    "an empty list of prompts": (COMPLETIONS, {"prompt": []}),
    "a prompt of numbers that are no ids": (COMPLETIONS, {"prompt": [1.5]}),
    "an id outside the vocabulary": (COMPLETIONS, {"prompt": [1, 999_999]}),
    "a negative id": (COMPLETIONS, {"prompt": [-1]}),
    "no tokens wanted": (COMPLETIONS, {"prompt": "x", "max_tokens": 0}),
    "fewer than no tokens wanted": (COMPLETIONS, {"prompt": "x", "max_tokens": -1}),
    "tokens wanted as text": (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}),
    "no choices": (COMPLETIONS, {"prompt": "x", "n": 0}),
    "a prompt as long as the model": (COMPLETIONS, {"prompt": [5] * MAX_MODEL_LEN}),
    "a prompt too long": (COMPLETIONS, {"prompt": [5] * (MAX_MODEL_LEN + 100)}),
    "a streamed prompt too long": (COMPLETIONS, {"prompt": [5] * MAX_MODEL_LEN, "stream": True}),
    "a chat too long": (CHAT, {"messages": [{"role": "user", "content": "x " * MAX_MODEL_LEN}]}),
    "an empty salt": (COMPLETIONS, {"prompt": "x", "cache_salt": ""}),
    "a salt that is a number": (COMPLETIONS, {"prompt": "x", "cache_salt": 7}),
    "a salt too long": (COMPLETIONS, {"prompt": "x", "cache_salt": "s" * 129}),
    "a salt with a slash": (COMPLETIONS, {"prompt": "x", "cache_salt": "a/b"}),
    "an empty salt of a chat": (CHAT, {"messages": HELLO, "cache_salt": ""}),
    "an unknown model of messages": (
        MESSAGES, {"model": "nobody", "messages": HELLO[1:], "max_tokens": 4}
    ),
    "a prompt of objects to tokenize": ("/tokenize", {"prompt": {"a": 1}}),
    "an unknown model to tokenize": ("/tokenize", {"model": "nobody", "prompt": "x"}),
    "an unknown route": ("/v1/nowhere", {}),
    "a GET of a POST": (CHAT, None),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_has_its_status_and_shape(subject: Subject, book: Book, name: str) -> None:
    path, body = ERRORS[name]
    async with subject.client() as client:
        if body is None:
            answer = await client.get(path)
        elif isinstance(body, bytes):
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=body, headers=headers)
        else:
            answer = await client.post(path, json={"model": MODEL, **body})
    content = answer.json()
    facts: Json = {"status": answer.status_code, "shape": shape(content)}
    facts["retry-after"] = "retry-after" in answer.headers
    facts["content-type"] = answer.headers["content-type"]
    if isinstance(content.get("error"), dict):
        facts |= {k: content["error"].get(k) for k in ("type", "param", "code")}
    book.compare(f"error: {name}", facts)


TAKEN: dict[str, tuple[str, Json]] = {
    "unknown fields": (COMPLETIONS, {"prompt": "x", "colour": "red"}),
    "an unknown role": (CHAT, {"messages": [{"role": "critic", "content": "x"}]}),
    "a priority": (COMPLETIONS, {"prompt": "x", "priority": 3}),
    "no model": (COMPLETIONS, {"model": None, "prompt": "x"}),
    "no limit and no salt": (COMPLETIONS, {"prompt": "x", "max_tokens": None, "cache_salt": None}),
    "null choices": (COMPLETIONS, {"prompt": "x", "n": None}),
    "a salt of any letters": (COMPLETIONS, {"prompt": "x", "cache_salt": " é😀"}),
    "no messages at all": (CHAT, {"messages": []}),
    "null content": (CHAT, {"messages": [{"role": "assistant", "content": None}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
async def test_odd_bodies_are_taken(subject: Subject, book: Book, name: str) -> None:
    path, body = TAKEN[name]
    answer = await subject.post(path, {"model": MODEL, "max_tokens": 2, **body})
    book.compare(f"taken: {name}", answer.status_code)


async def test_more_tokens_than_fit_are_clamped(subject: Subject, book: Book) -> None:
    answer = await subject.complete([5] * (MAX_MODEL_LEN - 30), max_tokens=500, ignore_eos=True)
    reason = answer["choices"][0]["finish_reason"]
    book.compare("clamped", [answer["usage"]["completion_tokens"], reason])


PAGES = ("/health", "/ping", "/version", "/load", "/v1/models", "/kv_event_sources", "/nowhere")


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_has_its_shape(subject: Subject, book: Book, path: str) -> None:
    answer = await subject.get(path)
    kind = answer.headers.get("content-type")
    content = shape(answer.json()) if kind == "application/json" else answer.text
    book.compare(f"page {path}", {"status": answer.status_code, "type": kind, "body": content})


async def test_models_are_listed_with_their_parents(subject: Subject, book: Book) -> None:
    models = (await subject.get("/v1/models")).json()["data"]
    book.compare("models", [[model["id"], model["parent"]] for model in models])
