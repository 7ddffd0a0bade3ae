"""``PolicyReloader``: the policy file read again, in force as a whole or not at all."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal, TypeAlias

from extproc.desk import Desk
from extproc.errors import PolicyError
from extproc.policy import load_policy

logger = logging.getLogger("kvgate.server")

Result: TypeAlias = Literal["applied", "unchanged"]


class PolicyReloader:
    """One reload at a time, so that the last file read is the one in force."""

    def __init__(self, path: Path | None, desk: Desk) -> None:
        self._path = path
        self._desk = desk
        self._lock = asyncio.Lock()

    async def reload(self) -> Result:
        """Look at the file.

        Raises:
            PolicyError: it is wrong, or changes what only a restart can change; the policy
                of before is in force.
        """
        async with self._lock:
            try:
                result = await self._look()
            except PolicyError as error:
                self._tell("refused", logging.WARNING, why=str(error))
                raise
            self._tell(result, logging.INFO)
            return result

    async def _look(self) -> Result:
        if self._path is None:
            raise PolicyError("this scheduler was started without a policy file")
        # Off the event loop: a file system may hang.
        policy = await asyncio.to_thread(load_policy, self._path)
        if policy == self._desk.policy:
            return "unchanged"
        self._desk.adopt(policy)
        return "applied"

    def _tell(self, result: str, level: int, **more: str) -> None:
        self._desk.metrics.policy_reloads.labels(result).inc()
        facts = {"result": result, "policy": self._desk.policy.digest, **more}
        logger.log(level, "policy reload", extra={"facts": facts})
