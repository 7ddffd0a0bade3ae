"""Cost terms over arrays, one value a worker, all in tokens of prefill work."""

from __future__ import annotations

from extproc.fleet.table import Floats, Ints
from extproc.policy import RoutingPolicy


def balanced(
    uncached_tokens: Ints, pending_prefill_tokens: Ints, running: Ints, policy: RoutingPolicy
) -> Floats:
    """``a * uncached + pending prefill + r * running``, lowest is best.

    Uncached tokens count several times because the conversation's next turn comes back
    too, and what is recomputed pushes something else out; ``r`` is what one more decoding
    neighbour costs. Weights were found by sweeps over shared prompts, chats and long/short
    mixes (docs/architecture.md, "Routing").
    """
    cost: Floats = (
        policy.uncached_weight * uncached_tokens
        + policy.pending_prefill_weight * pending_prefill_tokens
        + policy.running_cost_tokens * running
    )
    return cost
