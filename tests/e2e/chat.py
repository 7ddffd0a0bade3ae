"""A client for tests: chats through Envoy, answers with what the headers said."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.system import MODEL

_WORDS = ("cache", "token", "model", "block", "worker", "prefix", "queue", "served", "digest")


def text(words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def chat(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "max_tokens": 8, **fields}


def asked(system: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return chat(messages, **fields)


@dataclass(frozen=True)
class Answer:
    status: int
    worker: str
    predicted: int
    cached: int
    prompt_tokens: int
    content: str


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return Answer(response.status_code, "", 0, 0, 0, response.text)
    data = response.json()
    usage = data["usage"]
    return Answer(
        response.status_code,
        response.headers["x-kvgate-worker"],
        int(response.headers["x-kvgate-cached-tokens"]),
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
        data["choices"][0]["message"]["content"],
    )


def client_for(url: str, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, **options)
