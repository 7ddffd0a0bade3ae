"""``PoolTerms``: the settings that a scheduler tells its agents, checked.

A scheduler is trusted, but a wrong number from it must not make the agent allocate
gigabytes, divide by zero or send without pause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from extproc.cache.digest import DigestShape
from extproc.errors import DigestError
from extproc.generated.kvgate.v1 import agent_pb2
from workers.agent.worker_cache import LedgerKind

DEFAULT_REPORT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.01
MAX_BLOCK_SIZE_TOKENS = 65_536


class SettingsError(Exception):
    """The scheduler's settings cannot be worked with."""


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """A pool's settings, checked."""

    pool: str
    kind: LedgerKind
    error_rate: float
    report_interval_s: float
    delta_interval_s: float
    snapshot_interval_s: float

    @classmethod
    def of(cls, message: agent_pb2.PoolSettings) -> PoolTerms:
        """Check a message.

        Raises:
            SettingsError: a number is out of range.
        """
        intervals = (
            message.report_interval_s,
            message.delta_interval_s,
            message.snapshot_interval_s,
        )
        if not all(MIN_INTERVAL_S <= seconds < math.inf for seconds in intervals):
            raise SettingsError(f"intervals {intervals} are not in {MIN_INTERVAL_S}..inf")
        if not 0 < message.block_size_tokens <= MAX_BLOCK_SIZE_TOKENS:
            raise SettingsError(f"block size {message.block_size_tokens} is out of range")
        try:
            DigestShape(message.digest_capacity, message.digest_error_rate)
        except DigestError as error:
            raise SettingsError(str(error)) from error
        kind = LedgerKind(message.key_namespace, message.block_size_tokens, message.digest_capacity)
        return cls(message.pool, kind, message.digest_error_rate, *intervals)
