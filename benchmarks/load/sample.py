"""``Sample``: what a client saw of one request, all its tries included."""

from __future__ import annotations

import msgspec

OK = 200
BROKEN = "broken"
"""Code of an answer that began and did not end well."""
UNREACHABLE = "unreachable"
"""Code of a try without any answer."""


class Try(msgspec.Struct):
    """One refused try and the wait that its answer announced."""

    status: int
    code: str
    after_s: float
    """From the request's due time to the refusal."""
    announced_s: float | None = None
    """``retry-after-ms``, else ``retry-after``; None without either."""


class Sample(msgspec.Struct):
    """Times in seconds. ``ttft_s`` and ``e2e_s`` count from the sending of the last try.

    ``status`` 200 with an empty ``code`` is a whole answer; status 0 is no answer.
    """

    number: int
    due_s: float
    """From the start of the run."""
    lag_s: float
    """How late the generator was with the first try."""
    sent_s: float
    """Last try, from the start of the run."""
    planned_tokens: int
    tenant: str
    lane: str
    status: int = 0
    code: str = ""
    ttft_s: float | None = None
    e2e_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    worker: str = ""
    queue_s: float | None = None
    """How long the gateway says it held the request."""
    refused: list[Try] = msgspec.field(default_factory=list)
    """Tries before the last one."""
    announced_s: float | None = None
    """Wait that the last try's refusal announced."""

    @property
    def served(self) -> bool:
        """Whether a whole answer came."""
        return self.status == OK and not self.code

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for shorter answers."""
        if not self.served or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Budgets(msgspec.Struct, frozen=True):
    """What a good answer keeps to; None: no such budget."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, sample: Sample) -> bool:
        """Whether a request was answered within both."""
        if not sample.served or sample.ttft_s is None:
            return False
        if self.ttft_s is not None and sample.ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or sample.tpot_s is None or sample.tpot_s <= self.tpot_s
