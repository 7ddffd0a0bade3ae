"""Degrade ladders: what one step changes of a request."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.admission.demand import Demand
from extproc.decision.ticket import ServedModel, ServeInstead, Ticket
from extproc.policy import DegradeStep, LanePolicy


def step_down(
    ticket: Ticket,
    demand: Demand,
    step: DegradeStep,
    lanes: Mapping[str, LanePolicy],
    models: Mapping[str, ServedModel],
) -> bool:
    """Take one step; False if it would change nothing, or a body that cannot be changed.

    Raises:
        ServeInstead: the step is another model.
    """
    if step.lane is not None:
        return _change_lane(ticket, demand, lanes[step.lane])
    if not ticket.profile.degradable:
        return False
    if step.max_output_tokens is not None:
        return _shorten(ticket, demand, step.max_output_tokens)
    if step.model is None or ticket.changed_model or models[step.model] is ticket.served:
        return False
    raise ServeInstead(step.model, [*ticket.steps, f"model={step.model}"])


def _shorten(ticket: Ticket, demand: Demand, tokens: int) -> bool:
    cap = ticket.profile.max_output_tokens
    if cap is not None and cap <= tokens:
        return False
    ticket.cap_tokens = tokens
    demand.output_tokens = min(demand.output_tokens, tokens)
    ticket.steps.append(f"max_output_tokens={tokens}")
    return True


def _change_lane(ticket: Ticket, demand: Demand, lane: LanePolicy) -> bool:
    if lane.name == demand.lane:
        return False
    demand.lane = lane.name
    if ticket.profile.identity.ttft_budget_s is None:
        demand.ttft_budget_s = lane.ttft_budget_s
    ticket.steps.append(f"lane={lane.name}")
    return True
