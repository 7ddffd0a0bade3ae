"""``GET /api/v1/scaling``: how many workers each pool should have, and what says so."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from extproc.admin.context import ADMIN
from extproc.decision.signals import pool_signals
from extproc.scheduler import Scheduler


async def _show(request: web.Request) -> web.Response:
    admin = request.app[ADMIN]
    return web.json_response(scaling_page(admin.scheduler, admin.clock()))


ROUTES = (web.get("/api/v1/scaling", _show),)


def scaling_page(scheduler: Scheduler, now: float) -> dict[str, Any]:
    """The page's content; times in seconds.

    ``desired`` is None where scaling is off, and before the first second is over. ``acts``
    says whether autoscalers are shown the number, as ``kvgate_desired_workers``.
    """
    mode = scheduler.policy.rollout.scaling
    pools = {}
    for name, served in scheduler.models.items():
        desire = served.desire if mode != "off" else None
        policy = served.pool.policy.scaling
        pools[name] = {
            **asdict(pool_signals(scheduler.admission, served, now)),
            "desired": None if desire is None else asdict(desire),
            "min_workers": policy.min_workers,
            "max_workers": policy.max_workers,
        }
    return {"scaling": mode, "acts": mode == "on", "pools": pools}
