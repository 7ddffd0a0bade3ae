"""``RateBucket``: so much a minute, with a bounded burst."""

from __future__ import annotations

_SLACK = 1e-9


class RateBucket:
    """A token bucket that may go into debt.

    Something larger than the whole bucket may go when the bucket is full and leaves a debt
    that time repays, so over t seconds at most ``rate * t + capacity`` is begun, plus what
    one oversized request overshoots.
    """

    __slots__ = ("_at", "capacity", "level", "per_s")

    def __init__(self, per_minute: float, burst_s: float, now: float) -> None:
        self.per_s = per_minute / 60.0
        self.capacity = max(1.0, self.per_s * burst_s)
        self.level = self.capacity
        self._at = now

    def has(self, amount: float, now: float) -> bool:
        """Whether this much may go now."""
        self._refill(now)
        return self.level >= min(amount, self.capacity) - _SLACK

    def take(self, amount: float, now: float) -> None:
        """It goes."""
        self._refill(now)
        self.level -= amount

    def correct(self, amount: float) -> None:
        """Something that went was larger by this much than thought, or smaller."""
        self.level = min(self.capacity, self.level - amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Time until this much may go, if nothing else goes before."""
        self._refill(now)
        return max(0.0, (min(amount, self.capacity) - self.level) / self.per_s)

    def full(self, now: float) -> bool:
        """Whether it remembers nothing."""
        self._refill(now)
        return self.level >= self.capacity

    def adopt(self, other: RateBucket, now: float) -> None:
        """Go on where a bucket of other limits was: the same part of it is used up."""
        other._refill(now)
        self.level = self.capacity * other.level / other.capacity
        self._at = now

    def _refill(self, now: float) -> None:
        if now > self._at:
            self.level = min(self.capacity, self.level + (now - self._at) * self.per_s)
            self._at = now
