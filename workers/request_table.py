"""``RequestTable``: which requests an engine is serving, from its middleware's datagrams.

Several API server processes tell side by side; each is an instance. One that falls silent
or dies takes its requests with it. What is kept is bounded. Pure: time is handed in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from workers.engine_errors import EngineError
from workers.request_events import Ended, Event, FirstChunk, Hello, Started, decode

SILENT_AFTER_S = 15.0
"""Three beats missed: the process is dead or frozen."""
MAX_IN_FLIGHT = 16_384
MAX_INSTANCES = 64
MAX_FINISHED = 4096


@dataclass(slots=True)
class Counts:
    """Totals since the table was made."""

    received: int = 0
    garbage: int = 0
    """Datagrams that are none of ours."""
    started: int = 0
    ended: int = 0
    unknown_ends: int = 0
    """Requests that ended without being known as in flight; their end is passed on."""
    unheard_ends: int = 0
    """Requests whose end got lost; a later telling showed that they are over."""
    overflowed: int = 0
    """Requests not kept because too many are in flight."""
    mismatches: int = 0
    """Instances that had another number in flight than is known here."""
    dropped_by_engine: int = 0
    """Datagrams that the instances could not send, as far as they told."""
    silent: int = 0
    """Instances given up because they said nothing any more."""


@dataclass(frozen=True, slots=True)
class Window:
    """What happened since the last window was taken."""

    started: int = 0
    ended: int = 0
    first_chunks: int = 0
    ttft_mean_s: float | None = None
    """Of streamed answers that began; None if none did."""
    errors: dict[EngineError, int] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    """Lease ids of requests that ended; the newest 4,096."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of those prompt tokens, for answers that tell both."""


@dataclass(slots=True)
class _Instance:
    heard_at_s: float
    requests: dict[int, str | None] = field(default_factory=dict)
    unconfirmed: dict[int, str | None] = field(default_factory=dict)
    """Known before the instance began to tell everything again."""
    dropped: int = 0

    def leases(self) -> Iterator[str | None]:
        yield from self.requests.values()
        yield from self.unconfirmed.values()

    def __len__(self) -> int:
        return len(self.requests) + len(self.unconfirmed)


class RequestTable:
    """Fed with datagrams in the order they arrive."""

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self.counts = Counts()
        self._max_in_flight = max_in_flight
        self._instances: dict[str, _Instance] = {}
        self._in_flight = 0
        self._window = _OpenWindow()

    @property
    def in_flight(self) -> int:
        """Requests, with a lease or without."""
        return self._in_flight

    @property
    def instances(self) -> tuple[str, ...]:
        """API server processes that are alive."""
        return tuple(self._instances)

    def in_flight_leases(self) -> list[str]:
        """Lease ids of the requests in flight; a request without one is left out."""
        instances = self._instances.values()
        return [lease for instance in instances for lease in instance.leases() if lease]

    def take(self, datagram: bytes, now_s: float) -> Event | None:
        """Fold a datagram in; the event, or None if it is garbage or known already."""
        self.counts.received += 1
        event = decode(datagram)
        if event is None:
            self.counts.garbage += 1
            return None
        instance = self._instance(event.instance, now_s)
        news = True
        match event:
            case Hello():
                self._greet(instance, event)
            case Started():
                news = self._begin(instance, event)
            case FirstChunk():
                self._window.note_first_chunk(event)
            case Ended():
                self._end(instance, event)
        return event if news else None

    def take_window(self) -> Window:
        """What happened since the last call."""
        window, self._window = self._window, _OpenWindow()
        return window.closed()

    def expire(self, now_s: float) -> list[str]:
        """Give up instances that fell silent; the leases that were in flight there."""
        silent = [
            name
            for name, instance in self._instances.items()
            if now_s - instance.heard_at_s > SILENT_AFTER_S
        ]
        self.counts.silent += len(silent)
        return [lease for name in silent for lease in self.drop_instance(name)]

    def drop_instance(self, name: str) -> list[str]:
        """Forget a process that is dead; the leases that were in flight there."""
        instance = self._instances.pop(name, None)
        if instance is None:
            return []
        self._in_flight -= len(instance)
        return [lease for lease in instance.leases() if lease]

    def drop_all(self) -> list[str]:
        """The engine is gone: forget all its processes."""
        return [lease for name in self.instances for lease in self.drop_instance(name)]

    def _instance(self, name: str, now_s: float) -> _Instance:
        instance = self._instances.get(name)
        if instance is None:
            if len(self._instances) >= MAX_INSTANCES:
                self.drop_instance(min(self._instances, key=self._heard_at_s))
            instance = self._instances[name] = _Instance(now_s)
        instance.heard_at_s = now_s
        return instance

    def _heard_at_s(self, name: str) -> float:
        return self._instances[name].heard_at_s

    def _greet(self, instance: _Instance, hello: Hello) -> None:
        self.counts.dropped_by_engine += max(0, hello.dropped - instance.dropped)
        instance.dropped = hello.dropped
        if hello.reset:
            instance.unconfirmed |= instance.requests
            instance.requests = {}
            return
        self.counts.unheard_ends += len(instance.unconfirmed)
        self._in_flight -= len(instance.unconfirmed)
        instance.unconfirmed = {}
        self.counts.mismatches += len(instance) != hello.in_flight

    def _begin(self, instance: _Instance, started: Started) -> bool:
        """False if the request is known already."""
        number = started.number
        if number in instance.requests:
            return False
        if number in instance.unconfirmed:
            instance.requests[number] = instance.unconfirmed.pop(number)
            return False
        self.counts.started += 1
        self._window.started += 1
        if self._in_flight >= self._max_in_flight:
            self.counts.overflowed += 1
            return True
        instance.requests[number] = started.lease
        self._in_flight += 1
        return True

    def _end(self, instance: _Instance, ended: Ended) -> None:
        known = len(instance)
        instance.requests.pop(ended.number, None)
        instance.unconfirmed.pop(ended.number, None)
        self._in_flight -= known - len(instance)
        self.counts.unknown_ends += known == len(instance)
        self.counts.ended += 1
        self._window.note_end(ended)


class _OpenWindow:
    """Sums of the window that is still open."""

    def __init__(self) -> None:
        self.started = 0
        self._ended = 0
        self._first_chunks = 0
        self._ttft_sum_s = 0.0
        self._errors: Counter[EngineError] = Counter()
        self._finished: deque[str] = deque(maxlen=MAX_FINISHED)
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def note_first_chunk(self, event: FirstChunk) -> None:
        self._first_chunks += 1
        self._ttft_sum_s += event.ttft_s

    def note_end(self, event: Ended) -> None:
        self._ended += 1
        if event.error is not EngineError.NONE:
            self._errors[event.error] += 1
        if event.lease is not None:
            self._finished.append(event.lease)
        if event.prompt_tokens is not None and event.cached_tokens is not None:
            self._prompt_tokens += event.prompt_tokens
            self._cached_tokens += event.cached_tokens

    def closed(self) -> Window:
        count = self._first_chunks
        return Window(
            started=self.started,
            ended=self._ended,
            first_chunks=count,
            ttft_mean_s=self._ttft_sum_s / count if count else None,
            errors=dict(self._errors),
            finished=tuple(self._finished),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )
