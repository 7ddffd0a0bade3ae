"""An engine whose core stops while its server answers is frozen, until the core goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from tests.e2e.chat import client_for
from tests.support.system import MODEL, System, eventually, fetch
from tests.support.vllm import engine_core
from tests.vllm.conftest import FROZEN_AFTER_S

COMPLETIONS = "/v1/completions"
SEEN_S = 20.0


def is_in_state(system: System, address: str, state: str) -> bool:
    told = next(worker["state"] for worker in system.fleet() if worker["address"] == address)
    labels = {"worker": address, "state": state}
    return told == state and system.samples("kvgate_worker_state", labels) == [1.0]


async def test_a_stopped_core_is_frozen_and_takes_its_requests_up_again(rig: System) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3_000, "ignore_eos": True}
    async with (
        client_for(rig.url) as client,
        client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response,
    ):
        address = response.headers["x-kvgate-worker"]
        lines = response.aiter_lines()
        await anext(lines)
        worker = next(worker for worker in rig.workers if worker.address == address)
        core = engine_core(worker)
        os.kill(core, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            await asyncio.to_thread(
                eventually, lambda: is_in_state(rig, address, "frozen"), "frozen", SEEN_S
            )
            print(f"frozen {time.monotonic() - stopped:.1f} s after, of {FROZEN_AFTER_S} s set")
            assert fetch(f"http://{address}/health")[0] == 200
            assert fetch(f"http://{address}/metrics")[0] == 200
            assert address not in rig.ready_workers()
            for number in range(6):
                other = await client.post(
                    COMPLETIONS, json={**body, "prompt": f"number {number}", "max_tokens": 2}
                )
                assert other.status_code == 200
                assert other.headers["x-kvgate-worker"] != address
        finally:
            os.kill(core, signal.SIGCONT)
        await asyncio.to_thread(
            eventually, lambda: is_in_state(rig, address, "ready"), "ready", SEEN_S
        )
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    await asyncio.to_thread(rig.wait_idle)
