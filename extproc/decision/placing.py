"""``Placing``: where a request goes, booked and remembered before anybody is told."""

from __future__ import annotations

from extproc.decision.leases import LeaseWatch
from extproc.decision.ticket import Decision, Ticket
from extproc.fleet.pool import Pool
from extproc.fleet.worker import Worker
from extproc.policy import Policy
from extproc.routing.router import Asked, Route

_LONGEST_PREFILL_S = 30.0
"""No answer for longer than this is no prefill: one that is not streamed comes at its end."""


def best_route(ticket: Ticket, policy: Policy, now: float, *, needs_slot: bool = True) -> Route:
    """What routing would choose, changing nothing.

    Raises:
        NoReadyWorker: nobody that it may go to is ready.
    """
    profile, demand = ticket.profile, ticket.demand
    asked = Asked(
        model=profile.model,
        needs_slot=needs_slot,
        output_tokens=demand.output_tokens if demand else 0,
        session=profile.session,
        subset=profile.subset,
    )
    rollout = policy.rollout.cache_routing
    return ticket.served.router.route(ticket.prompts, now, asked, rollout)


def place(ticket: Ticket, route: Route, leases: LeaseWatch, now: float) -> None:
    """Book the first of a route and remember it."""
    pool, demand = ticket.served.pool, ticket.demand
    handoff = route.handoff
    ticket.booking = pool.book(
        route.columns[0],
        route.uncached_tokens,
        ticket.id,
        demand.output_tokens if demand else 0,
        cached_tokens=0 if handoff else route.cached_tokens,
        prefills=handoff is None,
        now=None if handoff else now,
    )
    if handoff is not None:
        ticket.prefill = pool.book(handoff.column, handoff.uncached_tokens, f"{ticket.id}-prefill")
        credit(ticket, ticket.prefill.worker)
    ticket.served.router.note(route, now)
    credit(ticket, ticket.booking.worker)
    leases.placed(ticket)
    ticket.decision = decision_of(ticket, route, now)
    if route.watched is not None:
        ticket.watched_pick = pool.worker_at(route.watched.columns[0]).address


def move(ticket: Ticket, served_by: str | None, leases: LeaseWatch, now: float) -> None:
    """Envoy went on to another worker: load and cache credit go there too."""
    booking = ticket.booking
    if booking is None or served_by is None or served_by == booking.worker.address:
        return
    pool = ticket.served.pool
    worker = pool.workers.get(served_by)
    if worker is None:
        return
    leases.forget(ticket)
    pool.release(booking)
    ticket.booking = pool.book(worker.column, 0, ticket.id, booking.output_tokens, now=now)
    credit(ticket, worker)
    if ticket.lease is not None and not ticket.lease.released:
        leases.placed(ticket)


def credit(ticket: Ticket, worker: Worker) -> None:
    """Expect a request's prefix on a worker soon."""
    for prompt in ticket.prompts:
        ticket.served.pool.credit(worker, prompt.keys, by_text=prompt.by_text)


def renew_credit(pool: Pool, leases: LeaseWatch, now: float) -> None:
    """What credit has just grown old for is still being computed: expect it a while longer.

    Without this, a prompt whose prefill outlives the overlay's credit is nowhere for the moment
    until the engine's digest tells of it.
    """
    for worker in pool.aged:
        for ticket in leases.of(worker.address):
            began = ticket.lease.granted_at if ticket.lease else now
            if ticket.started_at is None and now - began < _LONGEST_PREFILL_S:
                credit(ticket, worker)


def decision_of(ticket: Ticket, route: Route, now: float) -> Decision:
    """What Envoy, the engine and the client are told of a route."""
    demand, pool, profile = ticket.demand, ticket.served.pool, ticket.profile
    lane = demand.lane if demand else ""
    priority = pool.policy.engine_priority.get(lane) if profile.editable else None
    return Decision(
        id=ticket.id,
        endpoints=tuple([pool.worker_at(column).address for column in route.columns]),
        cached_tokens=route.cached_tokens,
        prompt_tokens=route.prompt_tokens,
        queue_wait_s=now - ticket.arrived_at,
        lane=lane,
        degraded=tuple(ticket.steps),
        max_output_tokens=ticket.cap_tokens,
        model=profile.model if ticket.changed_model else None,
        cache_salt=profile.cache_salt if profile.isolated else None,
        engine_priority=priority,
        prefiller=pool.worker_at(route.handoff.column).address if route.handoff else "",
    )
