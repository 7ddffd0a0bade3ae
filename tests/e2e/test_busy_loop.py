"""Long cold prompts do not hold up health checks or short requests (PE1), nor we others."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

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


async def test_no_thread_of_ours_preempts_another_process(system: System) -> None:
    """gRPC's own threads, which every message wakes, least of all."""
    body = asked("hi", "?", max_tokens=1)
    async with client_for(system.url) as client:
        for _ in range(30):
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    for process in (system.scheduler, *(worker.agent for worker in system.workers)):
        assert process is not None
        awake = woken_threads(process.pid)
        assert len(awake) > 1
        assert {os.sched_getscheduler(thread) for thread in awake} == {os.SCHED_BATCH}


def woken_threads(pid: int) -> list[int]:
    """Threads that wait and are woken again; numpy's, made at its import, is not."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    waits = {int(task.name): (task / "status").read_text() for task in tasks}
    return [
        thread
        for thread, status in waits.items()
        if int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) > 20
    ]
