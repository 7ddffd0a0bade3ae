"""``Lease``: one admitted request's hold on its pool, given back exactly once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Lease:
    """Made by admission and told to the worker; ``released`` makes release idempotent."""

    id: str
    granted_at: float
    released: bool = False
