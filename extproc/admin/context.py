"""What the admin pages show and steer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from extproc.control import FleetService
from extproc.reload import PolicyReloader
from extproc.scheduler import Scheduler
from extproc.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Admin:
    """The parts of a running scheduler.

    Attributes:
        fleet: carries drain and resume to the workers' agents.
        readiness: ``ready``, ``degraded`` (serving although no worker reported in time) or
            the reason not to be sent traffic.
        clock: monotonic seconds.
    """

    scheduler: Scheduler
    metrics: Metrics
    fleet: FleetService
    reloader: PolicyReloader
    readiness: Callable[[], str]
    clock: Callable[[], float]


ADMIN = web.AppKey("admin", Admin)


def problem(status: int, message: str) -> web.Response:
    """An error of the admin API."""
    return web.json_response({"error": {"message": message}}, status=status)
