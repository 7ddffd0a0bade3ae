"""One worker: its identity, its digest stream and the requests booked on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from extproc.cache.feed import DigestFeed


class WorkerState(Enum):
    """What a worker's agent says of it; the value is the metric label."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    ASLEEP = "asleep"
    FROZEN = "frozen"
    DOWN = "down"

    @property
    def keeps_cache(self) -> bool:
        """Whether what the engine had cached is still there."""
        return self not in (WorkerState.STARTING, WorkerState.ASLEEP, WorkerState.DOWN)


class Role(Enum):
    """What a worker is labelled to do where prefill and decode run apart."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


ROLE_LABEL = "role"


class Tier(Enum):
    """Where cached blocks are: where the engine computes, or where it loads them from."""

    DEVICE = "device"
    HOST = "host"


class EngineError(Enum):
    """How a request ended on its engine; the value is the metric label."""

    UNKNOWN = "unknown"
    NONE = "none"
    CLIENT = "client"
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    KV_EXHAUSTED = "kv_exhausted"
    ENGINE_DEAD = "engine_dead"
    SHUTTING_DOWN = "shutting_down"
    STREAM = "stream"
    CLIENT_GONE = "client_gone"
    OTHER = "other"


def engine_error(name: str | None) -> EngineError | None:
    """The error class that a worker's header names; None without one."""
    if name is None:
        return None
    return _BY_NAME.get(name, EngineError.OTHER)


_BY_NAME = {error.value: error for error in EngineError}
_ROLES = {role.value: role for role in Role}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an agent says of its engine. Absent gauges are None, never zero.

    ``leases`` are the requests that run on the engine, None where nobody tells them;
    ``signals`` are the fields of ``Signals`` in the agent API that the engine has.
    """

    state: WorkerState
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    kv_blocks: int | None = None
    age_s: float = 0.0
    leases: frozenset[str] | None = None
    adapters: tuple[str, ...] = ()
    max_adapters: int = 0
    signals: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    lost_events: int = 0


@dataclass(frozen=True, slots=True)
class Introduction:
    """What an agent says first. ``max_running`` 0: unknown; ``labels`` are the operator's."""

    address: str
    models: tuple[str, ...]
    max_running: int = 0
    sends_digests: bool = True
    engine: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended, as its engine's middleware saw it. Times in seconds."""

    lease: str
    status: int
    error: EngineError
    duration_s: float
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class Worker:
    """A worker while it is in the pool; ``column`` is its place in table and index.

    Attributes:
        reports: whether an agent speaks for it (False: from the policy's static list).
        host_feed: its digest of blocks in host memory, once it sends one.
        hot_prefixes: block keys with the most different continuations lately, and how many.
        sends_digests: whether its agent reads KV events; without, the overlay lives longer.
        labels: what its operator says of it: zone, node, role.
        names: models and adapters that it serves.
        reported_at: seconds of the last report.
        unseen: bookings that no report has counted yet, by lease.
        peak_in_flight: most requests of ours since the last report: what the engine may
            still have counted when it was scraped.
    """

    __slots__ = (
        "address",
        "column",
        "engine",
        "feed",
        "host_feed",
        "hot_prefixes",
        "labels",
        "last_report",
        "names",
        "overlay_aged_at",
        "peak_in_flight",
        "reported_at",
        "reports",
        "sends_digests",
        "unseen",
    )

    def __init__(
        self, address: str, column: int, feed: DigestFeed, *, reports: bool, now: float
    ) -> None:
        self.address = address
        self.column = column
        self.feed = feed
        self.host_feed: DigestFeed | None = None
        self.hot_prefixes: tuple[tuple[int, int], ...] = ()
        self.reports = reports
        self.sends_digests = False
        self.engine = ""
        self.labels: Mapping[str, str] = {}
        self.names: frozenset[str] = frozenset()
        self.last_report: LoadReport | None = None
        self.reported_at = now
        self.peak_in_flight = 0
        self.unseen: dict[str, Booking] = {}
        self.overlay_aged_at = now

    @property
    def role(self) -> Role | None:
        """Its role; None where no label tells one that is known."""
        return _ROLES.get(self.labels.get(ROLE_LABEL, ""))

    @property
    def tells_ends(self) -> bool:
        """Whether its engine's middleware speaks: it says how each request ended."""
        return self.last_report is not None and self.last_report.leases is not None


@dataclass(slots=True, eq=False)
class Booking:
    """A request's hold on its worker. ``released`` makes giving it back idempotent.

    ``ahead_tokens`` are the uncached tokens before its first token, others' included.
    """

    worker: Worker
    uncached_tokens: int
    lease: str
    output_tokens: int = 0
    kv_blocks: int = 0
    cached_tokens: int = 0
    ahead_tokens: int = 0
    booked_at: float | None = None
    prefilling: bool = True
    released: bool = False
