"""Admin HTTP: ``/metrics``, ``/livez``, ``/readyz``, and the fleet under ``/api/v1/workers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from extproc.control import FleetService
from extproc.fleet.pool import Pool
from extproc.fleet.worker import Worker
from extproc.scheduler import Scheduler
from extproc.telemetry.metrics import Metrics


def admin_app(
    scheduler: Scheduler,
    metrics: Metrics,
    fleet: FleetService,
    readiness: Callable[[], str],
    clock: Callable[[], float],
) -> web.Application:
    """The admin application.

    Args:
        fleet: carries drain and resume to the workers' agents.
        readiness: ``ready``, ``degraded`` (serving although no worker reported in time) or
            the reason not to be sent traffic.
    """

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        state = readiness()
        return web.Response(text=f"{state}\n", status=200 if state in _SERVING else 503)

    async def page(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = encode(metrics.registry)
        return web.Response(body=body, headers={"content-type": content_type})

    async def workers(_: web.Request) -> web.Response:
        now = clock()
        pools = {model: _workers(served.pool, now) for model, served in scheduler.models.items()}
        return web.json_response({"policy": scheduler.policy.digest, "pools": pools})

    async def drain(request: web.Request) -> web.Response:
        try:
            deadline_s = float(request.query.get("deadline_s", DRAIN_DEADLINE_S))
        except ValueError:
            return _problem(400, "deadline_s is not a number")
        if not 0 <= deadline_s <= _MAX_DRAIN_S:
            return _problem(400, f"deadline_s is not in 0..{_MAX_DRAIN_S:g}")
        return _told(await fleet.drain(request.match_info["address"], deadline_s))

    async def resume(request: web.Request) -> web.Response:
        return _told(await fleet.resume(request.match_info["address"]))

    app = web.Application()
    app.add_routes(
        [
            web.get("/livez", livez),
            web.get("/readyz", readyz),
            web.get("/metrics", page),
            web.get("/api/v1/workers", workers),
            web.post("/api/v1/workers/{address}/drain", drain),
            web.post("/api/v1/workers/{address}/resume", resume),
        ]
    )
    return app


_SERVING = ("ready", "degraded")
DRAIN_DEADLINE_S = 120.0
_MAX_DRAIN_S = 86_400.0


def _told(known: bool) -> web.Response:
    if known:
        return web.json_response({"told": True}, status=202)
    return _problem(404, "no agent speaks for this worker")


def _problem(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _workers(pool: Pool, now: float) -> list[dict[str, Any]]:
    return [_worker(pool, worker, now) for _, worker in sorted(pool.workers.items())]


def _worker(pool: Pool, worker: Worker, now: float) -> dict[str, Any]:
    table, column = pool.table, worker.column
    updated_at = worker.feed.updated_at
    report = worker.last_report
    return {
        "address": worker.address,
        "engine": worker.engine,
        "names": sorted(worker.names),
        "state": report.state.value if report else None,
        "ready": bool(table.ready[column]),
        "last_resort": bool(table.last_resort(now)[column]),
        "slots": int(table.slots[column]),
        "in_flight": int(table.in_flight[column]),
        "foreign": int(table.foreign[column]),
        "pending_prefill_tokens": int(table.pending_prefill_tokens[column]),
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
