"""How long one engine step takes.

``step = base + per_sequence * decoding + (prefill_overhead + tokens / rate if any prefill)``.

Defaults fit vLLM 0.19 serving Llama-3.1-8B on an RTX PRO 6000 (300 ShareGPT requests,
``vllm_measured/`` of LLMServingSim). Decode, 10.8 + 0.14n ms, is the fit to the seconds
without prefill. The prefill part is a least-squares fit over the 141 requests that had their
first step to themselves: scheduled-to-first-token is 29.2 + 0.32n + 0.0332 ms a token
(residual 10 ms). vLLM schedules one step ahead, so one decode step of that is the step
before; what is left is 7.6 ms more than decode and 30,000 tokens/s. A term for attention
over long context comes out negative: prompts of at most 2,048 tokens do not show it, so
there is none, and long prompts are flattered.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step-time model; ``speedup`` divides every time."""

    base_s: float = 10.8e-3
    per_sequence_s: float = 0.14e-3
    prefill_overhead_s: float = 7.6e-3
    prefill_tokens_per_s: float = 30_000.0
    speedup: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ValueError(f"{field.name} must not be negative, got {value!r}")
        for name in ("prefill_tokens_per_s", "speedup"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")

    def step_s(self, decoding: int, prefill_tokens: int) -> float:
        """Duration of a step with ``decoding`` sequences and this many prompt tokens."""
        duration = self.base_s + self.per_sequence_s * decoding
        if prefill_tokens:
            duration += self.prefill_overhead_s + prefill_tokens / self.prefill_tokens_per_s
        return duration / self.speedup


RTX_PRO_6000 = StepTimes()
"""Llama-3.1-8B on an RTX PRO 6000, as measured."""

RTX_4090 = StepTimes(base_s=18.0e-3, per_sequence_s=0.27e-3, prefill_tokens_per_s=15_000.0)
"""The same model on an RTX 4090: decode as fitted to its seconds without prefill, prefill by
what its one-second averages reach. Its KV cache, 41,408 tokens, makes requests wait."""

PEERS_MOCK = StepTimes(
    base_s=12e-3, per_sequence_s=0.24e-3, prefill_overhead_s=5e-3, prefill_tokens_per_s=8_000.0
)
"""Near the mock that the other routers were measured on: 5 ms + 8,000 tokens/s, TPOT 12 ms
rising by 2% a sequence. There prefill does not hold up decoding; here, as in vLLM, it does."""

PRESETS = {"rtx-pro-6000": RTX_PRO_6000, "rtx-4090": RTX_4090, "peers-mock": PEERS_MOCK}
