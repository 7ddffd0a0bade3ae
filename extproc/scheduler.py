"""The pure core: requests arrive, are decided, and end; workers report; time ticks.

Synchronous throughout. Every method takes the time and returns the tickets whose waiting
is over, for the caller to wake: deciding comes first, I/O afterwards. The same core runs
in the server and under virtual time.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from extproc.admission.controller import AdmissionController, Preview
from extproc.admission.demand import Demand
from extproc.admission.work import WorkEstimator
from extproc.cache.feed import Delta, Snapshot
from extproc.decision.demands import demand_of
from extproc.decision.estimate import Estimate, estimate_of
from extproc.decision.judgement import met_budgets
from extproc.decision.ladder import step_down
from extproc.decision.leases import LeaseWatch
from extproc.decision.placing import best_route, credit, decision_of, move, place, renew_credit
from extproc.decision.room import Room
from extproc.decision.signals import pool_signals
from extproc.decision.ticket import Decision, Freed, ServedModel, Ticket
from extproc.errors import (
    Contended,
    ModelNotFound,
    NoReadyWorker,
    PolicyError,
    QuotaTooSmall,
    Refusal,
)
from extproc.fleet.pool import Pool
from extproc.fleet.table import some
from extproc.fleet.worker import EngineError, Introduction, LoadReport, Outcome, Tier, Worker
from extproc.policy import Policy
from extproc.request.profile import Endpoint, RequestProfile
from extproc.routing.rollout import SwitchedRouter
from extproc.tokens.keyer import PromptKeyer, PromptKeys

_RETRY_NO_WORKER_S = 1.0
_SCALING_PACE_S = 1.0
_MAX_RECENT = 8_192
"""Ended requests whose outcome may still come from the engine's side."""
_RETRIED_ELSEWHERE = frozenset(
    {EngineError.QUEUE_FULL, EngineError.ENGINE_DEAD, EngineError.SHUTTING_DOWN}
)
"""Errors that Envoy's retries answer: before the first token the request goes on."""
_FIXED_BY_START = ("pools", "requests", "tokenization", "reports")


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
        self.models: dict[str, ServedModel] = {}
        self.admission = AdmissionController(policy.admission, policy.pools, now)
        self.work = WorkEstimator(policy.admission.default_output_tokens)
        self.leases = LeaseWatch(policy.admission.leases)
        self._tickets: dict[str, Ticket] = {}
        self._recent: OrderedDict[str, Ticket] = OrderedDict()
        self._by_name: dict[str, ServedModel] = {}
        self._early: list[Ticket] = []
        self._scaled_at = now
        for pool_policy in policy.pools:
            pool = Pool(pool_policy, policy.reports, now)
            served = ServedModel(pool, SwitchedRouter(pool, rng), keyers[pool_policy.model])
            self.models[pool_policy.model] = served
            for name in pool_policy.names:
                self._by_name[name] = served

    # -- which pool ---------------------------------------------------------------------

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
            if some(candidate.pool.table.usable()):
                return candidate
        raise _no_worker()

    def _model_of_adapter(self, name: str) -> ServedModel | None:
        """The pool where a worker has loaded an adapter that the policy does not name."""
        return next((served for served in self.models.values() if served.pool.serves(name)), None)

    def model_of_agent(self, models: Sequence[str]) -> ServedModel | None:
        """The pool of a worker that serves these models."""
        return next((self._by_name[name] for name in models if name in self._by_name), None)

    # -- a request's life ---------------------------------------------------------------

    def arrive(
        self,
        served: ServedModel,
        profile: RequestProfile,
        prompts: Sequence[PromptKeys],
        now: float,
        *,
        arrived_at: float | None = None,
        steps: Sequence[str] = (),
        renewable: bool = False,
    ) -> Ticket:
        """Admit and route a request, or let it wait.

        Args:
            arrived_at: when its last byte came, if that was before now.
            steps: degrade steps that were taken before it came here.
            renewable: its holder keeps no stream open and renews it instead.

        Raises:
            Refusal: it can neither run nor wait.
            ServeInstead: it may be tried with another model.
        """
        ticket = self._ticket(served, profile, prompts, now if arrived_at is None else arrived_at)
        ticket.steps.extend(steps)
        ticket.renewable = renewable
        pool, model = served.pool, profile.model
        if not some(pool.usable(model)):
            raise _no_worker()
        if not profile.counted:
            place(ticket, best_route(ticket, self.policy, now, needs_slot=False), self.leases, now)
            return ticket
        has_slot = some(pool.has_slot(model))
        route = best_route(ticket, self.policy, now, needs_slot=has_slot)
        demand = ticket.demand = self._demand(ticket, route.uncached_tokens)
        self._admit(ticket, demand, now)
        self._tickets[ticket.id] = ticket
        if ticket.lease is not None:
            place(ticket, route, self.leases, now)
        elif not self.admission.has_expired(now):
            # Its turn may come at once: it then keeps others from what it waits for.
            self._early = [each for each in self._dispatch(now) if each is not ticket]
        return ticket

    def response_started(
        self,
        ticket: Ticket,
        served_by: str | None,
        attempts: int,
        now: float,
        *,
        status: int = 200,
        error: EngineError | None = None,
        at: float | None = None,
    ) -> list[Ticket]:
        """Response headers came, from ``served_by`` if known, after ``attempts`` tries.

        Workers hold their headers until the first token, so this ends the prefill. When
        Envoy went on to another worker, load and cache credit move there.

        Args:
            at: when they came, if that was before now.
        """
        if ticket.ended or ticket.booking is None or ticket.decision is None:
            return []
        at = now if at is None else at
        ticket.started_at = at
        ticket.status = status
        ticket.served_by = served_by or ticket.decision.endpoints[0]
        pool = ticket.served.pool
        for address in ticket.decision.endpoints[: max(0, attempts - 1)]:
            failed = pool.workers.get(address)
            if failed is not None and address != served_by:
                pool.suspect(failed, now)
        move(ticket, served_by, self.leases, now)
        pool.response_started(ticket.booking, at, status=status, error=error)
        if ticket.prefill is not None:
            pool.release(ticket.prefill)
        if status < 400 and ticket.lease is not None:
            ticket.served.level.first_token(at - ticket.arrived_at, self._budget_s(ticket), now)
            prefill_s = pool.prefill_s(ticket.lease.demand.uncached_tokens)
            ticket.served.lateness.observe(prefill_s, at - ticket.lease.granted_at)
        return self._dispatch(now)

    def finish(self, ticket: Ticket, now: float) -> list[Ticket]:
        """The request is over, however it ended; a second call does nothing."""
        if ticket.ended:
            return []
        ticket.ended = True
        self._tickets.pop(ticket.id, None)
        if ticket.demand is not None:
            self.admission.leave(ticket.demand, now)
        if ticket.lease is not None and not ticket.settled:
            self._recent[ticket.id] = ticket
            if len(self._recent) > _MAX_RECENT:
                self._recent.popitem(last=False)
        lane = self.admission.lanes.get(ticket.demand.lane) if ticket.demand else None
        if met_budgets(ticket, lane):
            ticket.served.level.ended_well(now)
        return self._free(ticket, Freed.ENDED, now)

    def outcome(
        self, served: ServedModel, worker: Worker, outcome: Outcome, now: float
    ) -> list[Ticket]:
        """An engine has finished a request: what it held is free, whatever Envoy still says.

        An outcome of a worker that does not hold the request changes nothing there: Envoy
        took it elsewhere after that worker failed.
        """
        served.pool.outcome(worker, outcome, now)
        recent = self._recent.pop(outcome.lease, None)
        ticket = recent or self._tickets.get(outcome.lease)
        if ticket is None or ticket.booking is None or ticket.booking.worker is not worker:
            return []
        ticket.outcome = outcome
        if outcome.error in _RETRIED_ELSEWHERE and ticket.started_at is None:
            return []
        self._settle(ticket, outcome)
        if recent is not None:
            return []
        if ticket.renewable:
            self._started_on_engine(ticket, outcome, now)
            return self.finish(ticket, now)
        return self._free(ticket, Freed.ENDED, now)

    def told_end(self, ticket: Ticket, outcome: Outcome, now: float) -> list[Ticket]:
        """A caller of the Scheduler API tells how its request ended, and that it ended.

        Where the engine's middleware tells the same, its word counts.
        """
        booking = ticket.booking
        if not ticket.ended and booking is not None and not booking.worker.tells_ends:
            ticket.outcome = outcome
            self._settle(ticket, outcome)
        return self.finish(ticket, now)

    def renew(self, ticket_id: str, now: float) -> bool:
        """A holder of the Scheduler API is still there; False if the lease has ended."""
        ticket = self._tickets.get(ticket_id)
        if ticket is not None:
            ticket.renewed_at = now
        return ticket is not None

    def ticket(self, ticket_id: str) -> Ticket | None:
        """A request that waits or runs."""
        return self._tickets.get(ticket_id)

    def select(
        self,
        served: ServedModel,
        profile: RequestProfile,
        prompts: Sequence[PromptKeys],
        now: float,
    ) -> Decision:
        """Workers for a request that is admitted elsewhere: no quota, no booking.

        Its prefix is expected on the first of them; its load is seen in that worker's reports.

        Raises:
            NoReadyWorker: nobody could serve it.
        """
        pool = served.pool
        if not some(pool.usable(profile.model)):
            raise _no_worker()
        ticket = self._ticket(served, profile, prompts, now)
        needs_slot = some(pool.has_slot(profile.model))
        route = best_route(ticket, self.policy, now, needs_slot=needs_slot)
        served.router.note(route, now)
        credit(ticket, pool.worker_at(route.columns[0]))
        return decision_of(ticket, route, now)

    def estimate(
        self,
        served: ServedModel,
        profile: RequestProfile,
        prompts: Sequence[PromptKeys],
        now: float,
    ) -> Estimate:
        """What would be decided now, without deciding it.

        Raises:
            NoReadyWorker: nobody could serve it.
        """
        if not some(served.pool.usable(profile.model)):
            raise _no_worker()
        ticket = self._ticket(served, profile, prompts, now)
        route = best_route(ticket, self.policy, now, needs_slot=False)
        demand = self._demand(ticket, route.uncached_tokens)
        room = Room(served.pool, now)
        if self.policy.rollout.admission == "off":
            said = Preview("allow", "", 0.0, None)
        else:
            said = self.admission.preview(demand, room, now)
        return estimate_of(said, served.pool, demand, route)

    # -- workers ------------------------------------------------------------------------

    def hello(self, served: ServedModel, hello: Introduction, now: float) -> Worker | None:
        """An agent's stream begins; None when the pool is full."""
        return served.pool.hello(hello, now)

    def report(
        self, served: ServedModel, worker: Worker, load: LoadReport, now: float
    ) -> list[Ticket]:
        """A worker's load and the requests that run on it."""
        served.pool.report(worker, load, now)
        if load.leases is not None:
            self._free_all(self.leases.listed(worker.address, load.leases, now), now)
        return self._dispatch(now)

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

    def hot(
        self, served: ServedModel, worker: Worker, hot: tuple[tuple[int, int], ...], now: float
    ) -> list[int]:
        """A worker's hottest prefixes; returns those that it need not keep: others do."""
        served.pool.take_hot(worker, hot)
        return served.router.by_policy.surplus(worker.column, [key for key, _ in hot], now)

    # -- time and change ----------------------------------------------------------------

    def excuse(self, seconds: float) -> None:
        """This process did not read for so long: reports that came meanwhile lie unread."""
        for served in self.models.values():
            served.pool.excuse(seconds)

    def tick(self, now: float) -> list[Ticket]:
        """What time alone changes: expiry, promotion, lost workers, silent leases."""
        for served in self.models.values():
            for worker in served.pool.tick(now):
                self._free_all(self.leases.worker_lost(worker.address), now)
            renew_credit(served.pool, self.leases, now)
        self._free_all(self.leases.silent(now), now)
        self.admission.tick(now)
        if now - self._scaled_at >= _SCALING_PACE_S:
            self._scaled_at = now
            self._update_desires(now)
        return self._dispatch(now)

    def reload(self, policy: Policy, now: float) -> list[Ticket]:
        """Go on under another policy; what runs and waits is kept.

        Raises:
            PolicyError: it changes what only a restart can change; nothing was changed.
        """
        for name in _FIXED_BY_START:
            if _without_admission(policy, name) != _without_admission(self.policy, name):
                raise PolicyError(f"{name}: changes need a restart (limits of pools do not)")
        self.policy = policy
        for pool_policy in policy.pools:
            self.models[pool_policy.model].pool.policy = pool_policy
            for demand in self.admission.pools[pool_policy.model].queue:
                demand.weight = policy.tenant_weight(demand.tenant, demand.tenant_class)
        self.work.default_output_tokens = policy.admission.default_output_tokens
        self.leases.policy = policy.admission.leases
        self.admission.reload(policy.admission, policy.pools, now)
        return self._dispatch(now)

    def _update_desires(self, now: float) -> None:
        if self.policy.rollout.scaling == "off":
            return
        for pool_policy in self.policy.pools:
            served = self.models[pool_policy.model]
            signals = pool_signals(self.admission, served, now)
            served.desire = served.desired.update(signals, pool_policy.scaling, now)

    # -- admission ----------------------------------------------------------------------

    def _ticket(
        self,
        served: ServedModel,
        profile: RequestProfile,
        prompts: Sequence[PromptKeys],
        now: float,
    ) -> Ticket:
        return Ticket(f"{self._rng.getrandbits(64):016x}", served, profile, prompts, now)

    def _demand(self, ticket: Ticket, uncached_tokens: int) -> Demand:
        return demand_of(ticket, uncached_tokens, self.policy, self.admission.lanes, self.work)

    def _admit(self, ticket: Ticket, demand: Demand, now: float) -> None:
        """Give the ticket a lease or a place in the queue, in shadow the lease whatever comes.

        Raises:
            Refusal, ServeInstead: see :meth:`arrive`.
        """
        mode = self.policy.rollout.admission
        room = Room(ticket.served.pool, now)
        if mode == "off":
            ticket.lease = self.admission.bypass(demand, now)
        elif mode == "on":
            self._admit_or_degrade(ticket, demand, room, now)
        else:
            try:
                ticket.lease = self.admission.admit(demand, room, now)
            except Refusal as refusal:
                ticket.shadow = refusal.code
            if ticket.lease is None:
                if self.admission.withdraw(demand, now):
                    ticket.shadow = "waits"
                ticket.lease = self.admission.force(demand, now)

    def _admit_or_degrade(self, ticket: Ticket, demand: Demand, room: Room, now: float) -> None:
        lane = demand.lane
        try:
            ticket.lease = self.admission.admit(demand, room, now)
            return
        except (Contended, QuotaTooSmall) as refusal:
            first = refusal
        for step in self.admission.degrade_steps(demand, first):
            if not step_down(ticket, demand, step, self.admission.lanes, self._by_name):
                continue
            try:
                ticket.lease = self.admission.admit(demand, room, now)
                return
            except (Contended, QuotaTooSmall):
                continue
        self.admission.promise(demand, first, lane, now)
        raise first

    def _dispatch(self, now: float) -> list[Ticket]:
        """Run whoever is next while quota and workers have room; who waited too long is refused."""
        admission = self.admission
        woken, self._early = self._early, []
        woken += [self._refuse(demand.id, refusal) for demand, refusal in admission.expired(now)]
        progress = admission.waiting > 0
        while progress:
            progress, claimed = False, admission.claimed()
            for served in self.models.values():
                ran = list(self._run_waiting(served, now))
                woken += ran
                progress = progress or bool(ran)
            # A claim given up in one pool may be what another waited for.
            progress = progress or not claimed <= admission.claimed()
        return woken

    def _run_waiting(self, served: ServedModel, now: float) -> Iterator[Ticket]:
        pool = served.pool
        while self.admission.pools[served.name].queue:
            if not some(pool.table.usable()):
                for demand in self.admission.abandon(served.name, now):
                    yield self._refuse(demand.id, _no_worker())
                return
            if not pool.has_any_room():
                self.admission.pools[served.name].drop_claims()
                return
            lease = self.admission.next_waiting(served.name, Room(pool, now), now)
            if lease is None:
                return
            ticket = self._tickets[lease.id]
            ticket.lease = lease
            try:
                place(ticket, best_route(ticket, self.policy, now), self.leases, now)
            except NoReadyWorker as gone:
                # Its subset's last worker left while it waited; others may still run.
                self.admission.release(lease, now)
                self._refuse(lease.id, gone)
            yield ticket

    def _refuse(self, ticket_id: str, refusal: Refusal) -> Ticket:
        ticket = self._tickets.pop(ticket_id)
        ticket.refusal = refusal
        ticket.ended = True
        return ticket

    # -- ends ---------------------------------------------------------------------------

    def _free(self, ticket: Ticket, why: Freed, now: float) -> list[Ticket]:
        self._free_all([(ticket, why)], now)
        return self._dispatch(now)

    def _free_all(self, ended: Sequence[tuple[Ticket, Freed]], now: float) -> None:
        for ticket, why in ended:
            self.leases.forget(ticket)
            for booking in (ticket.booking, ticket.prefill):
                if booking is not None:
                    ticket.served.pool.release(booking)
            if ticket.lease is not None and not ticket.lease.released:
                self.admission.release(ticket.lease, now)
                self.leases.count(ticket, why)
            if ticket.renewable:
                ticket.ended = True
                self._tickets.pop(ticket.id, None)

    def _settle(self, ticket: Ticket, outcome: Outcome) -> None:
        """What the request really was, now that the engine has told."""
        if ticket.settled or ticket.demand is None or ticket.lease is None:
            return
        ticket.settled = True
        output_tokens, prompt_tokens = outcome.output_tokens, outcome.prompt_tokens
        if output_tokens is None or outcome.status >= 400:
            return
        demand = ticket.demand
        expected = sum(prompt.tokens for prompt in ticket.prompts)
        if outcome.error is EngineError.NONE:
            lane = ticket.profile.identity.lane
            self.work.observe(demand.pool, lane, expected, output_tokens)
        uncached = demand.uncached_tokens
        if prompt_tokens is not None and outcome.cached_tokens is not None:
            uncached = max(0, prompt_tokens - outcome.cached_tokens)
        self.admission.settle(ticket.lease, uncached + output_tokens)

    def _started_on_engine(self, ticket: Ticket, outcome: Outcome, now: float) -> None:
        """The engine's time to first token, for a request whose gateway told of none."""
        if ticket.started_at is None and ticket.lease is not None and outcome.ttft_s is not None:
            ticket.started_at = min(now, ticket.lease.granted_at + outcome.ttft_s)
            ttft_s = ticket.started_at - ticket.arrived_at
            ticket.served.level.first_token(ttft_s, self._budget_s(ticket), now)

    def _budget_s(self, ticket: Ticket) -> float | None:
        return ticket.demand.ttft_budget_s if ticket.demand else None


def _without_admission(policy: Policy, name: str) -> object:
    """A part of a policy as far as a running scheduler cannot change it."""
    part = getattr(policy, name)
    if name != "pools":
        return part
    changeable = {"admission": None, "scaling": None}
    return [pool.model_copy(update=changeable) for pool in part]


def _no_worker() -> NoReadyWorker:
    return NoReadyWorker("No worker of this model is ready.", retry_after_s=_RETRY_NO_WORKER_S)
