"""The pure core: requests arrive, are decided, and end; workers report; time ticks.

Synchronous throughout. Every method takes the time and returns the tickets whose waiting
is over, for the caller to wake: deciding comes first, I/O afterwards. The same core runs
in the server and under virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from extproc.admission.controller import AdmissionController
from extproc.admission.lease import Lease
from extproc.cache.feed import Delta, Snapshot
from extproc.errors import ModelNotFound, NoReadyWorker, Refusal
from extproc.fleet.pool import Pool
from extproc.fleet.worker import (
    Booking,
    EngineError,
    Introduction,
    LoadReport,
    Outcome,
    Tier,
    Worker,
)
from extproc.policy import Policy
from extproc.request.profile import Endpoint, RequestProfile
from extproc.routing.picker import Picker
from extproc.routing.router import Route, route
from extproc.tokens.keyer import PromptKeyer, PromptKeys

_RETRY_NO_WORKER_S = 1.0
_RETRIED_ELSEWHERE = frozenset(
    {EngineError.QUEUE_FULL, EngineError.ENGINE_DEAD, EngineError.SHUTTING_DOWN}
)
"""Errors that Envoy's retries answer: before the first token the request goes on."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why that is expected to be good.

    ``endpoints`` is ordered, best first; Envoy's retries walk it.
    """

    id: str
    endpoints: tuple[str, ...]
    cached_tokens: int
    prompt_tokens: int
    queue_wait_s: float


class Ticket:
    """One request from arrival to end. Exactly one of ``decision``, ``refusal`` is set in
    the end; both None means that it waits."""

    __slots__ = (
        "arrived_at",
        "booking",
        "decision",
        "ended",
        "id",
        "lease",
        "outcome",
        "profile",
        "prompts",
        "refusal",
        "served",
        "served_by",
        "started_at",
    )

    def __init__(
        self,
        ticket_id: str,
        served: ServedModel,
        profile: RequestProfile,
        prompts: Sequence[PromptKeys],
        now: float,
    ) -> None:
        self.id = ticket_id
        self.served = served
        self.profile = profile
        self.prompts = prompts
        self.arrived_at = now
        self.started_at: float | None = None
        self.lease: Lease | None = None
        self.booking: Booking | None = None
        self.decision: Decision | None = None
        self.refusal: Refusal | None = None
        self.outcome: Outcome | None = None
        self.served_by: str | None = None
        self.ended = False


class ServedModel:
    """One pool with its admission and its way from prompts to keys."""

    def __init__(self, pool: Pool, admission: AdmissionController, keyer: PromptKeyer) -> None:
        self.pool = pool
        self.admission = admission
        self.keyer = keyer
        self.waiting: dict[str, Ticket] = {}

    def has_capacity(self) -> Callable[[str], bool]:
        """Whether a worker has room for a waiting request; good until something is booked."""
        by_model: dict[str | None, bool] = {}

        def check(ticket_id: str) -> bool:
            model = self.waiting[ticket_id].profile.model
            if model not in by_model:
                by_model[model] = bool(self.pool.has_slot(model).any())
            return by_model[model]

        return check


class Scheduler:
    """Decides for every pool of a policy.

    Args:
        keyers: by pool model name.
        rng: source of tie-breaks and ids.
        now: seconds on the caller's monotonic clock, as everywhere.
    """

    def __init__(
        self, policy: Policy, keyers: Mapping[str, PromptKeyer], rng: random.Random, now: float
    ) -> None:
        self.policy = policy
        self._rng = rng
        self._picker = Picker(rng)
        self.models: dict[str, ServedModel] = {}
        self._tickets: dict[str, Ticket] = {}
        self._by_name: dict[str, ServedModel] = {}
        for pool_policy in policy.pools:
            served = ServedModel(
                Pool(pool_policy, policy.reports, now),
                AdmissionController(pool_policy.admission),
                keyers[pool_policy.model],
            )
            self.models[pool_policy.model] = served
            for name in pool_policy.names:
                self._by_name[name] = served

    def model_for(self, profile: RequestProfile) -> ServedModel:
        """The pool that must serve a request.

        Raises:
            ModelNotFound: no pool serves its model.
            NoReadyWorker: it names no model, and no pool can serve.
        """
        name = profile.model or ""
        served = self._by_name.get(name) or self._model_of_adapter(name)
        if served is not None:
            return served
        if profile.endpoint is not Endpoint.PASS:
            raise ModelNotFound("The requested model does not exist.", param="model")
        for candidate in self.models.values():
            if candidate.pool.table.usable().any():
                return candidate
        raise _no_worker()

    def _model_of_adapter(self, name: str) -> ServedModel | None:
        """The pool where a worker has loaded an adapter that the policy does not name."""
        return next((served for served in self.models.values() if served.pool.serves(name)), None)

    def model_of_agent(self, models: Sequence[str]) -> ServedModel | None:
        """The pool of a worker that serves these models."""
        return next((self._by_name[name] for name in models if name in self._by_name), None)

    def arrive(
        self,
        served: ServedModel,
        profile: RequestProfile,
        prompts: Sequence[PromptKeys],
        now: float,
    ) -> Ticket:
        """Admit and route a request, or let it wait.

        Raises:
            NoReadyWorker, QueueFull: it can neither run nor wait.
        """
        ticket = Ticket(f"{self._rng.getrandbits(64):016x}", served, profile, prompts, now)
        pool, model = served.pool, profile.model
        has_capacity = bool(pool.has_slot(model).any())
        if not has_capacity and not pool.usable(model).any():
            raise _no_worker()
        if not profile.counted:
            self._route(ticket, now)
            return ticket
        ticket.lease = served.admission.admit(ticket.id, now, has_capacity=has_capacity)
        self._tickets[ticket.id] = ticket
        if ticket.lease is None:
            served.waiting[ticket.id] = ticket
        else:
            self._route(ticket, now)
        return ticket

    def response_started(
        self, ticket: Ticket, served_by: str | None, attempts: int, now: float
    ) -> list[Ticket]:
        """Response headers came, from ``served_by`` if known, after ``attempts`` tries.

        Workers hold their headers until the first token, so this ends the prefill. When
        Envoy went on to another worker, load and cache credit move there.
        """
        if ticket.ended or ticket.booking is None or ticket.decision is None:
            return []
        ticket.started_at = now
        ticket.served_by = served_by or ticket.decision.endpoints[0]
        pool = ticket.served.pool
        pool.first_token(ticket.booking)
        for address in ticket.decision.endpoints[: max(0, attempts - 1)]:
            failed = pool.workers.get(address)
            if failed is not None and address != served_by:
                pool.suspect(failed, now)
        self._rebook(ticket, served_by)
        return self._dispatch(ticket.served, now)

    def finish(self, ticket: Ticket, now: float) -> list[Ticket]:
        """The request is over, however it ended; a second call does nothing."""
        if ticket.ended:
            return []
        ticket.ended = True
        served = ticket.served
        self._tickets.pop(ticket.id, None)
        if served.waiting.pop(ticket.id, None) is not None:
            served.admission.leave(ticket.id)
        return self._release(ticket, now)

    def outcome(self, worker: Worker, outcome: Outcome, now: float) -> list[Ticket]:
        """An engine has finished a request: what it held is free, whatever Envoy still says.

        An outcome of a worker that does not hold the request changes nothing: Envoy took it
        elsewhere after that worker failed.
        """
        ticket = self._tickets.get(outcome.lease)
        if ticket is None or ticket.booking is None or ticket.booking.worker is not worker:
            return []
        ticket.outcome = outcome
        if outcome.error in _RETRIED_ELSEWHERE and ticket.started_at is None:
            return []
        return self._release(ticket, now)

    def hello(self, served: ServedModel, hello: Introduction, now: float) -> Worker | None:
        """An agent's stream begins; None when the pool is full."""
        return served.pool.hello(hello, now)

    def report(
        self, served: ServedModel, worker: Worker, load: LoadReport, now: float
    ) -> list[Ticket]:
        """A worker's load."""
        served.pool.report(worker, load, now)
        return self._dispatch(served, now)

    def snapshot(
        self,
        served: ServedModel,
        worker: Worker,
        snapshot: Snapshot,
        now: float,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """A worker's whole digest of one tier.

        Raises:
            DigestError: it does not fit; ask for another.
        """
        served.pool.snapshot(worker, snapshot, now, tier)

    def delta(
        self,
        served: ServedModel,
        worker: Worker,
        delta: Delta,
        now: float,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """What changed in a worker's digest of one tier.

        Raises:
            DigestError: it does not fit; ask for a snapshot.
        """
        served.pool.delta(worker, delta, now, tier)

    def tick(self, now: float) -> list[Ticket]:
        """What time alone changes: expiry, lost workers, ageing credit."""
        woken: list[Ticket] = []
        for served in self.models.values():
            served.pool.tick(now)
            woken += self._dispatch(served, now)
        return woken

    def _dispatch(self, served: ServedModel, now: float) -> list[Ticket]:
        """Run whoever is next while quota and workers have room; who waited too long is refused."""
        if not served.waiting:
            return []
        expired = served.admission.expired(now)
        woken = [self._refuse(served, ticket_id, refusal) for ticket_id, refusal in expired]
        table = served.pool.table
        if not table.usable().any():
            abandoned = served.admission.abandon()
            return woken + [self._refuse(served, each, _no_worker()) for each in abandoned]
        while table.has_slot().any():
            granted = served.admission.next_waiting(now, served.has_capacity())
            if granted is None:
                break
            ticket = served.waiting.pop(granted[0])
            ticket.lease = granted[1]
            self._route(ticket, now)
            woken.append(ticket)
        return woken

    def _release(self, ticket: Ticket, now: float) -> list[Ticket]:
        if ticket.booking is not None:
            ticket.served.pool.release(ticket.booking)
        if ticket.lease is not None:
            ticket.served.admission.release(ticket.lease, now)
        return self._dispatch(ticket.served, now)

    def _refuse(self, served: ServedModel, ticket_id: str, refusal: Refusal) -> Ticket:
        ticket = served.waiting.pop(ticket_id)
        del self._tickets[ticket_id]
        ticket.refusal = refusal
        ticket.ended = True
        return ticket

    def _route(self, ticket: Ticket, now: float) -> None:
        """Pick and book in one step."""
        pool, profile = ticket.served.pool, ticket.profile
        chosen = route(
            pool,
            ticket.prompts,
            now,
            self._picker,
            model=profile.model,
            needs_slot=profile.counted,
        )
        ticket.booking = pool.book(chosen.columns[0], chosen.uncached_tokens, ticket.id)
        self._credit(ticket, ticket.booking.worker)
        ticket.decision = _decision(ticket, chosen, now)

    def _credit(self, ticket: Ticket, worker: Worker) -> None:
        for prompt in ticket.prompts:
            ticket.served.pool.credit(worker, prompt.keys)

    def _rebook(self, ticket: Ticket, served_by: str | None) -> None:
        booking = ticket.booking
        if booking is None or served_by is None or served_by == booking.worker.address:
            return
        pool = ticket.served.pool
        worker = pool.workers.get(served_by)
        if worker is None:
            return
        pool.release(booking)
        ticket.booking = pool.book(worker.column, 0, ticket.id)
        self._credit(ticket, worker)


def _decision(ticket: Ticket, chosen: Route, now: float) -> Decision:
    pool = ticket.served.pool
    return Decision(
        id=ticket.id,
        endpoints=tuple(pool.worker_at(column).address for column in chosen.columns),
        cached_tokens=chosen.cached_tokens,
        prompt_tokens=chosen.prompt_tokens,
        queue_wait_s=now - ticket.arrived_at,
    )


def _no_worker() -> NoReadyWorker:
    return NoReadyWorker("No worker of this model is ready.", retry_after_s=_RETRY_NO_WORKER_S)
