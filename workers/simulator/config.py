"""Sizes of an engine, checked as vLLM checks them at its start."""

from __future__ import annotations

from dataclasses import dataclass

from workers.simulator.timing import RTX_PRO_6000, StepTimes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine, named as vLLM's flags."""

    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32768
    timing: StepTimes = RTX_PRO_6000
    record_events: bool = True

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.block_size * self.num_blocks < self.max_model_len:
            raise ValueError(
                f"num_blocks {self.num_blocks} of block_size {self.block_size} cannot hold one "
                f"request of max_model_len {self.max_model_len}"
            )
