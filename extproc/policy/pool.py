"""The workers of one base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from extproc.policy.admission import PoolAdmissionPolicy, RuleName
from extproc.policy.base import Address, ModelName, Section
from extproc.policy.cache import DigestPolicy, OverlayPolicy
from extproc.policy.routing import RoutingPolicy
from extproc.policy.scaling import ScalingPolicy
from extproc.policy.trust import TrustPolicy

EnginePriority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class PoolPolicy(Section):
    """The workers that serve one base model."""

    model: ModelName
    """Name that requests use; also the pool's name in metrics."""
    aliases: tuple[ModelName, ...] = ()
    """Further names of the same model."""
    adapters: tuple[ModelName, ...] = ()
    """Adapter names that the pool serves; each has keys of its own."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer directory or tokenizer.json; without one, keys are over
    characters and only what was routed here is known (text mode)."""
    chat_template: Path | None = None
    """A Jinja file in place of the tokenizer's own template."""
    model_revision: str = ""
    """Part of every block key; change it when the weights change under the same name."""
    block_size_tokens: Annotated[int, Field(gt=0, le=4_096)] = 16
    """The engine's `--block-size`; a worker with another one gets no cache credit."""
    workers: tuple[Address, ...] = ()
    """Workers without an agent: always thought ready, balanced by kvgate's own counts."""
    digest: DigestPolicy = DigestPolicy()
    """What agents tell of their caches."""
    overlay: OverlayPolicy = OverlayPolicy()
    """What routing itself expects in the caches."""
    routing: RoutingPolicy = RoutingPolicy()
    """How a worker is chosen."""
    trust: TrustPolicy = TrustPolicy()
    """Who may share cached prefixes."""
    engine_priority: dict[RuleName, EnginePriority] = Field(default_factory=dict)
    """vLLM's `priority` for each lane, lower first, where the engine runs with
    `--scheduling-policy priority`: `{online: 0, batch: 10}`. Replaces what clients send; without
    any, bodies keep theirs."""
    admission: PoolAdmissionPolicy = PoolAdmissionPolicy()
    """How much may run and wait."""
    scaling: ScalingPolicy = ScalingPolicy()
    """How many workers it should have."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every model name that a request may use for this pool."""
        return (self.model, *self.aliases, *self.adapters)

    @model_validator(mode="after")
    def _workers_are_distinct(self) -> Self:
        for number, address in enumerate(self.workers):
            if address in self.workers[:number]:
                raise ValueError(f"worker {address!r} is listed twice")
        return self
