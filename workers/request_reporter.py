"""``RequestReporter``: what one API server process tells the agent of its requests.

It keeps the requests in flight, so that an agent that starts later, or that missed
something, can be told all of them again. Standard library only, Python 3.10.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

from workers.engine_errors import EngineError
from workers.event_sender import EventSender
from workers.request_events import Ended, FirstChunk, Hello, Started, encode
from workers.response_scan import Usage

BEAT_S = 5.0
"""A process says this often that it lives."""
RETELL_BEATS = 12
"""Every minute, all requests in flight are told again."""


class Outcome(NamedTuple):
    """How a request ended."""

    status: int
    error: EngineError
    duration_s: float
    ttft_s: float | None
    usage: Usage
    streamed: bool


class Reporter(Protocol):
    """Who is told about requests."""

    def start(self) -> None:
        """Called in the event loop, as often as one likes."""

    def started(self, lease: str | None, endpoint: str) -> int:
        """A request arrived; its number."""

    def first_chunk(self, number: int, ttft_s: float) -> None:
        """Its streamed answer begins."""

    def ended(self, number: int, outcome: Outcome) -> None:
        """It is over."""

    def close(self) -> None:
        """Nothing more is told."""


class NoReporter:
    """Stands in where no socket is configured."""

    def start(self) -> None:
        """Nothing to start."""

    def started(self, lease: str | None, endpoint: str) -> int:
        """Nobody is told."""
        return 0

    def first_chunk(self, number: int, ttft_s: float) -> None:
        """Nobody is told."""

    def ended(self, number: int, outcome: Outcome) -> None:
        """Nobody is told."""

    def close(self) -> None:
        """Nothing to close."""


class RequestReporter:
    """Tells an agent, whenever there is one."""

    def __init__(
        self,
        sender: EventSender,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._sender = sender
        self._clock = clock
        self._wall_clock = wall_clock
        self._instance = os.urandom(8).hex()
        self._number = 0
        self._in_flight: dict[int, Started] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._beats = 0
        self._beat_at_s = clock()

    def start(self) -> None:
        """Begin to beat."""
        if self._timer is None:
            self._beat_at_s = self._clock()
            self._sender_ready()
            self._wait_for_beat()

    def started(self, lease: str | None, endpoint: str) -> int:
        """A request arrived; its number."""
        self._number += 1
        event = Started(self._instance, self._number, lease, endpoint, self._wall_clock())
        if self._sender_ready():
            self._sender.send(encode(event))
        self._in_flight[self._number] = event
        return self._number

    def first_chunk(self, number: int, ttft_s: float) -> None:
        """Its streamed answer begins."""
        if self._sender_ready():
            self._sender.send(encode(FirstChunk(self._instance, number, ttft_s)))

    def ended(self, number: int, outcome: Outcome) -> None:
        """It is over."""
        started = self._in_flight[number]
        if self._sender_ready():
            self._sender.send(encode(_ended(started, outcome)))
        # Told while it is in flight: an agent just found hears of it before it hears the end.
        del self._in_flight[number]

    def beat(self) -> None:
        """Say that this process lives; after silence or loss, tell everything again."""
        now_s = self._clock()
        silent_s, self._beat_at_s = now_s - self._beat_at_s, now_s
        self._beats += 1
        if not self._sender.connected:
            self._sender_ready()
        elif self._sender.lost or silent_s > 2 * BEAT_S or self._beats % RETELL_BEATS == 0:
            self._tell_everything()
        else:
            self._hello(reset=False)

    def close(self) -> None:
        """Stop beating and forget the agent."""
        if self._timer is not None:
            self._timer.cancel()
        self._sender.close()

    def _wait_for_beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._on_timer)

    def _on_timer(self) -> None:
        self._wait_for_beat()
        self.beat()

    def _sender_ready(self) -> bool:
        """True if there is an agent; a new one has then been told what is in flight."""
        if self._sender.connected:
            return True
        if not self._sender.connect():
            return False
        self._tell_everything()
        return self._sender.connected

    def _tell_everything(self) -> None:
        if self._sender.backlogged:
            # The agent is behind: more would only be lost. The next beat comes.
            self._sender.lost = True
            return
        self._sender.lost = False
        self._hello(reset=True)
        for started in self._in_flight.values():
            self._sender.send(encode(started))
        self._hello(reset=False)

    def _hello(self, *, reset: bool) -> None:
        count, dropped = len(self._in_flight), self._sender.dropped
        self._sender.send(encode(Hello(self._instance, os.getpid(), reset, count, dropped)))


def _ended(started: Started, outcome: Outcome) -> Ended:
    return Ended(
        instance=started.instance,
        number=started.number,
        lease=started.lease,
        status=outcome.status,
        error=outcome.error,
        duration_s=outcome.duration_s,
        ttft_s=outcome.ttft_s,
        prompt_tokens=outcome.usage.prompt_tokens,
        output_tokens=outcome.usage.output_tokens,
        cached_tokens=outcome.usage.cached_tokens,
        streamed=outcome.streamed,
    )
