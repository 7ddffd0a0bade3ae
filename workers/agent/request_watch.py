"""``RequestWatch``: what the engine's middleware tells, as far as reports need it.

The socket's table knows which requests are in flight; this adds whether that is all of
them, sums for rates, and who hears of requests that end. An API server process (an
instance) says every few seconds how many requests it has: only while every instance's
number is the table's is the list complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from extproc.generated.kvgate.v1 import agent_pb2
from workers.agent.engine_metrics import Total
from workers.agent.signals import RequestSums
from workers.engine_errors import EngineError
from workers.request_events import Ended, Event, FirstChunk, Hello
from workers.request_table import Counts

ERRORS = {
    EngineError.NONE: agent_pb2.ENGINE_ERROR_NONE,
    EngineError.CLIENT: agent_pb2.ENGINE_ERROR_CLIENT,
    EngineError.TOO_LONG: agent_pb2.ENGINE_ERROR_TOO_LONG,
    EngineError.QUEUE_FULL: agent_pb2.ENGINE_ERROR_QUEUE_FULL,
    EngineError.KV_EXHAUSTED: agent_pb2.ENGINE_ERROR_KV_EXHAUSTED,
    EngineError.ENGINE_DEAD: agent_pb2.ENGINE_ERROR_ENGINE_DEAD,
    EngineError.SHUTTING_DOWN: agent_pb2.ENGINE_ERROR_SHUTTING_DOWN,
    EngineError.STREAM_ERROR: agent_pb2.ENGINE_ERROR_STREAM,
    EngineError.CLIENT_GONE: agent_pb2.ENGINE_ERROR_CLIENT_GONE,
    EngineError.OTHER: agent_pb2.ENGINE_ERROR_OTHER,
}
WORKERS_FAULT = frozenset(
    {
        EngineError.KV_EXHAUSTED,
        EngineError.ENGINE_DEAD,
        EngineError.SHUTTING_DOWN,
        EngineError.STREAM_ERROR,
        EngineError.OTHER,
    }
)
"""What counts as the engine's error: neither callers' faults nor back-pressure (case HE1)."""


class RequestSource(Protocol):
    """Who keeps the requests: an ``EventSocket``, or a ``RequestTable`` in tests."""

    @property
    def counts(self) -> Counts:
        """Totals since the start."""

    @property
    def in_flight(self) -> int:
        """Requests in the engine, with a lease or without."""

    @property
    def instances(self) -> tuple[str, ...]:
        """API server processes that are alive."""

    def in_flight_leases(self) -> list[str]:
        """Lease ids of the requests in the engine."""

    def drop_all(self) -> list[str]:
        """The engine is known to be dead."""


class RequestWatch:
    """One engine's requests; ``on_ended`` hears of each with a lease that is over."""

    def __init__(self, on_ended: Callable[[agent_pb2.Outcome], None] = lambda _: None) -> None:
        self._on_ended = on_ended
        self._source: RequestSource | None = None
        self._complete: set[str] = set()
        self._mismatches = 0
        self._ttft_s = 0.0
        self._first_chunks = 0
        self._errors = 0
        self._ended = 0

    def attach(self, source: RequestSource) -> None:
        """Ask ``source`` from now on."""
        self._source = source

    @property
    def known(self) -> bool:
        """The middleware speaks, and every request that runs is known."""
        instances = self._source.instances if self._source else ()
        return bool(instances) and self._complete.issuperset(instances)

    @property
    def count(self) -> int:
        """Requests in flight."""
        return self._source.in_flight if self._source else 0

    @property
    def progress(self) -> tuple[float, float]:
        """Numbers that grow while requests get on."""
        return float(self._first_chunks), float(self._ended)

    @property
    def sums(self) -> RequestSums:
        """Totals since the agent's start."""
        return RequestSums(Total(self._ttft_s, self._first_chunks), self._errors)

    def leases(self) -> list[str]:
        """Leases of the requests in flight."""
        return self._source.in_flight_leases() if self._source else []

    def engine_died(self) -> None:
        """Its processes are gone, and the requests with them."""
        if self._source:
            self._source.drop_all()

    def take(self, event: Event) -> None:
        """Take in an event that the source has taken in already."""
        match event:
            case Hello():
                self._greet(event)
            case FirstChunk():
                self._first_chunks += 1
                self._ttft_s += event.ttft_s
            case Ended():
                self._ended += 1
                self._errors += event.error in WORKERS_FAULT
                if event.lease is not None:
                    self._on_ended(_outcome(event.lease, event))

    def _greet(self, hello: Hello) -> None:
        if self._source is None or hello.reset:
            return
        before, self._mismatches = self._mismatches, self._source.counts.mismatches
        if self._mismatches == before:
            self._complete.add(hello.instance)
        else:
            self._complete.discard(hello.instance)
        self._complete.intersection_update(self._source.instances)


def _outcome(lease: str, ended: Ended) -> agent_pb2.Outcome:
    return agent_pb2.Outcome(
        lease=lease,
        status=ended.status,
        error=ERRORS[ended.error],
        ttft_s=ended.ttft_s,
        duration_s=ended.duration_s,
        prompt_tokens=ended.prompt_tokens,
        output_tokens=ended.output_tokens,
        cached_tokens=ended.cached_tokens,
    )
