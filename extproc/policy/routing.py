"""How a worker is chosen."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from extproc.policy.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class RoutingPolicy(Section):
    """Weights of the ``balanced`` cost, all in tokens of prefill work; lowest cost wins."""

    uncached_weight: NonNegativeFloat = 3.0
    """Cost of each prompt token that the worker would have to compute."""
    pending_prefill_weight: NonNegativeFloat = 1.0
    """Cost of each token sent to the worker whose request has no first token yet."""
    running_cost_tokens: NonNegativeFloat = 120.0
    """Cost of each request running or waiting on the worker."""
    min_prefix_tokens: NonNegativeInt = 0
    """A shorter cached prefix gives no credit."""
    host_hit_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """What a block in the engine's host memory is worth beside one where it computes."""
    endpoints: Annotated[int, Field(ge=1, le=16)] = 3
    """Length of the ordered list that Envoy's retries walk."""
    max_in_flight_per_worker: PositiveInt = 256
    """Slots of a worker that does not report how many sequences it runs."""
    suspect_s: NonNegativeFloat = 2.0
    """A worker that Envoy had to retry away from is a last resort for this long."""
