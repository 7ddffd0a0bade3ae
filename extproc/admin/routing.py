"""``GET /api/v1/routing``: how each pool chooses workers, and its hot prefixes."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from extproc.admin.context import ADMIN
from extproc.decision.ticket import ServedModel
from extproc.routing.profiles import weights_of

_MAX_SHOWN = 20
"""Hot prefixes listed: the most asked for."""


async def _show(request: web.Request) -> web.Response:
    admin = request.app[ADMIN]
    models = admin.scheduler.models
    now = admin.clock()
    return web.json_response({name: routing_page(served, now) for name, served in models.items()})


ROUTES = (web.get("/api/v1/routing", _show),)


def routing_page(served: ServedModel, now: float) -> dict[str, Any]:
    """One pool's part of the page; rates a second.

    ``keys`` is ``exact`` or, without a tokenizer, ``text``; workers in ``approximate`` send
    no digests, so that only what was routed there is known of their caches.
    """
    pool, router = served.pool, served.router.by_policy
    policy, conversations = pool.policy.routing, router.conversations
    return {
        "profile": policy.profile,
        "weights": weights_of(policy),
        "keys": "exact" if served.keyer.exact else "text",
        "approximate": sorted(w.address for w in pool.workers.values() if not w.sends_digests),
        "conversations": {
            "known": len(conversations),
            "repeats": conversations.repeats,
            "switches": conversations.switches,
            "oscillating": conversations.oscillating,
        },
        "hot_prefixes": [
            {
                "key": f"{key:016x}",
                "per_s": round(rate, 3),
                "hot": router.is_hot(key, now),
                "replicas": int(pool.holders(key).sum()),
                "max_replicas": policy.replicas.max_holders,
            }
            for key, rate in router.hot.top(_MAX_SHOWN, now)
        ],
    }
