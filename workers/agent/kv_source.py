"""``KvEventSource``: the engine's KV events in order, over ZMQ.

A SUB socket hears batches live; it reconnects by itself. Batches are numbered from 0 in
each life of the engine. Missing ones are asked for at the replay endpoint (a ROUTER that
keeps the last 10,000), also at start, so that an agent younger than its engine knows the
cache. What replay cannot close is told as a ``Gap``; numbers that go back as a ``Reset``.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeAlias

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from workers.agent.kv_events import Batch, decode_batch

SUB_BACKLOG = 100_000
"""Batches that wait unread at most; vLLM's publisher keeps as many."""
REPLAY_BACKLOG = 20_000
"""Above the engine's 10,000: a ROUTER drops what its reader has no room for."""
GATHER_S = 0.1
"""An engine tells of every step that fills a block, some 50 a second. Waiting this long after one
takes in the next few with it, at a fraction of their cost; digests are told less often anyway."""
BREATHE_EVERY = 16
"""Batches taken in before others in this event loop have their turn."""

_END_OF_REPLAY = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class Numbered:
    """A batch with its number."""

    seq: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches that are lost for good: what the cache holds is not known any more."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Everything told so far is void; the cache is told from its beginning."""

    engine_restarted: bool
    """The numbers went back, so this is another engine; False after ``rewind``."""


Item: TypeAlias = Numbered | Gap | Reset


class KvEventSource:
    """Reads one engine's events; use as ``async for item in source.items()``."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        on_disconnect: Callable[[], None] = lambda: None,
        replay_timeout_s: float = 5.0,
        poll_s: float = 0.5,
        quiet_s: float = 2.0,
    ) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._on_disconnect = on_disconnect
        self._replay_timeout_s = replay_timeout_s
        self._poll_s = poll_s
        self._quiet_s = quiet_s
        # Who asks an endpoint that does not answer holds the live events up.
        self._replay_answers = False
        self._last = -1
        self._last_ts = float("-inf")
        self._last_live = -1
        self._rewind = False
        self._since_breath = 0

    @property
    def can_replay(self) -> bool:
        """Whether the past can be asked for."""
        return bool(self._replay_endpoint)

    def rewind(self) -> None:
        """Expect number 0 again; with replay, tell all again within ``poll_s``, after a Reset."""
        if self.can_replay:
            self._rewind = True
        else:
            self._start_over(engine_restarted=False)

    async def items(self) -> AsyncGenerator[Item, None]:
        """Batches in order, each number once, with gaps and resets between. Never ends."""
        context = zmq.asyncio.Context()
        try:
            sub = context.socket(zmq.SUB)
            monitor = sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            _tune(sub, SUB_BACKLOG)
            sub.subscribe(b"")
            sub.connect(self._endpoint)
            watch = asyncio.create_task(self._watch(monitor))
            try:
                async for item in self._replayed(context):
                    yield item
                async for item in self._live(context, sub):
                    yield item
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                sub.disable_monitor()
        finally:
            context.destroy(linger=0)

    async def _live(
        self, context: zmq.asyncio.Context, sub: zmq.asyncio.Socket
    ) -> AsyncGenerator[Item, None]:
        quiet_polls, polls = 0, math.ceil(self._quiet_s / self._poll_s)
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(sub)
        while True:
            if self._rewind:
                yield self._start_over(engine_restarted=False)
                async for item in self._replayed(context):
                    yield item
            if not await sub.poll(int(self._poll_s * 1000)):
                quiet_polls += 1
                # No later number tells that the newest batch of all was lost.
                if quiet_polls % polls == 0 and self._replay_answers:
                    async for item in self._replayed(context):
                        yield item
                continue
            quiet_polls = 0
            await asyncio.sleep(GATHER_S)
            while not self._rewind and (frames := _waiting(plain)):
                async for item in self._heard(context, *_parse(frames)):
                    yield item
                await self._breathe()

    async def _heard(
        self, context: zmq.asyncio.Context, seq: int | None, payload: bytes
    ) -> AsyncGenerator[Item, None]:
        if seq is None:
            return
        batch = decode_batch(payload)
        if self._is_new_life(seq, batch.ts):
            yield self._start_over(engine_restarted=True)
        self._last_live = seq
        if seq > self._last + 1:
            async for item in self._replayed(context):
                yield item
        for item in self._accept(seq, batch):
            yield item

    def _is_new_life(self, seq: int, ts: float | None) -> bool:
        # A live batch may also repeat what replay has told already; only its time differs.
        if seq > self._last:
            return False
        return seq <= self._last_live or (ts is not None and ts > self._last_ts)

    def _start_over(self, *, engine_restarted: bool) -> Reset:
        self._rewind = False
        self._last = self._last_live = -1
        self._last_ts = float("-inf")
        return Reset(engine_restarted)

    def _accept(self, seq: int, batch: Batch) -> list[Item]:
        if seq <= self._last:
            return []
        told: list[Item] = [Gap(self._last + 1, seq - 1)] if seq > self._last + 1 else []
        self._last = seq
        if batch.ts is not None:
            self._last_ts = batch.ts
        return [*told, Numbered(seq, batch)]

    async def _replayed(self, context: zmq.asyncio.Context) -> AsyncGenerator[Item, None]:
        if not self._replay_endpoint:
            return
        # A socket for each question: a late answer to an old one is never mixed in.
        dealer = context.socket(zmq.DEALER)
        try:
            _tune(dealer, REPLAY_BACKLOG)
            dealer.connect(self._replay_endpoint)
            await dealer.send_multipart([b"", struct.pack(">Q", self._last + 1)])
            self._replay_answers = False
            while await dealer.poll(int(self._replay_timeout_s * 1000)):
                frames = await dealer.recv_multipart()
                if frames[-2:-1] == [_END_OF_REPLAY]:
                    self._replay_answers = True
                    break
                seq, payload = _parse(frames)
                for item in [] if seq is None else self._accept(seq, decode_batch(payload)):
                    yield item
                await self._breathe()
        finally:
            dealer.close(linger=0)

    async def _breathe(self) -> None:
        self._since_breath = (self._since_breath + 1) % BREATHE_EVERY
        if not self._since_breath:
            await asyncio.sleep(0)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._on_disconnect()


def _tune(socket: zmq.asyncio.Socket, backlog: int) -> None:
    socket.setsockopt(zmq.RCVHWM, backlog)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)


def _waiting(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The next message if it is here already, else nothing."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return []


def _parse(frames: list[bytes]) -> tuple[int | None, bytes]:
    # [topic, seq, payload] live, [b"", topic, seq, payload] or [b"", seq, payload] replayed.
    if len(frames) < 3 or len(frames[-2]) != 8:
        return None, b""
    return struct.unpack(">Q", frames[-2])[0], frames[-1]
