"""The engine's clock: one task that steps the core while there is work.

Steps are timed against a running deadline, so a late wake-up shortens the next sleep and
errors do not add up. Idle costs nothing: the task waits for the next request.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from workers.simulator.engine import Engine, StepResult
from workers.simulator.errors import engine_stopped, queue_full
from workers.simulator.generation import Generation
from workers.simulator.kv_events import KvEventPublisher
from workers.simulator.metrics import EngineMetrics
from workers.simulator.requests import Output

MAX_LAG_S = 0.25
"""A loop further behind than this (a stopped process) starts afresh and does not catch up."""


@dataclass(slots=True)
class _Flight:
    generation: Generation
    index: int
    arrived_s: float
    last_token_s: float = 0.0


class EngineLoop:
    """Feeds the engine and hands out what it makes.

    Args:
        max_queued: requests running and waiting before :meth:`submit` refuses.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: EngineMetrics,
        publisher: KvEventPublisher | None = None,
        max_queued: int | None = None,
    ) -> None:
        self.engine = engine
        self._metrics = metrics
        self._publisher = publisher
        self._max_queued = max_queued
        self._flights: dict[str, _Flight] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._thaw_timer: asyncio.TimerHandle | None = None
        self._closing = False

    def submit(self, generation: Generation) -> None:
        """Queue all sequences of a generation.

        Raises:
            ApiError: the queue is full or the engine is stopping; nothing was queued.
        """
        if self._closing:
            raise engine_stopped()
        if self._max_queued is not None and len(self._flights) >= self._max_queued:
            self._metrics.rejected("max_num_queued_reqs")
            raise queue_full()
        now = _clock()
        for index, sequence in enumerate(generation.sequences):
            self.engine.add(sequence.request, now)
            self._flights[sequence.request.request_id] = _Flight(generation, index, now)
        self._idle.clear()
        self._wake.set()

    def cancel(self, generation: Generation) -> None:
        """Drop what is left of a generation; harmless when it has ended."""
        for sequence in generation.sequences:
            request_id = sequence.request.request_id
            if self._flights.pop(request_id, None):
                self.engine.abort(request_id)
        self._note_idle()

    def freeze(self, seconds: float) -> None:
        """Stop stepping for a while, as a hung engine does; HTTP goes on. 0 ends it."""
        if self._thaw_timer is not None:
            self._thaw_timer.cancel()
        self._thawed.clear()
        loop = asyncio.get_running_loop()
        self._thaw_timer = loop.call_later(seconds, self._thawed.set)

    async def run(self) -> None:
        """Step until cancelled."""
        due = _clock()
        while True:
            due = await self._thaw(due)
            step = self.engine.begin(due)
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                due = _clock()
                continue
            self._metrics.busy.begin(_clock())
            due += step.duration_s
            await asyncio.sleep(max(0.0, due - _clock()))
            self._metrics.busy.end(_clock())
            due = await self._thaw(due)
            if due < _clock() - MAX_LAG_S:
                due = _clock()
            self._deliver(self.engine.complete(step))

    async def drain(self, seconds: float) -> None:
        """Take nothing new; let requests finish for a while, then fail the rest."""
        self._closing = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for flight in list(self._flights.values()):
                flight.generation.fail(engine_stopped())

    async def _thaw(self, due: float) -> float:
        if self._thawed.is_set():
            return due
        await self._thawed.wait()
        return max(due, _clock())

    def _deliver(self, result: StepResult) -> None:
        # Events leave before the answer does, as the real engine's do.
        if self._publisher is not None and result.events:
            self._publisher.publish(result.events, time.time())
        now = _clock()
        for output in result.outputs:
            flight = self._flights.get(output.request.request_id)
            if flight is not None:
                self._observe(output, flight, now)
                generated = output.request.generated
                flight.generation.receive(flight.index, generated, output.finish_reason)
        self._note_idle()

    def _observe(self, output: Output, flight: _Flight, now: float) -> None:
        request = output.request
        if request.generated <= 1:
            queued = (request.scheduled_s or now) - flight.arrived_s
            self._metrics.first_token(now - flight.arrived_s, max(0.0, queued))
        else:
            self._metrics.next_token(now - flight.last_token_s)
        flight.last_token_s = now
        if output.finish_reason is not None:
            del self._flights[request.request_id]
            self._metrics.finished(now - flight.arrived_s, output.finish_reason)

    def _note_idle(self) -> None:
        if not self._flights:
            self._idle.set()


def _clock() -> float:
    return asyncio.get_running_loop().time()
