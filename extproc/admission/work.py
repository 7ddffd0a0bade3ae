"""``WorkEstimator``: how long an answer is likely to be, learned from those seen."""

from __future__ import annotations

from dataclasses import dataclass

_PACE = 0.05
"""Weight of the newest answer once many were seen; the first ones are averaged."""
_LARGEST_BUCKET = 24


@dataclass(slots=True)
class _Length:
    mean_tokens: float = 0.0
    seen: int = 0


class WorkEstimator:
    """Mean output length by pool, lane and size of the prompt in powers of two.

    Bounded by pools times lanes times 25 sizes; lives on when the policy is reloaded.
    """

    def __init__(self, default_output_tokens: int) -> None:
        self.default_output_tokens = default_output_tokens
        self._lengths: dict[tuple[str, str, int], _Length] = {}

    def output_tokens(self, pool: str, lane: str, prompt_tokens: int, cap: int | None) -> int:
        """Expected output of a request, at most ``cap`` tokens where the client gave one."""
        length = self._lengths.get((pool, lane, _bucket(prompt_tokens)))
        expected = round(length.mean_tokens) if length else self.default_output_tokens
        return expected if cap is None else min(expected, cap)

    def observe(self, pool: str, lane: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer ended after so many tokens."""
        key = (pool, lane, _bucket(prompt_tokens))
        length = self._lengths.setdefault(key, _Length())
        length.seen += 1
        pace = max(_PACE, 1.0 / length.seen)
        length.mean_tokens += pace * (output_tokens - length.mean_tokens)


def _bucket(prompt_tokens: int) -> int:
    return min(prompt_tokens.bit_length(), _LARGEST_BUCKET)
