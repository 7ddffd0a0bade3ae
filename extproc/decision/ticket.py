"""``Ticket``: one request from arrival to end, and what was decided for it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from extproc.admission.demand import Demand, Lease
from extproc.admission.lateness import Lateness
from extproc.admission.scaling import Desire, DesiredWorkers
from extproc.admission.service_level import ServiceLevel
from extproc.errors import Refusal
from extproc.fleet.pool import Pool
from extproc.fleet.worker import Booking, Outcome
from extproc.request.profile import RequestProfile
from extproc.request.trust import TrustDomains
from extproc.routing.rollout import SwitchedRouter
from extproc.tokens.keyer import PromptKeyer, PromptKeys


class ServedModel:
    """One pool with its routing and its way from prompts to keys.

    Attributes:
        level: how many of its requests meet their budgets.
        lateness: how much later than their prefill first tokens come.
        desire: how many workers it should have.
    """

    def __init__(self, pool: Pool, router: SwitchedRouter, keyer: PromptKeyer) -> None:
        self.pool = pool
        self.router = router
        self.keyer = keyer
        self.trust = TrustDomains(pool.policy.trust)
        self.level = ServiceLevel()
        self.lateness = Lateness()
        self.desired = DesiredWorkers()
        self.desire: Desire | None = None

    @property
    def name(self) -> str:
        """The pool's name in policy and metrics."""
        return self.pool.policy.model


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and why that is expected to be good.

    ``endpoints`` is ordered, best first; Envoy's retries walk it. ``degraded`` lists the
    steps that were taken instead of a refusal; ``max_output_tokens``, ``model``, ``cache_salt``
    and ``engine_priority`` are what the engine must be told, None: what the client sent.
    ``prefiller`` is the address of the worker that computes the prompt for the first one.
    """

    id: str
    endpoints: tuple[str, ...]
    cached_tokens: int
    prompt_tokens: int
    queue_wait_s: float
    lane: str = ""
    degraded: tuple[str, ...] = ()
    max_output_tokens: int | None = None
    model: str | None = None
    cache_salt: str | None = None
    engine_priority: int | None = None
    prefiller: str = ""


class Freed(Enum):
    """Why a lease was given back; the value is the metric label."""

    ENDED = "ended"
    ABSENT = "absent"
    UNSEEN = "unseen"
    WORKER_LOST = "worker_lost"
    SILENT = "silent"


class Ticket:
    """Exactly one of ``decision``, ``refusal`` is set in the end; both None: it waits.

    Attributes:
        renewable: its holder renews it (Scheduler API) instead of keeping a stream open.
        renewed_at: seconds of the last sign of life.
        listed: its worker has reported it running; ``absent``: and left it out so often since.
        shadow: what admission would have done, where it only watches.
        steps: degrade steps taken.
        status: of the response, once it began.
        cap_tokens: output length that a step allows.
        prefill: its hold on the worker that prefills for its own.
        settled: the engine has told what it really was.
        watched_pick: address that cache-aware routing would have led with, where it watches.
    """

    __slots__ = (
        "absent",
        "arrived_at",
        "booking",
        "cap_tokens",
        "decision",
        "demand",
        "ended",
        "id",
        "lease",
        "listed",
        "outcome",
        "prefill",
        "profile",
        "prompts",
        "refusal",
        "renewable",
        "renewed_at",
        "served",
        "served_by",
        "settled",
        "shadow",
        "started_at",
        "status",
        "steps",
        "watched_pick",
    )

    def __init__(
        self,
        ticket_id: str,
        served: ServedModel,
        profile: RequestProfile,
        prompts: Sequence[PromptKeys],
        now: float,
    ) -> None:
        self.id = ticket_id
        self.served = served
        self.profile = profile
        self.prompts = prompts
        self.arrived_at = now
        self.started_at: float | None = None
        self.status = 0
        self.demand: Demand | None = None
        self.lease: Lease | None = None
        self.booking: Booking | None = None
        self.prefill: Booking | None = None
        self.decision: Decision | None = None
        self.refusal: Refusal | None = None
        self.outcome: Outcome | None = None
        self.served_by: str | None = None
        self.shadow: str | None = None
        self.watched_pick: str | None = None
        self.steps: list[str] = []
        self.cap_tokens: int | None = None
        self.renewable = False
        self.renewed_at = now
        self.listed = False
        self.absent = 0
        self.settled = False
        self.ended = False

    @property
    def changed_model(self) -> bool:
        """Whether a degrade step led it to another model than the client's."""
        return any(step.startswith("model=") for step in self.steps)


class ServeInstead(Exception):
    """Ask again with another model: its tokenizer must look at the prompt first."""

    def __init__(self, model: str, steps: Sequence[str]) -> None:
        super().__init__(model)
        self.model = model
        self.steps = tuple(steps)
