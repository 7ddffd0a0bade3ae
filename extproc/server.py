"""The scheduler process: wiring and lifecycle.

Start: health NOT_SERVING, ports open, the first worker reports, SERVING. Stop: NOT_SERVING,
new requests refused, open streams drain until a deadline, ports close.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import grpc
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.admin.context import Admin
from extproc.admin.http import admin_app
from extproc.api import SchedulerService
from extproc.cold_text import ColdText
from extproc.control import FleetService
from extproc.desk import Desk
from extproc.errors import KvgateError, PolicyError
from extproc.policy import Policy, PoolPolicy
from extproc.ports import PortTaken, bind, server_options
from extproc.processor import SERVICE, Processor
from extproc.reload import PolicyReloader
from extproc.scheduler import Scheduler
from extproc.telemetry.metrics import Metrics
from extproc.tokens.keyer import PromptKeyer
from extproc.tokens.template import ChatTemplate
from extproc.tokens.tokenizer import SegmentTokenizer

logger = logging.getLogger("kvgate.server")

TICK_S = 0.05
"""Pace of expiry and ageing; events (release, report, arrival) dispatch at once."""
_DEAF_S = 0.5
"""An event loop that is late by more than this has left reports unread."""

_MAX_REPORT_BYTES = 32 * 1024 * 1024
"""A snapshot of the largest digest takes 20 MB."""
_HEALTH_NAMES = ("", SERVICE, "readiness")
"""Service names that say SERVING when requests may come (Endpoint Picker convention)."""


@dataclass(frozen=True)
class ServeSettings:
    """Where the scheduler listens.

    Attributes:
        grace_s: seconds for open streams at shutdown.
        policy_path: what a reload reads; without it there is none.
    """

    host: str = "127.0.0.1"
    extproc_port: int = 9002
    control_port: int = 9003
    admin_host: str = "127.0.0.1"
    admin_port: int = 9090
    grace_s: float = 10.0
    access_log: bool = False
    policy_path: Path | None = None


def build_keyer(pool: PoolPolicy, policy: Policy) -> PromptKeyer:
    """Load a pool's tokenizer and template.

    Raises:
        PolicyError: the files that the policy names cannot be used.
    """
    # One text at a time gains nothing from the library's own threads, and waking them costs
    # a quarter of the CPU of a short text.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer, template = None, None
    if pool.tokenizer is not None:
        try:
            tokenizer = SegmentTokenizer.load(pool.tokenizer)
            folder = pool.tokenizer if pool.tokenizer.is_dir() else pool.tokenizer.parent
            template = ChatTemplate.load(folder, pool.chat_template)
        except KvgateError as error:
            raise PolicyError(f"pool {pool.model}: {error}") from error
        facts = {
            "model": pool.model,
            "segmented": tokenizer.segmented,
            "chat_template": template is not None,
        }
        logger.info("tokenizer loaded", extra={"facts": facts})
    return PromptKeyer(
        pool,
        policy.tokenization,
        tokenizer,
        template,
        max_prompts=policy.requests.max_prompts,
        media_part_tokens=policy.requests.media_part_tokens,
        strftime_now=lambda text: datetime.now().astimezone().strftime(text),
    )


class SchedulerServer:
    """One scheduler with its ports, from ``start`` to ``stop``."""

    def __init__(self, policy: Policy, settings: ServeSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        clock = time.monotonic
        keyers = {pool.model: build_keyer(pool, policy) for pool in policy.pools}
        rng = random.Random(os.urandom(16))
        self.scheduler = Scheduler(policy, keyers, rng, clock())
        self.metrics.watch(self.scheduler, clock)
        self._cold_text = ColdText(policy.tokenization, self.metrics.count_unkeyed)
        self._desk = Desk(
            scheduler=self.scheduler,
            metrics=self.metrics,
            cold_text=self._cold_text,
            clock=clock,
            access_log=settings.access_log,
        )
        self.processor = Processor(self._desk)
        self.fleet = FleetService(
            self.scheduler, policy.reports, self.metrics, clock, self._desk.wake
        )
        self.api = SchedulerService(self._desk)
        self.reloader = PolicyReloader(settings.policy_path, self._desk)
        self.metrics.open_streams.set_function(lambda: self.processor.open_streams)
        self.metrics.tokenizing.set_function(lambda: self._cold_text.pending)
        self.metrics.agent_streams.set_function(lambda: self.fleet.open_streams)
        self._clock = clock
        self._started_at = clock()
        self._ready_timeout_s = policy.reports.ready_timeout_s
        self._state = "no worker has reported"
        self._health = health.aio.HealthServicer()
        self._extproc = grpc.aio.server(options=server_options(policy.requests.max_body_bytes))
        largest_bytes = max(_MAX_REPORT_BYTES, policy.requests.max_body_bytes)
        self._control = grpc.aio.server(options=server_options(largest_bytes))
        self._admin: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the ports; health says SERVING when the first worker is ready.

        Raises:
            PortTaken: names the port.
        """
        settings = self.settings
        self._extproc.add_generic_rpc_handlers((self.processor.handler(),))
        self._control.add_generic_rpc_handlers((self.fleet.handler(), self.api.handler()))
        for server in (self._extproc, self._control):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        bind(self._extproc, settings.host, settings.extproc_port)
        bind(self._control, settings.host, settings.control_port)
        await self._extproc.start()
        await self._control.start()
        await self._start_admin()
        self._ticker = asyncio.create_task(self._tick())
        facts = {
            "extproc": settings.extproc_port,
            "control": settings.control_port,
            "admin": settings.admin_port,
            "policy": self.scheduler.policy.digest,
        }
        logger.info("listening", extra={"facts": facts})

    async def stop(self) -> None:
        """Drain and close, in this order."""
        self._state = "shutting down"
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        logger.info("draining", extra={"facts": {"streams": self.processor.open_streams}})
        await self.processor.close(self.settings.grace_s)
        self._desk.refuse_waiting()
        self._cold_text.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await self._extproc.stop(1.0)
        await self._control.stop(0.2)
        if self._admin is not None:
            await self._admin.cleanup()
        logger.info("stopped", extra={"facts": {}})

    def readiness(self) -> str:
        """``ready``, ``degraded``, or why not."""
        return self._state

    async def _start_admin(self) -> None:
        admin = Admin(
            scheduler=self.scheduler,
            metrics=self.metrics,
            fleet=self.fleet,
            reloader=self.reloader,
            readiness=self.readiness,
            clock=self._clock,
        )
        self._admin = web.AppRunner(admin_app(admin), access_log=None)
        await self._admin.setup()
        settings = self.settings
        try:
            await web.TCPSite(self._admin, settings.admin_host, settings.admin_port).start()
        except OSError as error:
            raise PortTaken(f"admin port {settings.admin_port}: {error.strerror}") from error

    async def _tick(self) -> None:
        while True:
            due = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            now = self._clock()
            lag_s = max(0.0, now - due)
            self.metrics.loop_lag_s.observe(lag_s)
            if lag_s > _DEAF_S:
                self.scheduler.excuse(lag_s)
            self._desk.wake(self.scheduler.tick(now))
            if self._state not in ("ready", "shutting down"):
                await self._look_for_workers(now)

    async def _look_for_workers(self, now: float) -> None:
        models = self.scheduler.models.values()
        if any(served.pool.table.usable().any() for served in models):
            state = "ready"
        elif now - self._started_at > self._ready_timeout_s:
            state = "degraded"
        else:
            return
        if state != self._state:
            self._state = state
            logger.info("serving", extra={"facts": {"state": state}})
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def _set_health(self, status: int) -> None:
        for name in _HEALTH_NAMES:
            await self._health.set(name, status)


