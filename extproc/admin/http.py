"""Admin HTTP: ``/metrics``, ``/livez``, ``/readyz``, and the API under ``/api/v1``."""

from __future__ import annotations

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from extproc.admin import policy, queues, routing, scaling, workers
from extproc.admin.context import ADMIN, Admin

_SERVING = ("ready", "degraded")


def admin_app(admin: Admin) -> web.Application:
    """The admin application."""
    app = web.Application()
    app[ADMIN] = admin
    app.add_routes(
        [
            web.get("/livez", _livez),
            web.get("/readyz", _readyz),
            web.get("/metrics", _metrics),
            *workers.ROUTES,
            *queues.ROUTES,
            *routing.ROUTES,
            *scaling.ROUTES,
            *policy.ROUTES,
        ]
    )
    return app


async def _livez(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _readyz(request: web.Request) -> web.Response:
    state = request.app[ADMIN].readiness()
    return web.Response(text=f"{state}\n", status=200 if state in _SERVING else 503)


async def _metrics(request: web.Request) -> web.Response:
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    body = encode(request.app[ADMIN].metrics.registry)
    return web.Response(body=body, headers={"content-type": content_type})
