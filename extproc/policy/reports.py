"""What silence of an agent means."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from extproc.policy.base import PositiveFloat, PositiveInt, Section


class ReportPolicy(Section):
    """What silence of an agent means."""

    interval_s: PositiveFloat = 1.0
    """Pace of the agents' load reports."""
    stale_after_s: PositiveFloat = 3.0
    """Without a report for this long a worker is a last resort."""
    lost_after_s: PositiveFloat = 15.0
    """Without a report for this long a worker leaves the pool."""
    ready_timeout_s: PositiveFloat = 10.0
    """At start, serve degraded if no worker has reported by then."""
    max_workers: PositiveInt = 4_096
    """Workers of one pool; further agents are refused."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.interval_s <= self.stale_after_s <= self.lost_after_s:
            raise ValueError("needs interval_s <= stale_after_s <= lost_after_s")
        return self
