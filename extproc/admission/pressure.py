"""``Pressure``: low lanes' quotas tightened while high lanes wait, loosened in the valley."""

from __future__ import annotations

from extproc.policy import PressurePolicy

_TIGHTER = 0.5
_LOOSER = 0.25


class Pressure:
    """Steps a level between 1 (all quota) and 0 (each rule's ``tighten_to``).

    Between the two thresholds nothing moves, and no two steps come closer than ``step_s``,
    so that a queue at the edge does not make quotas flap.
    """

    def __init__(self, policy: PressurePolicy, now: float) -> None:
        self._policy = policy
        self._stepped_at = now
        self.level = 1.0

    def update(self, expected_wait_s: float, now: float) -> bool:
        """Take a step if one is due; True when the level changed."""
        if now - self._stepped_at < self._policy.step_s:
            return False
        before = self.level
        if expected_wait_s > self._policy.tighten_above_s:
            self.level = self.level * _TIGHTER if self.level > 0.1 else 0.0
        elif expected_wait_s < self._policy.loosen_below_s:
            self.level = min(1.0, self.level + _LOOSER)
        if self.level == before:
            return False
        self._stepped_at = now
        return True
