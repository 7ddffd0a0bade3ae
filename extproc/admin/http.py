"""Admin HTTP: ``/metrics``, ``/livez``, ``/readyz`` and ``/api/v1/workers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from extproc.fleet.pool import Pool
from extproc.fleet.worker import Worker
from extproc.scheduler import Scheduler
from extproc.telemetry.metrics import Metrics


def admin_app(
    scheduler: Scheduler,
    metrics: Metrics,
    readiness: Callable[[], str],
    clock: Callable[[], float],
) -> web.Application:
    """The admin application.

    Args:
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
        pools = {model: _workers(lane.pool, now) for model, lane in scheduler.lanes.items()}
        return web.json_response({"policy": scheduler.policy.digest, "pools": pools})

    app = web.Application()
    app.add_routes(
        [
            web.get("/livez", livez),
            web.get("/readyz", readyz),
            web.get("/metrics", page),
            web.get("/api/v1/workers", workers),
        ]
    )
    return app


_SERVING = ("ready", "degraded")


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
        "digest": {
            "epoch": worker.feed.epoch,
            "keys": worker.feed.count,
            "age_s": None if updated_at is None else round(now - updated_at, 3),
            "overlay_keys": pool.index.overlay_keys(column),
            "left_out": report.left_out if report else {},
        },
    }
