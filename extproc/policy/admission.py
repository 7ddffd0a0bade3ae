"""Whether and when a request runs."""

from __future__ import annotations

from extproc.policy.base import NonNegativeInt, PositiveFloat, PositiveInt, Section


class AdmissionPolicy(Section):
    """Global admission of one pool."""

    max_concurrency: PositiveInt = 1_024
    """Requests of this pool running at once, over all workers."""
    max_queue: NonNegativeInt = 512
    """Requests that may wait; 0 never queues."""
    max_queue_time_s: PositiveFloat = 30.0
    """A request that waited this long gets 429."""
