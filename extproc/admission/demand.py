"""``Demand``: one request as admission sees it, and ``Lease``: what it holds while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.admission.counters import Counter, Holding


@dataclass(slots=True, eq=False)
class Demand:
    """Who asks for how much work, in which pool and lane.

    ``name`` is the model or adapter asked for; workers that serve it must have room.
    ``prefill_s`` is what its prefill is likely to take, ``expires_at`` when waiting stops
    making sense. ``blocked_by`` says what a waiting request lacks: ``quota:<rule>`` or
    ``capacity:<pool>``; ``parked_at`` is the counter of its own tenant that has no room at
    all, if that is what it lacks. ``comebacks``: how often it was refused and
    came back as told; ``sequence`` is then that of its first try.
    """

    id: str
    pool: str
    name: str | None
    adapter: str
    tenant: str
    tenant_class: str
    lane: str
    weight: float
    uncached_tokens: int
    output_tokens: int
    arrived_at: float
    prefill_s: float = 0.0
    body_bytes: int = 0
    fingerprint: int = 0
    deadline_at: float | None = None
    ttft_budget_s: float | None = None
    max_queue_time_s: float | None = None
    counters: tuple[Counter, ...] = ()
    sequence: int = 0
    origin: str = ""
    entered_at: float = 0.0
    expires_at: float = float("inf")
    blocked_by: str = ""
    parked_at: Counter | None = None
    waiting: bool = False
    comebacks: int = 0
    degraded: list[str] = field(default_factory=list)

    @property
    def cost_tokens(self) -> int:
        """Expected work; at least one, so that nothing is free."""
        return max(1, self.uncached_tokens + self.output_tokens)

    @property
    def returned(self) -> bool:
        """Whether it was refused before and came back as told."""
        return self.comebacks > 0

    @property
    def kind(self) -> tuple[object, ...]:
        """Requests of one kind lack or have the same things, and keep their order."""
        return self._kind(self.returned)

    @property
    def elder_kinds(self) -> tuple[tuple[object, ...], ...]:
        """Requests of these kinds go before it: those that came back, then its own."""
        return (self._kind(True),) if self.returned else (self._kind(True), self._kind(False))

    def _kind(self, returned: bool) -> tuple[object, ...]:
        return (self.name, self.origin, self.counters, returned)


@dataclass(slots=True, eq=False)
class Lease:
    """An admitted request's hold on quota; ``released`` makes giving it back idempotent.

    ``cost_tokens`` is the work charged at admission.
    """

    demand: Demand
    granted_at: float
    holdings: list[Holding]
    cost_tokens: int
    released: bool = False

    @property
    def id(self) -> str:
        """The request's id, as the worker is told it."""
        return self.demand.id
