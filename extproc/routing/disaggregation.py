"""Long prompts computed on one worker and answered by another: who computes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from extproc.fleet.table import Bools, Floats, WorkerTable
from extproc.policy import DisaggregationPolicy


@dataclass(frozen=True, slots=True)
class Handoff:
    """The column of the worker that prefills, and the tokens that it has to compute."""

    column: int
    uncached_tokens: int


def handoff(
    table: WorkerTable,
    leader: int,
    able: Bools,
    cached: Floats,
    prompt_tokens: int,
    policy: DisaggregationPolicy,
) -> Handoff | None:
    """Who prefills for the leader; None where it does so itself.

    A worker that only decodes hands over every long prompt, one that does both only where the
    other would be done sooner, the transfer of its KV blocks included.

    Args:
        able: workers that may prefill for others.
        cached: prompt tokens that each worker is expected to have.
    """
    uncached = prompt_tokens - cached
    if not policy.min_uncached_tokens or uncached[leader] < policy.min_uncached_tokens:
        return None
    if not (table.decodes[leader] and able.any()):
        return None
    work = (table.pending_prefill_tokens + uncached) * table.slowness
    there = np.where(able, work + policy.transfer_cost * prompt_tokens, np.inf)
    there[leader] = np.inf
    column = int(there.argmin())
    gains = there[column] < work[leader] or not table.prefills[leader]
    if not gains or np.isinf(there[column]):
        return None
    return Handoff(column, int(uncached[column]))
