"""Errors on demand: the next few generation requests fail."""

from __future__ import annotations

from workers.simulator.errors import ApiError


class Faults:
    """How many requests still have to fail, and with which status."""

    def __init__(self) -> None:
        self._status = 500
        self._left = 0

    def fail_next(self, status: int, count: int) -> None:
        """Fail the next ``count`` requests; 0 ends it."""
        self._status = status
        self._left = count

    def check(self) -> None:
        """Fail this request if its turn has come.

        Raises:
            ApiError: it has.
        """
        if self._left > 0:
            self._left -= 1
            raise ApiError(self._status, "simulated failure")
