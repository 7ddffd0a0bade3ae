"""Whether and when a request runs: lanes, quotas, estimates, leases."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from extproc.policy.base import (
    ModelName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

RuleName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]
Share = Annotated[float, Field(ge=0, le=1)]
Dimension = Literal["model", "adapter", "tenant", "tenant_class", "lane"]

POOL_RULE = "pool"
"""Name of the rule that every pool has of itself."""


class PoolAdmissionPolicy(Section):
    """The pool's own limits: a quota rule named `pool` that matches all its requests."""

    max_concurrency: PositiveInt | None = None
    """Requests of this pool running at once, over all workers; the workers' own room is
    asked in any case."""
    max_queue: NonNegativeInt = 512
    """Requests that may wait; 0 never queues. Who was refused and comes back as told still
    finds a place, up to twice as many."""
    max_queue_bytes: PositiveInt = 1_073_741_824
    """Bodies that waiting requests may hold in memory."""
    max_queue_time_s: PositiveFloat = 30.0
    """A request that waited this long gets 429."""
    max_prefill_s: PositiveFloat | None = None
    """A worker with more prefill than this ahead of it, by its learned rate, gets nothing more
    for now: a request waits here, where a free worker or a more urgent request can still change
    its place, and not inside an engine. About half the TTFT budget is a good start."""
    kv_patience_s: NonNegativeFloat = 2.0
    """A waiting request that no worker has the KV blocks for runs anyway after this long:
    smaller ones that fit must not pass it for ever. The engine then makes room itself."""


class LanePolicy(Section):
    """A priority class of requests."""

    name: RuleName
    """Name that requests use, in the header or by their tenant's default."""
    priority: NonNegativeInt = 0
    """Lower goes first; lanes of equal priority share by weight."""
    weight: PositiveFloat = 1.0
    """Share of work among lanes of the same priority."""
    min_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Part of the admitted tokens that the lane gets while it waits, whatever its priority."""
    promote_after_s: PositiveFloat | None = None
    """A request that waited this long moves to the next higher priority, and again."""
    ttft_budget_s: PositiveFloat | None = None
    """Time to first token that its requests are given unless they say otherwise; a request
    that must wait and cannot meet it is degraded or refused at the door."""
    tpot_budget_s: PositiveFloat | None = None
    """Time per output token that counts as good, for goodput."""


class QuotaMatch(Section):
    """Which requests a rule counts: every list that is given must contain the request's."""

    models: tuple[ModelName, ...] = ()
    """Pools by their `model`; empty: all."""
    adapters: tuple[ModelName, ...] = ()
    """Adapter names; empty: any, and none."""
    tenants: tuple[str, ...] = ()
    """Tenants; empty: all."""
    tenant_classes: tuple[str, ...] = ()
    """Tenant classes; empty: all."""
    lanes: tuple[RuleName, ...] = ()
    """Lanes; empty: all."""


class DegradeStep(Section):
    """One step down, taken instead of a refusal; exactly one field is given."""

    max_output_tokens: PositiveInt | None = None
    """Cap the answer's length at this."""
    model: ModelName | None = None
    """Serve by this model instead."""
    lane: RuleName | None = None
    """Wait in this lane instead."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [self.max_output_tokens, self.model, self.lane]
        if sum(field is not None for field in given) != 1:
            raise ValueError("needs exactly one of max_output_tokens, model, lane")
        return self


class QuotaRule(Section):
    """Limits over the requests that it matches. A limit that is not given does not bind."""

    name: RuleName
    """Shown as the reason of a wait or a refusal: `quota:<name>`."""
    match: QuotaMatch = QuotaMatch()
    """Which requests it counts."""
    per: tuple[Dimension, ...] = ()
    """Count each value of these apart: `[tenant]` gives every matching tenant the limits."""
    concurrency: PositiveInt | None = None
    """Requests running at once."""
    tokens_in_flight: PositiveInt | None = None
    """Work running at once: uncached prompt tokens and expected output tokens."""
    requests_per_minute: PositiveFloat | None = None
    """Requests admitted a minute."""
    tokens_per_minute: PositiveFloat | None = None
    """Work admitted a minute, corrected when the real number is known."""
    burst_s: PositiveFloat = 10.0
    """Seconds' worth of the rates that may be used at once after a pause."""
    max_queue: NonNegativeInt | None = None
    """Requests of this rule that may wait; 0 never queues."""
    max_queue_time_s: PositiveFloat | None = None
    """Longest wait of its requests."""
    borrow_from: tuple[RuleName, ...] = ()
    """Rules whose idle concurrency and tokens in flight it may use when its own are gone."""
    lend_share: Share = 1.0
    """Part of its limits that may be lent."""
    tighten_to: Annotated[float, Field(gt=0, le=1)] | None = None
    """Under queue pressure its concurrency and tokens in flight shrink step by step down to
    this part. For lanes that can wait."""
    degrade: tuple[DegradeStep, ...] = ()
    """What to try, in order, before this rule refuses a request."""