@asynccontextmanager
async def running_scheduler(
    policy: Policy, settings: ServeSettings
) -> AsyncIterator[SchedulerServer]:
    """A started scheduler that always stops."""
    server = SchedulerServer(policy, settings)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


async def serve(policy: Policy, settings: ServeSettings) -> None:
    """Run until SIGTERM or SIGINT; SIGHUP reloads the policy.

    Raises:
        PolicyError, PortTaken: before anything was served.
    """
    stop, hang_up = asyncio.Event(), asyncio.Event()
    events = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: hang_up}
    with _signals(events):
        async with running_scheduler(policy, settings) as server:
            _settle_garbage_collector()
            reloads = asyncio.create_task(_reload_whenever(hang_up, server.reloader))
            await stop.wait()
            reloads.cancel()


def _settle_garbage_collector() -> None:
    """Leave what lives as long as the process out of collections, and collect less often.

    A request makes a few hundred objects and next to no cycles: by default collections are
    about a tenth of its CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


async def _reload_whenever(hang_up: asyncio.Event, reloader: PolicyReloader) -> None:
    while True:
        await hang_up.wait()
        hang_up.clear()
        try:
            await reloader.reload()
        except PolicyError:
            pass  # told by the reloader
        except Exception as error:
            logger.error("defect", exc_info=error)


@contextmanager
def _signals(events: Mapping[signal.Signals, asyncio.Event]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number, event in events.items():
        loop.add_signal_handler(number, event.set)
    try:
        yield
    finally:
        for number in events:
            loop.remove_signal_handler(number)
