"""How many workers a pool should have."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from extproc.policy.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section


class ScalingPolicy(Section):
    """Bounds and thresholds of the desired number of workers; kvgate starts none itself."""

    min_workers: PositiveInt = 1
    """Warm floor: never fewer."""
    max_workers: PositiveInt = 1_024
    """Never more."""
    headroom: NonNegativeFloat = 0.2
    """Spare part on top of what the load needs."""
    target_wait_s: PositiveFloat = 5.0
    """A longer expected wait asks for more workers."""
    target_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.8
    """KV blocks in use that a worker is meant to stay under."""
    max_ttft_violation_rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """More first tokens than this behind their budget ask for one worker more."""
    scale_in_after_s: NonNegativeFloat = 300.0
    """The number falls only to the highest that was desired within this time."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError("needs min_workers <= max_workers")
        return self
