"""``Flight``: one request on its way through a simulated cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from benchmarks.cluster import MODEL
from benchmarks.load.sample import Sample
from benchmarks.workloads.plan import Planned
from extproc.request.identity import DEFAULT_IDENTITY, Identity
from extproc.request.profile import Endpoint, RequestProfile

if TYPE_CHECKING:
    from benchmarks.simulation.worker import VirtualWorker
    from extproc.decision.ticket import Ticket


class Patience(msgspec.Struct, frozen=True):
    """Who comes back as told: one request in ``every``, for ``tries`` in all."""

    tries: int = 1
    every: int = 1

    def again(self, sample: Sample) -> bool:
        """Whether a refused request is tried once more."""
        tried = len(sample.refused) + 1
        return sample.number % self.every == 0 and tried < self.tries


class Flight:
    """One request on its way."""

    __slots__ = ("keys", "number", "planned", "sample", "ticket", "tries", "worker")

    def __init__(self, number: int, planned: Planned, keys: list[int], now: float) -> None:
        self.number = number
        self.planned = planned
        self.keys = keys
        tokens = planned.prompt_tokens
        self.sample = Sample(
            number,
            due_s=now,
            lag_s=0.0,
            sent_s=now,
            planned_tokens=tokens,
            tenant=planned.tenant,
            lane=planned.lane,
            prompt_tokens=tokens,
        )
        self.ticket: Ticket | None = None
        self.tries = 0
        self.worker: VirtualWorker | None = None


def profile_of(number: int, planned: Planned) -> RequestProfile:
    """Tenant and lane are as their headers would give them."""
    return RequestProfile(
        Endpoint.CHAT,
        MODEL,
        stream=True,
        max_output_tokens=planned.output_tokens,
        fingerprint=number + 1,
        identity=Identity(
            tenant=planned.tenant or DEFAULT_IDENTITY.tenant,
            lane=planned.lane or DEFAULT_IDENTITY.lane,
        ),
    )
