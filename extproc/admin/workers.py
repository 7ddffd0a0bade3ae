"""``/api/v1/workers``: the fleet, and drain and resume of one worker."""

from __future__ import annotations

import math
from typing import Any

from aiohttp import web

from extproc.admin.context import ADMIN, problem
from extproc.fleet.pool import Pool
from extproc.fleet.worker import Worker

DRAIN_DEADLINE_S = 120.0
_MAX_DRAIN_S = 86_400.0


async def _list(request: web.Request) -> web.Response:
    admin = request.app[ADMIN]
    now = admin.clock()
    scheduler = admin.scheduler
    pools = {model: _workers(served.pool, now) for model, served in scheduler.models.items()}
    return web.json_response({"policy": scheduler.policy.digest, "pools": pools})


async def _drain(request: web.Request) -> web.Response:
    try:
        deadline_s = float(request.query.get("deadline_s", DRAIN_DEADLINE_S))
    except ValueError:
        return problem(400, "deadline_s is not a number")
    if not 0 <= deadline_s <= _MAX_DRAIN_S:
        return problem(400, f"deadline_s is not in 0..{_MAX_DRAIN_S:g}")
    return _told(await request.app[ADMIN].fleet.drain(request.match_info["address"], deadline_s))


async def _resume(request: web.Request) -> web.Response:
    return _told(await request.app[ADMIN].fleet.resume(request.match_info["address"]))


ROUTES = (
    web.get("/api/v1/workers", _list),
    web.post("/api/v1/workers/{address}/drain", _drain),
    web.post("/api/v1/workers/{address}/resume", _resume),
)


def _told(known: bool) -> web.Response:
    if known:
        return web.json_response({"told": True}, status=202)
    return problem(404, "no agent speaks for this worker")


def _workers(pool: Pool, now: float) -> list[dict[str, Any]]:
    return [_worker(pool, worker, now) for _, worker in sorted(pool.workers.items())]


def _worker(pool: Pool, worker: Worker, now: float) -> dict[str, Any]:
    table, column = pool.table, worker.column
    updated_at = worker.feed.updated_at
    report = worker.last_report
    return {
        "address": worker.address,
        "engine": worker.engine,
        "labels": dict(worker.labels),
        "names": sorted(worker.names),
        "state": report.state.value if report else None,
        "ready": bool(table.ready[column]),
        "last_resort": bool(table.last_resort(now)[column]),
        "slots": int(table.slots[column]),
        "in_flight": int(table.in_flight[column]),
        "foreign": int(table.foreign[column]),
        "pending_prefill_tokens": int(table.pending_prefill_tokens[column]),
        "health": round(float(pool.health.scores(now)[column]), 1),
        "error_rate": round(float(table.error_rate[column]), 3),
        "cooling_s": round(max(0.0, float(table.cooling_until[column]) - now), 3),
        "prefill_tokens_per_s": _known(table.prefill_tokens_per_s[column]),
        "cache_credit": round(float(table.cache_credit[column]), 3),
        "report_age_s": round(now - worker.reported_at, 3) if worker.reports else None,
        "signals": report.signals if report else {},
        "lost_events": report.lost_events if report else 0,
        "hot_prefixes": [[f"{key:016x}", count] for key, count in worker.hot_prefixes],
        "digest": {
            "epoch": worker.feed.epoch,
            "keys": worker.feed.count,
            "age_s": None if updated_at is None else round(now - updated_at, 3),
            "overlay_keys": pool.index.overlay_keys(column),
            "left_out": report.left_out if report else {},
        },
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 1)
