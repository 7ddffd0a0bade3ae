"""``Estimate``: what would be decided for a request, with every number behind it."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.admission.controller import Preview
from extproc.admission.demand import Demand
from extproc.fleet.pool import Pool
from extproc.routing.router import Route

_MAX_WORKERS = 32


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """One worker's place in the ranking: its cost and what it is made of, in the profile's
    unit (tokens of prefill work for `balanced`), and whether it serves the model and has a
    slot."""

    address: str
    cost: float
    terms: dict[str, float]
    ready: bool
    has_slot: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """``verdict``: ``allow``, ``wait``, or a refusal's code. Times in seconds; the wait is
    None when nothing was seen yet that tells. ``prefiller``: who would compute the prompt,
    empty where that is the first worker itself."""

    verdict: str
    reason: str
    expected_wait_s: float | None
    retry_after_s: float | None
    pool: str
    lane: str
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    uncached_tokens: int
    output_tokens: int
    workers: tuple[WorkerCost, ...]
    prefiller: str = ""


def estimate_of(said: Preview, pool: Pool, demand: Demand, route: Route) -> Estimate:
    """What admission said and routing chose, with the ranking of the workers."""
    usable, has_slot = pool.usable(demand.name), pool.has_slot(demand.name)
    costs = sorted(
        (
            WorkerCost(
                worker.address,
                sum(float(values[worker.column]) for values in route.terms.values()),
                {name: float(values[worker.column]) for name, values in route.terms.items()},
                ready=bool(usable[worker.column]),
                has_slot=bool(has_slot[worker.column]),
            )
            for worker in pool.workers.values()
        ),
        key=lambda worker: (not worker.ready, not worker.has_slot, worker.cost),
    )
    return Estimate(
        verdict=said.verdict,
        reason=said.reason,
        expected_wait_s=said.expected_wait_s,
        retry_after_s=said.retry_after_s,
        pool=demand.pool,
        lane=demand.lane,
        tenant=demand.tenant,
        prompt_tokens=route.prompt_tokens,
        cached_tokens=route.cached_tokens,
        uncached_tokens=route.uncached_tokens,
        output_tokens=demand.output_tokens,
        workers=tuple(costs[:_MAX_WORKERS]),
        prefiller=pool.worker_at(route.handoff.column).address if route.handoff else "",
    )
