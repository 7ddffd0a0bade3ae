"""``kvgate drain`` and ``kvgate resume``: one worker out of rotation, and back.

Both end with 0 when it is done, 1 when it is not.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_PACE_S = 0.25
_LATE_S = 5.0
"""The agent's deadline comes to us with its next report."""
_CALL_TIMEOUT_S = 5.0

FAILED = 1


class Refused(Exception):
    """The scheduler did not take an order; the message is for the operator."""


def drain(server: str, address: str, timeout_s: float, *, wait: bool) -> int:
    """Tell a worker's agent to take nothing new, and wait until nothing runs if asked to."""
    return asyncio.run(_run(_drain(server, address, timeout_s, wait=wait), "drain"))


def resume(server: str, address: str) -> int:
    """Undo a drain."""
    return asyncio.run(_run(_resume(server, address), "resume"))


async def _run(work: Any, name: str) -> int:
    try:
        status: int = await work
    except (Refused, aiohttp.ClientError, TimeoutError) as error:
        said = str(error) or type(error).__name__
        Console(stderr=True, highlight=False).print(
            f"kvgate {name}: {said}", markup=False, soft_wrap=True
        )
        return FAILED
    return status


async def _resume(server: str, address: str) -> int:
    async with _Scheduler(server) as scheduler:
        await scheduler.order(address, "resume")
    Console(highlight=False).print(f"{address} is told to serve again", markup=False)
    return 0


async def _drain(server: str, address: str, timeout_s: float, *, wait: bool) -> int:
    console = Console(highlight=False)
    async with _Scheduler(server) as scheduler:
        await scheduler.order(address, f"drain?deadline_s={timeout_s:g}")
        if not wait:
            console.print(f"{address} is told to take nothing new", markup=False)
            return 0
        with Shown(console, address) as shown:
            deadline = time.monotonic() + timeout_s + _LATE_S
            while time.monotonic() < deadline:
                worker = await scheduler.worker(address)
                running = worker["in_flight"] + worker["foreign"]
                shown.update(worker["state"], running)
                if worker["state"] == "drained" and not running:
                    return 0
                await asyncio.sleep(_PACE_S)
    raise Refused(f"{address}: time is over, {worker['state']} with {running} in flight")


class Shown:
    """Requests still in flight: a bar on terminals, a line for each change elsewhere."""

    def __init__(self, console: Console, address: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._console = console
        self._address = address
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._most = 0
        self._said = ""

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, state: str, running: int) -> None:
        """What the last look showed."""
        said = f"{self._address}: {state}, {running} in flight"
        if self._console.is_terminal:
            self._most = max(self._most, running, 1)
            if self._task is None:
                self._task = self._bar.add_task(said)
            self._bar.update(
                self._task, description=said, total=self._most, completed=self._most - running
            )
        elif said != self._said:
            self._console.print(said, markup=False)
        self._said = said


class _Scheduler:
    """The admin API, as far as draining needs it."""

    def __init__(self, server: str) -> None:
        self._base = f"{server.rstrip('/')}/api/v1/workers"

    async def __aenter__(self) -> _Scheduler:
        timeout = aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
        self._http = await aiohttp.ClientSession(timeout=timeout).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def order(self, address: str, what: str) -> None:
        """Send an order to a worker's agent.

        Raises:
            Refused: the scheduler knows no such worker.
        """
        async with self._http.post(f"{self._base}/{address}/{what}") as response:
            if response.status != 202:
                raise Refused(f"{address}: {await _problem(response)}")

    async def worker(self, address: str) -> dict[str, Any]:
        """What the scheduler knows of a worker.

        Raises:
            Refused: it is gone.
        """
        async with self._http.get(self._base) as response:
            pools: dict[str, list[dict[str, Any]]] = (await response.json())["pools"]
        for worker in (each for workers in pools.values() for each in workers):
            if worker["address"] == address:
                return worker
        raise Refused(f"{address} has left the pool")


async def _problem(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["error"]["message"])
    except (aiohttp.ContentTypeError, KeyError, ValueError):
        return f"HTTP {response.status}"
