"""``demand_of``: one request as admission sees it."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.admission.demand import Demand
from extproc.admission.work import WorkEstimator
from extproc.decision.ticket import Ticket
from extproc.policy import LanePolicy, Policy


def demand_of(
    ticket: Ticket,
    uncached_tokens: int,
    policy: Policy,
    lanes: Mapping[str, LanePolicy],
    work: WorkEstimator,
) -> Demand:
    """Who asks for how much work, and until when it is of use.

    Args:
        uncached_tokens: of its prompt, on the worker that it would go to now.
        lanes: by name.
    """
    profile, served = ticket.profile, ticket.served
    identity = profile.identity
    arrived_at = ticket.arrived_at
    prompt_tokens = sum(prompt.tokens for prompt in ticket.prompts)
    name = profile.model
    lane = lanes.get(identity.lane)
    output_tokens = 0
    if profile.endpoint.generates:
        cap = profile.max_output_tokens
        output_tokens = work.output_tokens(served.name, identity.lane, prompt_tokens, cap)
    return Demand(
        id=ticket.id,
        pool=served.name,
        name=name,
        adapter=name if name and not served.pool.is_base(name) else "",
        tenant=identity.tenant,
        tenant_class=identity.tenant_class,
        lane=identity.lane,
        weight=policy.tenant_weight(identity.tenant, identity.tenant_class),
        uncached_tokens=uncached_tokens,
        output_tokens=output_tokens,
        arrived_at=arrived_at,
        prefill_s=served.pool.prefill_s(uncached_tokens) + served.lateness.margin_s,
        body_bytes=profile.body_bytes,
        fingerprint=profile.fingerprint,
        deadline_at=None if identity.deadline_s is None else arrived_at + identity.deadline_s,
        ttft_budget_s=identity.ttft_budget_s or (lane.ttft_budget_s if lane else None),
        max_queue_time_s=identity.max_queue_time_s,
    )
