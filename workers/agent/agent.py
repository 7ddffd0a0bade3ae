"""``Agent``: one engine wired to its schedulers.

Looks at the engine's pages, follows its KV events and its middleware, and reports load and
cached block keys to every scheduler. It keeps no port open and asks nothing of the engine
that could disturb it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from extproc.generated.kvgate.v1 import agent_pb2
from workers.agent.block_ledger import Left
from workers.agent.cache_follower import CacheFollower
from workers.agent.drain import Drain, Draining
from workers.agent.engine_probe import EngineProbe
from workers.agent.engine_state import Answer, CacheFate, Condition, EngineState, Look
from workers.agent.gpu import Gpu, find_gpu
from workers.agent.pool_terms import DEFAULT_REPORT_INTERVAL_S
from workers.agent.request_watch import RequestWatch
from workers.agent.scheduler_link import CLOSE_GRACE_S, SchedulerLink
from workers.agent.settings import Settings
from workers.agent.worker_cache import Epochs, WorkerCache
from workers.agent.worker_report import WorkerReport
from workers.event_socket import EventSocket
from workers.request_events import Event

LOOK_TIMEOUT_SHARE = 0.8
"""A look must end within this share of the report interval."""
MIN_LOOK_TIMEOUT_S = 0.4
FIRST_LOOK_PAUSE_S = 0.2
"""Pause between looks at an engine that is not ready or in doubt; doubles up to the report
interval."""

log = logging.getLogger("kvgate.agent")


class Agent:
    """One worker's agent; ``run`` once."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._engine = EngineState(settings.frozen_after_s)
        self._cache = WorkerCache(Epochs(wall_clock))
        self._drain = Drain()
        self._requests = RequestWatch(on_ended=self._tell_finished)
        self._worker = WorkerReport(self._engine, self._cache, self._drain, self._requests)
        self._probe = EngineProbe(
            settings.engine,
            api_key=settings.api_key,
            gpu=gpu or find_gpu(settings.gpus),
        )
        self._look_now = asyncio.Event()
        self._looked = asyncio.Event()
        self._follower = CacheFollower(
            settings.event_endpoints(),
            self._worker,
            on_change=self._wake_links,
            on_disconnect=self._look_now.set,
        )
        self._left_logged: set[Left] = set()
        self._links = [
            SchedulerLink(
                target,
                self._worker,
                hello=self._hello,
                on_settled=self._on_settled,
                on_command=self._on_command,
                clock=clock,
                rng=rng or random.Random(),
            )
            for target in settings.schedulers
        ]

    async def run(self, leave: asyncio.Event, leave_at_once: asyncio.Event) -> None:
        """Report until ``leave`` is set, then drain, tell it and close the streams.

        ``leave_at_once`` ends all waiting.
        """
        log.info("agent of %s started", self._settings.address)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._probe)
            if self._settings.socket:
                socket = EventSocket(self._settings.socket, self._on_request, clock=self._clock)
                self._requests.attach(await stack.enter_async_context(socket))
            links = [asyncio.create_task(link.run()) for link in self._links]
            work = [asyncio.create_task(self._look_forever()), *self._follower.tasks(), *links]
            told = asyncio.create_task(self._lead_out(leave, leave_at_once))
            try:
                # None of the others ends by itself: one that does has a bug, told below.
                await asyncio.wait([told, *work], return_when=asyncio.FIRST_COMPLETED)
                await self._close(links)
            finally:
                await _end([told, *work])
        log.info("agent of %s stopped", self._settings.address)

    async def _lead_out(self, leave: asyncio.Event, leave_at_once: asyncio.Event) -> None:
        """Wait for the order to leave and drain."""
        await leave.wait()
        drained = asyncio.create_task(self._drain_for_good())
        hurry = asyncio.create_task(leave_at_once.wait())
        try:
            await asyncio.wait([drained, hurry], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end([drained, hurry])

    async def _drain_for_good(self) -> None:
        self._begin_drain(self._settings.drain_s, for_good=True)
        while self._drain.state is not Draining.DONE:
            self._looked.clear()
            await self._looked.wait()
        if self._drain.cut:
            log.warning("left before the last request on the engine ended")

    async def _close(self, links: Sequence[asyncio.Task[None]]) -> None:
        for link in self._links:
            link.stop()
        if links:
            await asyncio.wait(links, timeout=2 * CLOSE_GRACE_S)

    def _hello(self) -> agent_pb2.Hello | None:
        if not self._engine.models:
            return None
        return agent_pb2.Hello(
            address=self._settings.address,
            models=self._engine.models,
            max_running=self._settings.max_running,
            agent_version=agent_version(),
            kv_events=bool(self._settings.kv_events),
            engine=self._probe.engine,
            labels=self._settings.labels,
        )

    def _wake_links(self) -> None:
        for link in self._links:
            link.wake()

    # Orders and requests.

    def _begin_drain(self, seconds: float, *, for_good: bool = False) -> None:
        if self._drain.state is Draining.NOT:
            log.info("draining for at most %.0f s", seconds)
        self._drain.begin(seconds, self._clock(), for_good=for_good)
        self._look_now.set()
        self._wake_links()

    def _on_command(self, command: agent_pb2.Drain | agent_pb2.Resume) -> None:
        if isinstance(command, agent_pb2.Drain):
            self._begin_drain(command.deadline_s)
            return
        if self._drain.state is not Draining.NOT:
            log.info("serving again")
        self._drain.resume()
        self._wake_links()

    def _on_request(self, event: Event) -> None:
        self._requests.take(event)

    def _tell_finished(self, outcome: agent_pb2.Outcome) -> None:
        for link in self._links:
            link.finished(outcome)

    # The engine's HTTP side.

    async def _look_forever(self) -> None:
        pause_s = FIRST_LOOK_PAUSE_S
        while True:
            interval_s = self._report_interval_s()
            began_s = self._clock()
            timeout_s = max(MIN_LOOK_TIMEOUT_S, LOOK_TIMEOUT_SHARE * interval_s)
            self._observe(await self._probe.look(timeout_s))
            if self._engine.ready and not self._engine.in_doubt:
                wait_s, pause_s = interval_s, FIRST_LOOK_PAUSE_S
            else:
                wait_s, pause_s = min(pause_s, interval_s), 2 * pause_s
            if self._drain.state is Draining.UNDER_WAY:
                wait_s = min(wait_s, FIRST_LOOK_PAUSE_S)
            await self._pause_looking(wait_s - (self._clock() - began_s))

    async def _pause_looking(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._look_now.wait()
        self._look_now.clear()

    def _report_interval_s(self) -> float:
        told = [link.terms.report_interval_s for link in self._links if link.terms]
        return min(told, default=DEFAULT_REPORT_INTERVAL_S)

    def _observe(self, look: Look) -> None:
        engine, now_s = self._engine, self._clock()
        before = (engine.condition, engine.metrics_broken, engine.adapters, self._drain.state)
        fate = engine.observe(look, now_s, self._requests)
        if look.answer is Answer.REFUSED:
            self._requests.engine_died()
        self._drain.observe(self._worker.running_requests(), now_s)
        self._log_changes(*before)
        self._follow_fate(fate)
        self._log_left_out()
        self._looked.set()
        self._wake_links()

    def _log_changes(
        self,
        condition: Condition,
        metrics_broken: bool,
        adapters: tuple[str, ...],
        draining: Draining,
    ) -> None:
        engine = self._engine
        if engine.condition is not condition:
            log.info("engine is %s", _described(engine))
        if engine.metrics_broken is not metrics_broken:
            log.warning("metrics page is %s", "broken" if engine.metrics_broken else "fine again")
        if engine.adapters != adapters:
            log.info("adapters: %s", ", ".join(engine.adapters) or "none")
        if self._drain.state is not draining:
            log.info("drained%s", ": time is over" if self._drain.cut else "")

    def _follow_fate(self, fate: CacheFate) -> None:
        if fate is CacheFate.KEPT:
            return
        log.info("engine's cache is empty: %s", fate.value)
        self._cache.clear()
        if fate is CacheFate.NEW_LIFE:
            self._follower.restarted()

    def _log_left_out(self) -> None:
        left = self._cache.left()
        for reason in left.keys() - self._left_logged:
            self._left_logged.add(reason)
            log.warning("blocks are left out of the digest: %s", reason.value)

    def _on_settled(self, is_new: bool) -> None:
        """A scheduler told its terms; ``is_new`` if no ledger has been kept by them."""
        # The report interval may be another.
        self._look_now.set()
        self._follower.settled(is_new)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs; raise what went wrong."""
    done = [task for task in tasks if task.done() and not task.cancelled()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _described(engine: EngineState) -> str:
    match engine.condition:
        case Condition.READY:
            return f"ready, models: {', '.join(engine.models)}"
        case Condition.STARTING:
            return "not ready: it lists no models, or is not healthy yet"
        case Condition.ASLEEP:
            return "not ready: it sleeps"
        case Condition.FROZEN:
            return "not ready: requests run and no counter moves"
        case Condition.DOWN:
            unhealthy = engine.answer is Answer.UP
            return f"not ready: {'its health page says so' if unhealthy else 'no answer'}"


@cache
def agent_version() -> str:
    """Version of the installed kvgate."""
    try:
        return metadata.version("kvgate")
    except metadata.PackageNotFoundError:
        return "unknown"
