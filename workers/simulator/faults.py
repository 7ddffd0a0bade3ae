"""Faults on demand: generation requests that fail, and a metrics page that is of no use."""

from __future__ import annotations

import asyncio

from workers.simulator.errors import ApiError

SLOW_PAGE_S = 30.0
METRICS_FAULTS = ("404", "renamed", "garbage", "slow")


class Faults:
    """What still has to fail, and how."""

    def __init__(self) -> None:
        self.metrics = ""
        """One of ``METRICS_FAULTS``; empty: the page is fine."""
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

    async def spoiled(self, page: bytes) -> bytes:
        """The metrics page as it is to be answered.

        Raises:
            ApiError: there is no page.
        """
        match self.metrics:
            case "404":
                raise ApiError(404, "simulated failure")
            case "renamed":
                return page.replace(b"vllm:", b"vllm:new_")
            case "garbage":
                return b"\x00<html>" + page[::-1]
            case "slow":
                await asyncio.sleep(SLOW_PAGE_S)
        return page
