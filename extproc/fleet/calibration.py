"""``Calibration``: what engines served from their caches against what was predicted."""

from __future__ import annotations

from collections import OrderedDict

_REMEMBERED = 16_384
"""Predictions kept for outcomes to come; older ones are dropped unread."""
_FADE = 0.98
"""Kept of the sums with every outcome: about the last fifty count."""
_PRIOR_TOKENS = 4_096
"""Tokens predicted and found that a worker begins with, so that one odd request is not all."""


class Calibration:
    """Predictions by lease, and fading sums of predicted and found tokens by column."""

    def __init__(self) -> None:
        self._expected: OrderedDict[str, int] = OrderedDict()
        self._sums: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, lease: str, cached_tokens: int) -> None:
        """A request was sent out with this prediction, replacing the one before it."""
        if cached_tokens > 0:
            self._expected[lease] = cached_tokens
            if len(self._expected) > _REMEMBERED:
                self._expected.popitem(last=False)

    def learn(self, column: int, lease: str, cached_tokens: int) -> float:
        """An engine served so many tokens of this request from its cache.

        Returns:
            What a predicted token of this worker is worth, 0 to 1.
        """
        predicted, found = self._sums.get(column, (0.0, 0.0))
        expected = self._expected.pop(lease, 0)
        if expected:
            predicted = predicted * _FADE + expected
            found = found * _FADE + min(cached_tokens, expected)
            self._sums[column] = predicted, found
        return (found + _PRIOR_TOKENS) / (predicted + _PRIOR_TOKENS)

    def forget(self, column: int) -> None:
        """The worker is new, or its cache is."""
        self._sums.pop(column, None)
