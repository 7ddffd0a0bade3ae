"""The agent beside one vLLM worker: ``python -m workers.agent --engine http://IP:PORT ...``.

Looks at the engine's /metrics and models, follows its KV events and reports load and
cached block keys to every scheduler. It keeps no port open and asks nothing of the engine
that could disturb it. SIGTERM and SIGINT close the streams and end it with status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata

import zmq

from extproc.generated.kvgate.v1 import agent_pb2
from extproc.telemetry.logs import set_up_logging
from workers.agent_settings import Settings, parse_settings
from workers.block_ledger import Left
from workers.engine_probe import EngineProbe
from workers.engine_state import Answer, CacheFate, EngineState, Look
from workers.kv_source import Gap, Item, KvEventSource, Numbered, Reset
from workers.pool_terms import DEFAULT_REPORT_INTERVAL_S
from workers.scheduler_link import CLOSE_GRACE_S, SchedulerLink
from workers.worker_cache import Epochs, WorkerCache

LOOK_TIMEOUT_SHARE = 0.8
"""A look must end within this share of the report interval."""
FIRST_LOOK_PAUSE_S = 0.2
"""Pause between looks at an engine that is not ready; doubles up to the report interval."""
EVENTS_RETRY_S = 1.0

log = logging.getLogger("kvgate.agent")


class Agent:
    """Wires one engine to its schedulers."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._engine = EngineState()
        self._cache = WorkerCache(Epochs(wall_clock))
        self._look_now = asyncio.Event()
        self._has_ledger = asyncio.Event()
        self._source: KvEventSource | None = None
        self._left_logged: set[Left] = set()
        self._links = [
            SchedulerLink(
                target,
                self._engine,
                self._cache,
                hello=self._hello,
                on_settled=self._on_settled,
                clock=clock,
                rng=rng or random.Random(),
            )
            for target in settings.schedulers
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Report until ``stop`` is set, then close the streams."""
        log.info("agent of %s started", self._settings.address)
        async with EngineProbe(self._settings.engine, api_key=self._settings.api_key) as probe:
            tasks = [asyncio.create_task(self._look_forever(probe))]
            if self._settings.kv_events:
                tasks.append(asyncio.create_task(self._follow_events()))
            links = [asyncio.create_task(link.run()) for link in self._links]
            stopped = asyncio.create_task(stop.wait())
            try:
                # None of the others ends by itself: one that does has a bug, told below.
                await asyncio.wait([stopped, *tasks, *links], return_when=asyncio.FIRST_COMPLETED)
                await self._close(links)
            finally:
                everything = [stopped, *tasks, *links]
                failed = [task for task in everything if task.done() and not task.cancelled()]
                for task in everything:
                    task.cancel()
                await asyncio.gather(*everything, return_exceptions=True)
            for task in failed:
                task.result()
        log.info("agent of %s stopped", self._settings.address)

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
        )

    def _wake_links(self) -> None:
        for link in self._links:
            link.wake()

    # The engine's HTTP side.

    async def _look_forever(self, probe: EngineProbe) -> None:
        pause_s = FIRST_LOOK_PAUSE_S
        while True:
            interval_s = self._report_interval_s()
            began_s = self._clock()
            self._observe(await probe.look(LOOK_TIMEOUT_SHARE * interval_s))
            if self._engine.ready:
                wait_s, pause_s = interval_s, FIRST_LOOK_PAUSE_S
            else:
                wait_s, pause_s = min(pause_s, interval_s), 2 * pause_s
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
        engine = self._engine
        before = (engine.ready, engine.metrics_broken)
        fate = engine.observe(look, self._clock())
        if engine.ready is not before[0]:
            log.info("engine is %s", _readiness(engine))
        if engine.metrics_broken is not before[1]:
            log.warning("metrics page is %s", "broken" if engine.metrics_broken else "fine again")
        self._follow_fate(fate)
        self._log_left_out()
        self._wake_links()

    def _follow_fate(self, fate: CacheFate) -> None:
        if fate is CacheFate.KEPT:
            return
        log.info("engine's cache is empty: %s", fate.value)
        self._cache.clear()
        if fate is CacheFate.NEW_LIFE and self._source:
            self._source.rewind()

    def _log_left_out(self) -> None:
        left = self._cache.left()
        for reason in left.keys() - self._left_logged:
            self._left_logged.add(reason)
            log.warning("blocks are left out of the digest: %s", reason.value)

    # The engine's KV events.

    def _on_settled(self, is_new: bool) -> None:
        """A scheduler told its terms; ``is_new`` if no ledger has been kept by them."""
        # The report interval may be another.
        self._look_now.set()
        self._has_ledger.set()
        if not is_new or self._source is None:
            return
        if self._source.can_replay:
            self._source.rewind()
        else:
            log.warning("keys changed and there is no replay: what is cached now stays unknown")

    async def _follow_events(self) -> None:
        # Without a ledger there is nothing to key; the replay then tells the past.
        await self._has_ledger.wait()
        while True:
            self._source = KvEventSource(
                self._settings.kv_events,
                self._settings.kv_replay,
                on_disconnect=self._look_now.set,
            )
            try:
                async with contextlib.aclosing(self._source.items()) as items:
                    async for item in items:
                        self._take(item)
            except zmq.ZMQError as error:
                log.error("KV events: %s", error)
            # A new source tells from the beginning, so nothing is known until it has.
            self._cache.clear()
            await asyncio.sleep(EVENTS_RETRY_S)

    def _take(self, item: Item) -> None:
        match item:
            case Numbered():
                self._cache.apply(item.batch)
            case Gap():
                log.warning("KV events %d to %d are lost", item.first, item.last)
                self._cache.clear()
            case Reset():
                if item.engine_restarted:
                    log.info("engine's cache is empty: its event numbers went back")
                    self._engine.new_life_heard()
                self._cache.clear()
        self._wake_links()


def _readiness(engine: EngineState) -> str:
    if engine.ready:
        return f"ready, models: {', '.join(engine.models)}"
    if engine.asleep:
        return "not ready: it sleeps"
    listed = "it lists no models" if engine.answer is Answer.UP else "no answer"
    return f"not ready: {listed}"


def agent_version() -> str:
    """Version of the installed kvgate."""
    try:
        return metadata.version("kvgate")
    except metadata.PackageNotFoundError:
        return "unknown"


async def serve(settings: Settings) -> None:
    """Run an agent until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Agent(settings).run(stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    settings, log_format = parse_settings(sys.argv[1:] if arguments is None else arguments)
    set_up_logging(log_format)
    asyncio.run(serve(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
