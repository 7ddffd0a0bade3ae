"""``SchedulerLink``: one Report stream to one scheduler, kept up for ever.

Connects once the engine has told its models, says Hello, then writes whatever the report
book has due, one message at a time: gRPC's flow control is the only queue. A lost stream
is opened anew with exponential backoff and starts from a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from extproc.generated.kvgate.v1 import agent_pb2
from workers.agent.pool_terms import PoolTerms, SettingsError
from workers.agent.report_book import ReportBook
from workers.agent.worker_report import WorkerReport

METHOD = "/kvgate.v1.Fleet/Report"
CLOSE_GRACE_S = 1.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 3.0
CHANNEL_OPTIONS = (
    # With keepalive on, the kernel drops a connection whose bytes stay unacknowledged for the
    # timeout (TCP_USER_TIMEOUT). Loads flow every second, so a dead host is seen in 10 s. Pings
    # themselves stay at 5 minutes, the most that gRPC servers tolerate by default.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The link does its own backoff; gRPC's would reach two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
)

log = logging.getLogger("kvgate.agent")


class Backoff:
    """Growing pauses, each random between half and all of its bound."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.reset()

    def reset(self) -> None:
        """It worked: start small again."""
        self._bound_s = FIRST_BACKOFF_S

    def next_s(self) -> float:
        """Seconds to wait before the next try, 0.2 to 3."""
        bound_s = self._bound_s
        self._bound_s = min(MAX_BACKOFF_S, 2 * bound_s)
        return self._rng.uniform(max(FIRST_BACKOFF_S, bound_s / 2), bound_s)


class SchedulerLink:
    """Reports of one worker to the scheduler at ``target`` (host:port)."""

    def __init__(
        self,
        target: str,
        worker: WorkerReport,
        *,
        hello: Callable[[], agent_pb2.Hello | None],
        on_settled: Callable[[bool], None],
        on_command: Callable[[agent_pb2.Drain | agent_pb2.Resume], None],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.terms: PoolTerms | None = None
        """What the scheduler told last."""
        self._target = target
        self._worker = worker
        self._cache = worker.cache
        self._hello = hello
        self._on_settled = on_settled
        self._on_command = on_command
        self._book: ReportBook | None = None
        self._clock = clock
        self._backoff = Backoff(rng)
        self._wake = asyncio.Event()
        self._stopping = False
        self._connected: bool | None = None

    def wake(self) -> None:
        """Something may be due earlier than thought."""
        self._wake.set()

    def finished(self, outcome: agent_pb2.Outcome) -> None:
        """A request ended on the engine; a scheduler that is away never hears of it."""
        if self._book:
            self._book.finished(outcome, self._clock())
            self._wake.set()

    def stop(self) -> None:
        """Close the stream in order and return from ``run``."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Report until stopped."""
        while not self._stopping:
            hello = self._hello()
            if hello is None:
                await self._pause(None)
            elif not await self._session(hello):
                await self._wait_stopped(self._backoff.next_s())

    async def _session(self, hello: agent_pb2.Hello) -> bool:
        """One stream from Hello to its end; True if this side ended it."""
        self._book = book = ReportBook(self._worker)
        began_s = self._clock()
        async with grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(
                METHOD,
                request_serializer=agent_pb2.AgentMessage.SerializeToString,
                response_deserializer=agent_pb2.SchedulerMessage.FromString,
            )()
            tasks = [
                asyncio.create_task(self._write(call, book, hello)),
                asyncio.create_task(self._read(call, book)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                writer = tasks[0]
                if writer.done() and writer.exception() is None:
                    await self._close(call)
                    return True
                # A scheduler that takes agents in and drops them at once is not a success.
                if self._connected and self._clock() - began_s > MAX_BACKOFF_S:
                    self._backoff.reset()
                await self._log_lost(call, tasks)
                return False
            finally:
                self._book = None
                self._cache.unlisten(book)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: Any, book: ReportBook, hello: agent_pb2.Hello) -> None:
        """Write what is due until stopped, or until the engine serves another model."""
        await call.write(agent_pb2.AgentMessage(hello=hello))
        while not self._stopping and self._is_still(hello):
            now_s = self._clock()
            message = book.next_message(now_s)
            if message is None:
                await self._pause(book.due_at_s() - now_s)
            else:
                await call.write(message)
        for message in book.last_words(self._clock()):
            await call.write(message)

    def _is_still(self, hello: agent_pb2.Hello) -> bool:
        # Adapters come and go in loads.
        return list(self._worker.engine.models[:1]) == hello.models[:1]

    async def _read(self, call: Any, book: ReportBook) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("kind")
            if kind == "settings":
                self._settle(message.settings, book)
            elif kind == "resync":
                book.resync()
            elif kind == "drain":
                self._on_command(message.drain)
            elif kind == "resume":
                self._on_command(message.resume)
            elif kind == "advice":
                self._heed(message.advice, book)
            self._wake.set()

    def _settle(self, settings: agent_pb2.PoolSettings, book: ReportBook) -> None:
        try:
            terms = PoolTerms.of(settings)
        except SettingsError as error:
            log.error("scheduler %s told unusable settings: %s", self._target, error)
            return
        ledger, is_new = self._cache.open(terms.kind, holder=self)
        self._cache.listen(book, ledger)
        book.settle(terms, ledger)
        if not self._connected or terms != self.terms:
            log.info("scheduler %s connected: pool %r", self._target, terms.pool)
        self.terms = terms
        self._connected = True
        self._on_settled(is_new)

    def _heed(self, advice: agent_pb2.ReplicaAdvice, book: ReportBook) -> None:
        new = book.heed(advice, self._clock())
        if new:
            log.info("%d hot prefixes need not be kept: other workers hold them", new)

    async def _close(self, call: Any) -> None:
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await call.done_writing()
                await call.code()
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            call.cancel()

    async def _log_lost(self, call: Any, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            error = task.exception() if task.done() else None
            if error is not None and not isinstance(
                error, grpc.RpcError | asyncio.InvalidStateError | grpc.aio.UsageError
            ):
                log.error("link to scheduler %s failed", self._target, exc_info=error)
        if self._connected is not False:
            call.cancel()
            code, details = await call.code(), str(await call.details())
            log.warning("scheduler %s lost: %s %.200r", self._target, code.name, details)
        self._connected = False

    async def _pause(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _wait_stopped(self, seconds: float) -> None:
        deadline_s = self._clock() + seconds
        while not self._stopping and (left_s := deadline_s - self._clock()) > 0:
            await self._pause(left_s)
