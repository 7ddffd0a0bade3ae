"""What the engine is asked, and what it says back.

The answer's tokens are known in advance: they are the part of the chain after the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from workers.simulator.chain import Origin, TokenChain


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence. Fields below ``answer_tokens`` belong to the engine.

    An ``answer_tokens`` of 0 is a pooling request: it ends when its prompt is computed.
    """

    request_id: str
    chain: TokenChain
    prompt_tokens: int
    answer_tokens: int
    phase: Phase = Phase.WAITING
    arrived_s: float = 0.0
    scheduled_s: float | None = None
    cached_tokens: int = 0
    computed: int = 0
    generated: int = 0
    preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    stored_blocks: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError("a prompt needs at least one token")
        if len(self.chain) < self.prompt_tokens + self.answer_tokens:
            raise ValueError("the chain is shorter than prompt and answer")


@dataclass(frozen=True, slots=True)
class Output:
    """A sequence got ``tokens`` more tokens (0 for pooling), and perhaps its end."""

    request: EngineRequest
    tokens: int
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks became findable, in order, hanging from ``parent``."""

    hashes: list[int]
    parent: int | None
    token_bytes: memoryview
    block_size: int
    first_block: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One physical copy of a hash is gone."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was reset."""


CacheEvent = BlocksStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class EngineStats:
    """Counters since the start."""

    steps: int = 0
    step_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
