"""``Lateness``: how much later first tokens come than the prefill alone would take."""

from __future__ import annotations

_PACE = 0.1
_DEVIATIONS = 3.0


class Lateness:
    """Mean and mean deviation of what a prediction missed, as TCP keeps them for round trips
    (Jacobson, SIGCOMM 1988): ``margin = mean + 3 * deviation``.

    Batching beside other requests makes first tokens late by more than their own prefill; a
    request that runs at the last moment that prefill allows would miss its budget.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._seen = 0

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """A first token came ``actual_s`` after its request was sent to a worker."""
        self._seen += 1
        pace = max(_PACE, 1.0 / self._seen)
        error_s = actual_s - predicted_s
        self._deviation_s += pace * (abs(error_s - self._mean_s) - self._deviation_s)
        self._mean_s += pace * (error_s - self._mean_s)

    @property
    def margin_s(self) -> float:
        """What to add to a prediction so that few first tokens come later; never negative."""
        return max(0.0, self._mean_s + _DEVIATIONS * self._deviation_s)
