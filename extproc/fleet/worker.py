"""One worker: its identity, its digest stream and the requests booked on it."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.cache.feed import DigestFeed


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an agent says of its engine. Absent gauges are None, never zero."""

    ready: bool
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    age_s: float = 0.0


class Worker:
    """A worker while it is in the pool; ``column`` is its place in table and index.

    Attributes:
        reports: whether an agent speaks for it (False: from the policy's static list).
        reported_at: seconds of the last report.
        peak_in_flight: most requests of ours since the last report: what the engine may
            still have counted when it was scraped.
    """

    __slots__ = (
        "address",
        "column",
        "feed",
        "last_report",
        "models",
        "overlay_aged_at",
        "peak_in_flight",
        "reported_at",
        "reports",
    )

    def __init__(
        self, address: str, column: int, feed: DigestFeed, *, reports: bool, now: float
    ) -> None:
        self.address = address
        self.column = column
        self.feed = feed
        self.reports = reports
        self.models: tuple[str, ...] = ()
        self.last_report: LoadReport | None = None
        self.reported_at = now
        self.peak_in_flight = 0
        self.overlay_aged_at = now


@dataclass(slots=True, eq=False)
class Booking:
    """A request's hold on its worker. ``released`` makes giving it back idempotent."""

    worker: Worker
    uncached_tokens: int
    prefilling: bool = True
    released: bool = False
