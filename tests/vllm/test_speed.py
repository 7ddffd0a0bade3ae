"""A warm prompt is an order of magnitude faster, and kvgate finds the warm worker."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import httpx

from tests.e2e.chat import client_for, text
from tests.support.system import MODEL, System

PROMPTS = 5
WARM_REPEATS = 3
PROMPT_TOKENS = 2_000


async def first_chunk(client: httpx.AsyncClient, prompt: str) -> tuple[float, str, int]:
    """Seconds to the first data chunk, the worker, and the prompt's length."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        line = await anext(lines)
        ttft_s = time.perf_counter() - began
        assert line.startswith("data: ")
        rest = [line async for line in lines if line.startswith("data: {")]
    import json

    usage = json.loads(rest[-1].removeprefix("data: "))["usage"]
    return ttft_s, response.headers["x-kvgate-worker"], usage["prompt_tokens"]


async def test_the_first_token_of_a_warm_prompt_comes_ten_times_sooner(mid: System) -> None:
    cold_s, warm_s = [], []
    found = 0
    async with client_for(mid.url) as client:
        for worker in mid.workers:  # first use of a shape costs an engine extra
            warm_up = {"model": MODEL, "prompt": text(1_400, seed=99), "max_tokens": 2}
            await client.post(f"http://{worker.address}/v1/completions", json=warm_up)
        for number in range(PROMPTS):
            prompt = text(1_500, seed=number)
            cold, home, tokens = await first_chunk(client, prompt)
            assert abs(tokens - PROMPT_TOKENS) < 100
            cold_s.append(cold)
            for _ in range(WARM_REPEATS):
                warm, worker_address, _ = await first_chunk(client, prompt)
                warm_s.append(warm)
                found += worker_address == home
    ratio = median(cold_s) / median(warm_s)
    print(
        f"TTFT through Envoy: cold {1e3 * median(cold_s):.0f} ms, warm {1e3 * median(warm_s):.0f}"
    )
    print(f"ratio {ratio:.1f}; the warm worker was picked {found} of {len(warm_s)} times")
    assert found == len(warm_s)
    assert ratio >= 10
