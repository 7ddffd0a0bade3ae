"""``GET /api/v1/queues``: what runs and waits by pool and lane, quotas, and leases' ends."""

from __future__ import annotations

import heapq
import math
from typing import Any

from aiohttp import web

from extproc.admin.context import ADMIN
from extproc.admission.counters import Counter
from extproc.admission.lane import Lane
from extproc.admission.pool_state import PoolState
from extproc.admission.quotas import Rule
from extproc.decision.ticket import Freed
from extproc.scheduler import Scheduler

_MAX_SHOWN = 10
"""Values of a rule's ``per`` that are listed: those with the most work."""


async def _show(request: web.Request) -> web.Response:
    admin = request.app[ADMIN]
    return web.json_response(queues_page(admin.scheduler, admin.clock()))


ROUTES = (web.get("/api/v1/queues", _show),)


def queues_page(scheduler: Scheduler, now: float) -> dict[str, Any]:
    """The page's content; times in seconds."""
    admission = scheduler.admission
    pools = {
        name: {
            **_pool(pool, now),
            "oldest_wait_s": round(pool.oldest_wait_s(now), 3),
            "leases_freed": {why.value: scheduler.leases.freed[name, why] for why in Freed},
        }
        for name, pool in admission.pools.items()
    }
    rules = [_rule(pool, rule) for pool, rule in admission.rules()]
    mode = scheduler.policy.rollout.admission
    return {"admission": mode, "pools": pools, "rules": rules}


def _pool(pool: PoolState, now: float) -> dict[str, Any]:
    return {
        "running": pool.running,
        "running_tokens": pool.running_tokens,
        "waiting": len(pool.queue),
        "waiting_bytes": pool.waiting_bytes,
        "lanes": {name: _lane(lane, now) for name, lane in pool.queue.lanes.items()},
    }


def _lane(lane: Lane, now: float) -> dict[str, Any]:
    oldest = next(iter(lane.waiting.values()), None)
    return {
        "priority": lane.policy.priority,
        "waiting": len(lane.waiting),
        "waiting_tokens": lane.tokens,
        "tenants": len(lane.flows),
        "oldest_wait_s": 0.0 if oldest is None else round(now - oldest.arrived_at, 3),
        "tokens_per_s": _rounded(lane.drain.per_s(now)),
    }


def _rule(pool: str, rule: Rule) -> dict[str, Any]:
    """Limits as they hold now, tightened or not; a counter each for the busiest values."""
    policy = rule.policy
    busiest = heapq.nlargest(_MAX_SHOWN, rule.counters.values(), key=_busyness)
    return {
        "rule": rule.name,
        "pool": pool or None,
        "per": list(policy.per),
        "limits": {
            "concurrency": _limit(rule.concurrency),
            "tokens_in_flight": _limit(rule.tokens_in_flight),
            "requests_per_minute": policy.requests_per_minute,
            "tokens_per_minute": policy.tokens_per_minute,
            "max_queue": policy.max_queue,
        },
        "tightness": rule.tightness,
        "counters": len(rule.counters),
        "busiest": [_counter(rule, counter) for counter in busiest],
    }


def _counter(rule: Rule, counter: Counter) -> dict[str, Any]:
    return {
        "of": dict(zip(rule.policy.per, counter.key, strict=True)),
        "requests": counter.requests,
        "tokens": counter.tokens,
        "lent_requests": counter.lent_requests,
        "lent_tokens": counter.lent_tokens,
        "waiting": counter.waiting,
        "waiting_tokens": counter.waiting_tokens,
    }


def _busyness(counter: Counter) -> tuple[int, int]:
    return (counter.waiting_tokens + counter.tokens, counter.requests)


def _limit(limit: float) -> int | None:
    return None if limit == math.inf else int(limit)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
