"""Whether a request that ended was good for its client."""

from __future__ import annotations

from extproc.decision.ticket import Ticket
from extproc.fleet.worker import EngineError
from extproc.policy import LanePolicy


def met_budgets(ticket: Ticket, lane: LanePolicy | None) -> bool:
    """Whether it counts as goodput: no error, first token and pace within their budgets.

    What the engine has not told, or not yet, is not held against it.
    """
    if ticket.started_at is None or ticket.demand is None or ticket.status >= 400:
        return False
    budget_s = ticket.demand.ttft_budget_s
    if budget_s is not None and ticket.started_at - ticket.arrived_at > budget_s:
        return False
    outcome = ticket.outcome
    if outcome is None:
        return True
    if outcome.status >= 400 or outcome.error not in (EngineError.NONE, EngineError.UNKNOWN):
        return False
    pace_s = lane.tpot_budget_s if lane else None
    output_tokens = outcome.output_tokens or 0
    if pace_s is None or outcome.ttft_s is None or output_tokens < 2:
        return True
    return (outcome.duration_s - outcome.ttft_s) / (output_tokens - 1) <= pace_s
