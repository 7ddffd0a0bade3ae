"""What is believed of the workers' caches."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from extproc.policy.base import PositiveFloat, PositiveInt, Section


class DigestPolicy(Section):
    """Size and pace of the Bloom digests; one for the whole pool so that columns align."""

    capacity_blocks: Annotated[int, Field(gt=0, le=16_777_216)] = 65_536
    """Keys a worker's digest may hold; at least the engine's number of KV blocks."""
    error_rate: Annotated[float, Field(ge=1e-6, le=0.5)] = 0.01
    """False-positive rate at capacity."""
    snapshot_interval_s: PositiveFloat = 30.0
    """A whole digest at least this often; deltas in between."""
    delta_interval_s: PositiveFloat = 0.5
    """New keys are sent at most this often."""
    max_age_s: PositiveFloat = 90.0
    """An older digest gives no cache credit."""


class OverlayPolicy(Section):
    """Credit for prefixes just routed, before the worker's digest tells of them."""

    ttl_s: PositiveFloat = 2.0
    """Shortest life of an entry where the worker sends digests; the longest is twice that.
    A longer one goes on claiming prompts that the engine has evicted."""
    ttl_without_digest_s: PositiveFloat = 300.0
    """The same where it sends none, and in pools without a tokenizer: the overlay is then all
    there is."""
    max_keys_per_worker: PositiveInt = 131_072
    """Keys kept; beyond it the older generation ends early."""
