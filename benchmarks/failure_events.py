"""``Live``: a cluster's processes with a hand on each, and what is done to them.

Processes are started from the thread that ends last: they die with the thread that made them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster import MODEL, Cluster, Engine, Front, engine_commands
from benchmarks.rig import HOST, RigFailure, Running, free_ports, running

_POLL_S = 0.1
_LIMIT_S = 60.0
_TIMEOUT_S = 10.0


class Step(msgspec.Struct, frozen=True):
    """Something that was done or seen, at a time from the start of the run."""

    at_s: float
    what: str


class Live:
    """Engines, and their agents once ``follow`` has told of a scheduler.

    Attributes:
        workers: ports of every engine, also of those that are not up.
        started_at: start of the run on ``time.monotonic``.
        steps: what ``note`` was told.

    Raises:
        RigFailure: an engine did not come up.
    """

    def __init__(self, cluster: Cluster, model_dir: Path, folder: Path, stack: ExitStack) -> None:
        ports = iter(free_ports(3 * cluster.workers))
        self.workers = [
            Engine(next(ports), next(ports), next(ports), folder / f"engine-{number}.sock")
            for number in range(cluster.workers)
        ]
        self.started_at = time.monotonic()
        self.steps: list[Step] = []
        self._folder = folder
        self._stack = stack
        self._admin = ""
        self._engine_commands = list(engine_commands(cluster, self.workers, model_dir))
        self._agents: list[Running] = []
        self._engines = [self._start(f"engine-{n}", c) for n, c in enumerate(self._engine_commands)]
        for engine, worker in zip(self._engines, self.workers, strict=True):
            engine.wait_for_port(worker.port)

    def follow(self, front: Front) -> None:
        """Take over kvgate's agents, and ask its scheduler who is ready."""
        scheduler = front.processes[0].command
        self._admin = f"http://{HOST}:{scheduler[scheduler.index('--admin-port') + 1]}"
        self._agents = list(front.beside)

    def note(self, what: str) -> None:
        """Write down that something was done or seen now."""
        self.steps.append(Step(time.monotonic() - self.started_at, what))

    def signal_engine(self, number: int, which: signal.Signals) -> None:
        """Send an engine a signal."""
        self._engines[number].process.send_signal(which)

    def take_out(self, number: int) -> None:
        """Stop agent and engine, as an orchestrator does with a worker that has drained."""
        for process in (*self._agents[number : number + 1], self._engines[number]):
            process.process.terminate()
            process.process.wait(_LIMIT_S)

    def is_out(self, number: int) -> bool:
        """Whether its engine has ended."""
        return self._engines[number].process.poll() is not None

    def start_engine(self, number: int) -> None:
        """A new engine at the same address; ``ready`` waits for it."""
        command = self._engine_commands[number]
        self._engines[number] = self._start(f"engine-{number}", command)

    def start_worker(self, number: int) -> None:
        """A new engine and its agent."""
        self.start_engine(number)
        if self._agents:
            command = self._agents[number].command
            self._agents[number] = self._start(f"agent-{number}", command)

    async def ready(self, number: int) -> None:
        """Return when an engine answers and the scheduler, if there is one, sends to it.

        Raises:
            RigFailure: not within a minute.
        """
        engine = self._engines[number]
        await asyncio.to_thread(engine.wait_for_port, self.workers[number].port, _LIMIT_S)
        if self._admin:
            await self._until(number, lambda told: bool(told.get("ready")), "ready", _LIMIT_S)

    async def drain(self, number: int, limit_s: float) -> None:
        """Order a drain as ``kvgate drain`` does; return when nothing runs there any more."""
        path = f"/api/v1/workers/{self.workers[number].address}/drain?deadline_s={limit_s:g}"
        await asyncio.to_thread(self._ask, path, "POST")
        await self._until(
            number, lambda told: told.get("state") == "drained", "drained", limit_s + _TIMEOUT_S
        )

    async def _until(
        self, number: int, holds: Callable[[dict[str, Any]], bool], what: str, limit_s: float
    ) -> None:
        address = self.workers[number].address
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            fleet = (await asyncio.to_thread(self._ask, "/api/v1/workers", "GET"))["pools"][MODEL]
            if holds(next((told for told in fleet if told["address"] == address), {})):
                return
            await asyncio.sleep(_POLL_S)
        raise RigFailure(f"{address} is not {what} within {limit_s:g} s")

    def _ask(self, path: str, method: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._admin}{path}", method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            told: dict[str, Any] = json.load(answer)
            return told

    def _start(self, name: str, command: tuple[str, ...]) -> Running:
        return self._stack.enter_context(running(name, command, self._folder))


# Events: the first worker's, unless they are everybody's


async def calm(_live: Live, _down_s: float, _drain_s: float) -> None:
    """Nothing happens."""


async def kill(live: Live, down_s: float, _drain_s: float) -> None:
    """The engine dies at once; another is started in its place after a while."""
    live.signal_engine(0, signal.SIGKILL)
    live.note("killed")
    await asyncio.sleep(down_s)
    live.start_engine(0)
    live.note("started again")
    await live.ready(0)
    live.note("ready")


async def freeze(live: Live, down_s: float, _drain_s: float) -> None:
    """The engine's process is stopped, and goes on after a while."""
    live.signal_engine(0, signal.SIGSTOP)
    live.note("stopped")
    await asyncio.sleep(down_s)
    live.signal_engine(0, signal.SIGCONT)
    live.note("goes on")
    await live.ready(0)
    live.note("ready")


async def roll(live: Live, _down_s: float, drain_s: float) -> None:
    """Every worker in turn drains, is stopped, starts and is ready before the next goes."""
    for number in range(len(live.workers)):
        live.note(f"worker {number + 1} drains")
        await live.drain(number, drain_s)
        await asyncio.to_thread(live.take_out, number)
        live.start_worker(number)
        await live.ready(number)
    live.note("all ready")


async def add(live: Live, _down_s: float, _drain_s: float) -> None:
    """The workers that were not up until now join."""
    new = [number for number in range(len(live.workers)) if live.is_out(number)]
    for number in new:
        live.start_worker(number)
    live.note(f"{len(new)} more start")
    await asyncio.gather(*map(live.ready, new))
    live.note("ready")


EVENTS: dict[str, Callable[[Live, float, float], Awaitable[None]]] = {
    "calm": calm,
    "kill": kill,
    "freeze": freeze,
    "roll": roll,
    "add": add,
}