class PressurePolicy(Section):
    """When rules with `tighten_to` shrink, and grow again."""

    tighten_above_s: PositiveFloat = 2.0
    """Expected wait of the lanes of the highest priority that starts the tightening."""
    loosen_below_s: NonNegativeFloat = 0.5
    """Expected wait under which it is taken back."""
    step_s: PositiveFloat = 2.0
    """Time between two steps; each halves what is left, or gives a quarter back."""

    @model_validator(mode="after")
    def _has_hysteresis(self) -> Self:
        if self.loosen_below_s >= self.tighten_above_s:
            raise ValueError("needs loosen_below_s < tighten_above_s")
        return self


class LeasePolicy(Section):
    """When a lease whose end nobody told is given back."""

    absent_reports: PositiveInt = 3
    """A request that its worker once listed and has left out of this many reports in a row
    has ended there."""
    unseen_s: PositiveFloat = 60.0
    """One that its worker never listed has not arrived there after this long. Workers that
    list their requests only."""
    api_ttl_s: PositiveFloat = 120.0
    """A lease of the Scheduler API on a worker that lists none ends after this long without
    a renewal."""
    reconcile_interval_s: PositiveFloat = 60.0
    """Pace of counting leases against reports."""


class AdmissionPolicy(Section):
    """Global admission: over all pools and workers."""

    lanes: Annotated[tuple[LanePolicy, ...], Field(min_length=1, max_length=16)] = (
        LanePolicy(name="online"),
        LanePolicy(name="batch", priority=1, min_share=0.05, promote_after_s=60.0),
    )
    """Priority classes; the first is the default of requests that name none."""
    rules: Annotated[tuple[QuotaRule, ...], Field(max_length=256)] = ()
    """Quotas, in any order: a request needs room in every rule that matches it."""
    quantum_tokens: PositiveInt = 1_024
    """Work that a tenant of weight 1 may add to its turn at each round."""
    default_output_tokens: PositiveInt = 256
    """Expected length of an answer until some were seen."""
    pressure: PressurePolicy = PressurePolicy()
    """When low lanes give way."""
    leases: LeasePolicy = LeasePolicy()
    """How leaks are found."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        lanes = _unique("lane", [lane.name for lane in self.lanes])
        rules = _unique("rule", [rule.name for rule in self.rules])
        if sum(lane.min_share for lane in self.lanes) > 0.9:
            raise ValueError("min_share of all lanes is over 0.9")
        if POOL_RULE in rules:
            raise ValueError(f"rule name {POOL_RULE!r} belongs to the pools' own limits")
        shared = {rule.name for rule in self.rules if not rule.per}
        for rule in self.rules:
            steps = [step.lane for step in rule.degrade if step.lane]
            for lane in (*rule.match.lanes, *steps):
                if lane not in lanes:
                    raise ValueError(f"rule {rule.name!r} names unknown lane {lane!r}")
            for lender in rule.borrow_from:
                if lender not in shared or rule.per or lender == rule.name:
                    raise ValueError(
                        f"rule {rule.name!r} cannot borrow from {lender!r}: both must exist,"
                        " differ and count without `per`"
                    )
        return self


def _switch(value: object) -> object:
    """YAML reads a bare ``on`` as true."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Switch = Annotated[Literal["on", "off", "shadow"], BeforeValidator(_switch)]


class RolloutPolicy(Section):
    """What acts, what only watches. Meant to be switched on in this order."""

    admission: Switch = "on"
    """`off`: every request runs at once. `shadow`: decided and counted, never acted on."""
    cache_routing: Switch = "on"
    """`off`: load alone routes. `shadow`: the cache-aware pick is logged and not used."""
    scaling: Switch = "on"
    """`off`: no desired number of workers. `shadow`: shown by the API, not as the metric
    that autoscalers read."""


def _unique(what: str, names: list[str]) -> set[str]:
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ValueError(f"{what} {name!r} is defined twice")
    return set(names)
