from __future__ import annotations

import json

import pytest

from .client import WORDS, chat, parsed
from .conftest import Start


async def test_a_chat_is_answered_whole_or_streamed_with_the_same_text(start: Start) -> None:
    worker = await start()
    status, whole = await worker.post("/v1/chat/completions", chat("hello", max_tokens=6))
    assert status == 200
    assert whole["object"] == "chat.completion"
    assert whole["usage"]["completion_tokens"] == 6
    events = await worker.stream("/v1/chat/completions", chat("hello", max_tokens=6))
    assert events[-1] == "[DONE]"
    chunks = parsed(events)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_last_in_a_stream_that_asks_for_it(start: Start) -> None:
    worker = await start()
    body = chat(WORDS * 5, max_tokens=3, stream_options={"include_usage": True})
    await worker.stream("/v1/chat/completions", body)
    events = await worker.stream("/v1/chat/completions", body)
    last = json.loads(events[-2])
    prompt = last["usage"]["prompt_tokens"]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == prompt + 3
    details = last["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == (prompt - 1) // 32 * 32
    assert details["created_cache_tokens"] == prompt // 32 * 32 - details["cached_tokens"]


async def test_the_next_turn_hits_the_blocks_of_the_answer(start: Start) -> None:
    worker = await start(block_size=16, num_blocks=600)
    body = chat("hello", max_tokens=50)
    _status, first = await worker.post("/v1/chat/completions", body)
    answer = first["choices"][0]["message"]["content"]
    _status, second = await worker.post("/v1/chat/completions", chat("hello", answer, "go on"))
    computed = first["usage"]["total_tokens"] - 1
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == computed // 16 * 16


async def test_salts_keep_caches_apart_as_on_the_real_engine(start: Start) -> None:
    worker = await start()
    prompt = list(range(100, 200))
    salts = (None, "a", "a", "b", None)
    cached = [await worker.cached(prompt, cache_salt=salt) for salt in salts]
    assert cached == [0, 0, 96, 0, 96]
    assert await worker.cached(prompt[:96]) == 64
    metrics = await worker.metrics()
    assert metrics["vllm:prefix_cache_queries_total"] == 596
    assert metrics["vllm:prefix_cache_hits_total"] == 256


async def test_its_busy_share_is_on_the_page(start: Start) -> None:
    worker = await start()
    await worker.cached(list(range(100, 200)))
    assert 0.0 <= (await worker.metrics())["kvgate_simulator_busy_ratio"] <= 1.0


@pytest.mark.parametrize("salt", ["", 7, "x" * 129, "a@b", "a/b", "a\\b", "a\0b"])
async def test_bad_salts_are_refused(start: Start, salt: object) -> None:
    worker = await start()
    status, body = await worker.post("/v1/completions", {"prompt": "x", "cache_salt": salt})
    assert (status, body["error"]["code"]) == (400, 400)
    assert await worker.cached("x", cache_salt="é😀") == 0


async def test_adapters_have_their_own_cache_and_are_listed(start: Start) -> None:
    worker = await start(adapters=("ad1",))
    prompt = list(range(100))
    assert await worker.cached(prompt) == 0
    assert await worker.cached(prompt, model="ad1") == 0
    assert await worker.cached(prompt, model="ad1") == 96
    _status, models = await worker.get("/v1/models")
    assert [(m["id"], m["parent"]) for m in models["data"]] == [("sim", None), ("ad1", "sim")]
    assert "vllm:lora_requests_info" not in await worker.metrics()


async def test_completions_take_every_kind_of_prompt_and_several_choices(start: Start) -> None:
    worker = await start()
    one = await worker.complete("a b c", n=2, max_tokens=4)
    assert [choice["index"] for choice in one["choices"]] == [0, 1]
    assert one["usage"]["completion_tokens"] == 8
    two = await worker.complete(["a b c", "d"], max_tokens=4, return_token_ids=True)
    assert two["choices"][0]["text"] == one["choices"][0]["text"]
    ids = [choice["prompt_token_ids"] for choice in two["choices"]]
    assert two["usage"]["prompt_tokens"] == sum(map(len, ids))
    again = await worker.complete(ids, max_tokens=4)
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in two["choices"]]
    chunks = parsed(await worker.stream("/v1/completions", {"prompt": ids[0], "max_tokens": 4}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == two["choices"][0]["text"]


async def test_a_stream_gives_token_ids_to_who_asks(start: Start) -> None:
    worker = await start()
    asked = {"prompt": "a b c", "max_tokens": 4, "return_token_ids": True}
    whole = await worker.complete(asked["prompt"], max_tokens=4, return_token_ids=True)
    chunks = parsed(await worker.stream("/v1/completions", asked))
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]


async def test_a_generated_answer_tokenises_to_the_tokens_counted(start: Start) -> None:
    worker = await start()
    body = chat("hello", max_tokens=40, return_token_ids=True)
    _status, answer = await worker.post("/v1/chat/completions", body)
    text = answer["choices"][0]["message"]["content"]
    _status, tokens = await worker.post("/tokenize", {"prompt": text})
    assert tokens["tokens"] == answer["choices"][0]["token_ids"]
    _status, prompt = await worker.post("/tokenize", chat("hello"))
    assert prompt["tokens"] == answer["prompt_token_ids"]
    assert prompt["count"] == answer["usage"]["prompt_tokens"]


async def test_a_long_body_is_tokenised_off_the_loop_to_the_same_ids(start: Start) -> None:
    worker = await start(max_model_len=9600)
    _status, tokens = await worker.post("/tokenize", {"prompt": WORDS * 600})
    answer = await worker.complete(WORDS * 600, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == tokens["count"] > 8192


async def test_responses_are_answered_whole_and_streamed(start: Start) -> None:
    worker = await start()
    body = {"input": "hello", "instructions": "short", "max_output_tokens": 5}
    _status, whole = await worker.post("/v1/responses", body)
    text = whole["output"][0]["content"][0]["text"]
    assert whole["usage"]["output_tokens"] == 5
    events = parsed(await worker.stream("/v1/responses", body))
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["output_tokens"] == 5


async def test_messages_are_answered_whole_and_streamed(start: Start) -> None:
    worker = await start()
    body = {"messages": [{"role": "user", "content": "hello"}], "system": "s", "max_tokens": 5}
    _status, whole = await worker.post("/v1/messages", body)
    assert whole["stop_reason"] == "max_tokens"
    events = parsed(await worker.stream("/v1/messages", body))
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    status, refusal = await worker.post("/v1/messages", body | {"model": "other"})
    assert (status, refusal["type"]) == (404, "error")


async def test_embeddings_compute_only_the_prompt(start: Start) -> None:
    worker = await start()
    status, body = await worker.post("/v1/embeddings", {"input": ["one", "two"]})
    assert status == 200
    assert [item["index"] for item in body["data"]] == [0, 1]
    metrics = await worker.metrics()
    assert metrics["vllm:generation_tokens_total"] == 0
    assert metrics["vllm:prompt_tokens_total"] == body["usage"]["prompt_tokens"]


async def test_too_many_output_tokens_are_clamped_and_too_long_prompts_refused(
    start: Start,
) -> None:
    worker = await start(max_model_len=64)
    answer = await worker.complete(list(range(60)), max_tokens=1000)
    assert answer["usage"]["completion_tokens"] == 4
    for stream, tokens, field in ((False, 64, "max_tokens"), (True, 65, "input_tokens")):
        status, body = await worker.post(
            "/v1/completions", {"prompt": list(range(tokens)), "stream": stream}
        )
        assert (status, body["error"]["param"]) == (400, field)
        assert body["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[]", b'{"prompt": "x", "max_tokens": 0}', b'{"prompt": "x", "max_tokens": "4"}',
        b'{"prompt": "x", "n": 0}', b'{"prompt": "x", "model": 4}', b'{"prompt": ""}', b"{}",
    ],
)  # fmt: skip
async def test_bad_bodies_get_400_in_the_shape_of_vllm(start: Start, body: bytes) -> None:
    worker = await start()
    async with worker.http.post("/v1/completions", data=body) as response:
        error = (await response.json())["error"]
        assert response.status == 400
    assert set(error) == {"message", "type", "param", "code"}


async def test_unknown_models_and_routes_get_404(start: Start) -> None:
    worker = await start()
    status, body = await worker.post("/v1/completions", {"prompt": "x", "model": "other"})
    assert (status, body["error"]["type"]) == (404, "NotFoundError")
    assert await worker.get("/nowhere") == (404, {"detail": "Not Found"})
    assert await worker.get("/v1/completions") == (405, {"detail": "Method Not Allowed"})


async def test_request_ids_are_echoed_also_on_errors_and_made_up_if_absent(start: Start) -> None:
    worker = await start()
    headers = {"X-Request-Id": "mine"}
    for body in ({"prompt": "x"}, {"prompt": 4}):
        async with worker.http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "mine"
    async with worker.http.post("/v1/completions", json={"prompt": "x"}) as response:
        made = response.headers["X-Request-Id"]
        assert (await response.json())["id"] == f"cmpl-{made}"


async def test_the_small_pages_answer(start: Start) -> None:
    worker = await start()
    for path in ("/health", "/ping"):
        async with worker.http.get(path) as response:
            assert (response.status, await response.read()) == (200, b"")
    assert await worker.get("/load") == (200, {"server_load": 0})
    assert (await worker.get("/version"))[1]["version"].startswith("0.32")
    status, _body = await worker.post("/tokenize", {"prompt": 4})
    assert status == 400
