"""What the Scheduler API answers, as messages."""

from __future__ import annotations

from dataclasses import asdict

from extproc.decision.estimate import Estimate
from extproc.decision.ticket import Decision
from extproc.errors import Refusal
from extproc.generated.kvgate.v1 import scheduler_pb2 as pb
from extproc.replies import retry_after_s


def admitted_message(decision: Decision, *, holds: bool) -> pb.Admitted:
    """An admitted request.

    Args:
        holds: whether there is something to release; requests without a body hold nothing.
    """
    return pb.Admitted(
        lease=decision.id if holds else "",
        endpoints=decision.endpoints,
        cached_tokens=decision.cached_tokens,
        prompt_tokens=decision.prompt_tokens,
        queue_wait_s=decision.queue_wait_s,
        lane=decision.lane,
        degraded=decision.degraded,
        max_output_tokens=decision.max_output_tokens,
        model=decision.model,
        cache_salt=decision.cache_salt,
        priority=decision.engine_priority,
        prefiller=decision.prefiller,
    )


def selected_message(decision: Decision) -> pb.Selected:
    """Workers for a request that is admitted elsewhere."""
    return pb.Selected(
        endpoints=decision.endpoints,
        cached_tokens=decision.cached_tokens,
        prompt_tokens=decision.prompt_tokens,
        cache_salt=decision.cache_salt,
    )


def refusal_message(refusal: Refusal) -> pb.Refusal:
    """A refusal, with all that a gateway needs to answer its client as kvgate would."""
    wait_s = retry_after_s(refusal)
    return pb.Refusal(
        code=refusal.code,
        http_status=refusal.http_status,
        message=refusal.message,
        type=refusal.error_type,
        param=refusal.param or "",
        reason=refusal.reason or "",
        retryable=refusal.retryable,
        retry_after_ms=None if wait_s is None else round(1000 * wait_s),
    )


def estimate_message(estimate: Estimate) -> pb.Estimate:
    """An estimate; the fields have the same names on both sides."""
    return pb.Estimate(**asdict(estimate))
