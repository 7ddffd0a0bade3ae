"""What a scheduler costs while it waits: idle with many agents, and holding many requests.

Both run the real ``kvgate serve``. The holding one has Envoy in front and one worker whose
agent says that it is full; when the agent says that it is idle, everything held runs.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from benchmarks.agents import Agent, connected
from benchmarks.arms import Scheduler
from benchmarks.chats import Chat, text
from benchmarks.http_load import SMALL_BYTES, Connection
from benchmarks.rig import HOST, Running

_AT_ONCE = 64
"""Requests that the worker of the held ones runs at once when it runs any."""
_HOLD_S = 120.0
_QUEUE_S = 600.0
_POLL_S = 0.25
_SETTLE_S = 2.0


HELD_POLICY: dict[str, Any] = {
    "admission": {"max_queue": 100_000, "max_queue_time_s": _QUEUE_S, "max_concurrency": 100_000}
}
"""Of the pool: nothing but the full worker is what requests wait for."""


async def idle(scheduler: Scheduler, agents: int, seconds: float, seed: int) -> dict[str, Any]:
    """CPU of a scheduler that serves nothing, with agents at the policy's pace.

    Returns:
        ``agents``, ``seconds`` measured, ``cores`` used by the scheduler in that time and
        ``ready_workers`` that it counted afterwards.
    """
    rng = random.Random(f"{seed} idle")
    everybody = [
        Agent(f"10.1.{number >> 8}.{number & 255}:8000", 64, 8_192, rng) for number in range(agents)
    ]
    async with connected(everybody, f"{HOST}:{scheduler.control_port}"):
        await asyncio.sleep(_SETTLE_S)
        cores = await _cores(scheduler.process, seconds)
        ready = await asyncio.to_thread(scheduler.metric, "kvgate_worker_ready")
    return {"agents": agents, "seconds": seconds, "cores": cores, "ready_workers": int(ready)}


async def hold(
    scheduler: Scheduler, worker: str, port: int, requests: int, seconds: float, seed: int
) -> dict[str, Any]:
    """Send requests that must all wait, look at them waiting, then let them run.

    Args:
        worker: address whose agent speaks here.
        port: Envoy's.

    Returns:
        ``requests``, ``memory_bytes_each`` (resident memory of the scheduler with them over
        that without), ``cores_while_held``, ``hold_s`` and ``drain_s`` (until all are held,
        until all are answered), ``ended_well`` (answered 200) and ``left`` (requests that the
        scheduler still knows of).
    """
    rng = random.Random(f"{seed} held")
    agent = Agent(worker, _AT_ONCE, 0, rng)
    # Made before the agent speaks: it lives in this event loop and must not fall silent.
    first, held = _bodies(_AT_ONCE, rng), _bodies(requests, rng)
    async with connected([agent], f"{HOST}:{scheduler.control_port}"):
        connections = [await Connection.open(port) for _ in range(requests)]
        await _send_all(connections[:_AT_ONCE], first)
        agent.tell(_AT_ONCE)
        await _until(scheduler, "kvgate_worker_foreign_requests", _AT_ONCE)
        before_bytes = scheduler.resident_bytes()
        began = time.monotonic()
        answers = asyncio.create_task(_send_all(connections, held))
        await _until(scheduler, "kvgate_queued_requests", requests)
        hold_s = time.monotonic() - began
        await asyncio.sleep(_SETTLE_S)
        held_bytes = scheduler.resident_bytes() - before_bytes
        cores = await _cores(scheduler.process, seconds)
        agent.tell(0)
        began = time.monotonic()
        well = await asyncio.wait_for(answers, _HOLD_S)
        drain_s = time.monotonic() - began
        for connection in connections:
            connection.close()
        await _until(scheduler, "kvgate_open_streams", 0)
        left = scheduler.metric("kvgate_queued_requests") + scheduler.metric(
            "kvgate_running_requests"
        )
    return {
        "requests": requests,
        "memory_bytes_each": held_bytes / requests,
        "seconds": seconds,
        "cores_while_held": cores,
        "hold_s": hold_s,
        "drain_s": drain_s,
        "ended_well": well,
        "left": int(left),
    }


def _bodies(count: int, rng: random.Random) -> list[bytes]:
    return [Chat(rng, text(rng, SMALL_BYTES), 3).next_turn() for _ in range(count)]


async def _send_all(connections: list[Connection], bodies: list[bytes]) -> int:
    """One small request on each; how many were answered 200."""
    sent = (each.send(body) for each, body in zip(connections, bodies, strict=True))
    results = await asyncio.gather(*sent, return_exceptions=True)
    return sum(result is None for result in results)


async def _cores(process: Running, seconds: float) -> float:
    before, began = process.usage(), time.monotonic()
    await asyncio.sleep(seconds)
    used = process.usage() - before
    return used.cpu_s / (time.monotonic() - began)


async def _until(scheduler: Scheduler, metric: str, value: float) -> None:
    """Return when a metric has a value.

    Raises:
        TimeoutError: it took too long.
    """
    deadline = time.monotonic() + _HOLD_S
    while (found := await asyncio.to_thread(scheduler.metric, metric)) != value:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{metric} is {found:g}, not {value:g}")
        await asyncio.sleep(_POLL_S)
