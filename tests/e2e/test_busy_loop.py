"""Long cold prompts do not hold up health checks or short requests (PE1)."""

from __future__ import annotations

import asyncio
import time

from tests.e2e.chat import asked, client_for, text
from tests.support.system import System

LONG_CHARS = 500_000


async def test_health_and_short_requests_pass_while_long_prompts_are_tokenised(
    system: System,
) -> None:
    long_bodies = [asked(text(90_000, seed=n)[:LONG_CHARS], "?") for n in range(12)]
    overtaken = 0
    async with (
        client_for(system.url) as client,
        client_for(f"http://127.0.0.1:{system.admin_port}") as admin,
    ):
        long_ones = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body))
            for body in long_bodies
        ]
        waits = []
        while not all(task.done() for task in long_ones):
            started = time.perf_counter()
            assert (await admin.get("/livez")).status_code == 200
            waits.append(time.perf_counter() - started)
            short = await client.post("/v1/chat/completions", json=asked("hi", "?", max_tokens=1))
            assert short.status_code == 200
            overtaken += not all(task.done() for task in long_ones)
        # The engine refuses what is over its context; it was kvgate that had to tokenise.
        assert {task.result().status_code for task in long_ones} == {400}
    print(f"health: {len(waits)} checks, worst {max(waits) * 1000:.0f} ms; overtook {overtaken}")
    assert overtaken > 0
    assert system.metric("kvgate_segment_cache_misses_total") >= 12
