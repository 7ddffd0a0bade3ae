"""``Counter``: what one rule has running and waiting; taking and giving back over many at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from extproc.admission.drain_rate import DrainRate
from extproc.admission.rate_bucket import RateBucket
from extproc.policy import QuotaRule


class Block(Enum):
    """Why a counter has no room."""

    COUNT = "count"
    """No room for any request."""
    SIZE = "size"
    """Room for some, not for this one: it must not be passed for ever by smaller ones."""


class Parking(Protocol):
    """Where flows wait that are not looked at."""

    def unpark(self, tenant: str) -> None:
        """Look at a tenant again."""


class Limits(Protocol):
    """The rule that a counter counts for; ``concurrency`` and ``tokens_in_flight`` are the
    limits that hold now."""

    policy: QuotaRule
    name: str
    concurrency: float
    tokens_in_flight: float
    for_all: bool
    of_one_tenant: bool

    @property
    def lenders(self) -> Sequence[Limits]:
        """Rules that it may borrow from."""

    def shared(self) -> Counter:
        """The only counter of a rule without ``per``."""

    def ever_fits(self, cost_tokens: int) -> bool:
        """Whether a request of this cost could run with all else idle."""


class Counter:
    """What one rule (or one value of its ``per``) has running and waiting.

    Attributes:
        requests, tokens: running on its own limits.
        lent_requests, lent_tokens: of its limits, in use by rules that borrowed.
        waiting, waiting_tokens, waiting_bytes: requests in queues that it matches.
        drain: work that started while some waited.
        parked: lanes and tenants to look at again when something is given back.
        claimed: a request whose turn it is waits for room here; others do not pass it.
    """

    __slots__ = (
        "claimed",
        "drain",
        "key",
        "lent_requests",
        "lent_tokens",
        "parked",
        "request_rate",
        "requests",
        "rule",
        "token_rate",
        "tokens",
        "waiting",
        "waiting_bytes",
        "waiting_tokens",
    )

    def __init__(self, rule: Limits, key: tuple[str, ...], now: float) -> None:
        self.rule = rule
        self.key = key
        self.requests = 0
        self.tokens = 0
        self.lent_requests = 0
        self.lent_tokens = 0
        self.waiting = 0
        self.waiting_tokens = 0
        self.waiting_bytes = 0
        self.drain = DrainRate()
        self.claimed = False
        self.parked: dict[tuple[Parking, str], None] = {}
        self.request_rate = _bucket(rule.policy.requests_per_minute, rule.policy.burst_s, now)
        self.token_rate = _bucket(rule.policy.tokens_per_minute, rule.policy.burst_s, now)

    @property
    def free_requests(self) -> float:
        """Requests that its own limit still allows; negative after a limit was lowered."""
        return self.rule.concurrency - self.requests - self.lent_requests

    @property
    def free_tokens(self) -> float:
        """Work that its own limit still allows."""
        return self.rule.tokens_in_flight - self.tokens - self.lent_tokens

    def block(self, cost_tokens: int, now: float) -> Block | None:
        """Why a request of this cost cannot run now; None when it can."""
        if self.free_requests < 1 and not self._can_borrow_request():
            return Block.COUNT
        if self.request_rate is not None and not self.request_rate.has(1, now):
            return Block.COUNT
        if cost_tokens > self.free_tokens and cost_tokens > self.free_tokens + self._borrowable():
            return Block.SIZE
        if self.token_rate is not None and not self.token_rate.has(cost_tokens, now):
            return Block.SIZE
        return None

    @property
    def waits_for_an_end(self) -> bool:
        """Whether only the end of one of its own requests can make room."""
        return self.rule.of_one_tenant and not self.rule.lenders and self.free_requests < 1

    @property
    def reason(self) -> str:
        """What a request that lacks room here is told."""
        return f"quota:{self.rule.name}"

    def queue_is_full(self, *, returned: bool) -> bool:
        """Whether no further request of it may wait; who came back as told finds a place where
        newcomers do not, up to twice the length."""
        longest = self.rule.policy.max_queue
        return longest is not None and self.waiting >= (2 * longest if returned else longest)

    def wake(self) -> None:
        """There may be room again."""
        if self.parked:
            for lane, tenant in self.parked:
                lane.unpark(tenant)
            self.parked.clear()

    def lenders(self) -> Iterator[Counter]:
        """Counters that this one may borrow from."""
        return (rule.shared() for rule in self.rule.lenders)

    def lendable_requests(self) -> float:
        """Requests that may be lent now."""
        return _lendable(
            self.rule.concurrency, self.rule.policy.lend_share, self.free_requests,
            self.lent_requests,
        )  # fmt: skip

    def lendable_tokens(self) -> float:
        """Work that may be lent now."""
        return _lendable(
            self.rule.tokens_in_flight, self.rule.policy.lend_share, self.free_tokens,
            self.lent_tokens,
        )  # fmt: skip

    def idle(self, now: float) -> bool:
        """Nothing runs, waits or is remembered."""
        return (
            not (self.requests or self.waiting or self.lent_requests or self.lent_tokens)
            and (self.request_rate is None or self.request_rate.full(now))
            and (self.token_rate is None or self.token_rate.full(now))
        )

    def wait_s(self, cost_tokens: int, now: float, returning_tokens: float = 0.0) -> float:
        """Time until a request that comes now could run, as far as this counter tells.

        Args:
            returning_tokens: work of the tenant that goes before it and does not wait here.

        What many tenants share is drained in turns: there the lane's own drain rate tells
        more than the counter's.
        """
        wait_s = 0.0
        returning_tokens = returning_tokens if self.rule.of_one_tenant else 0.0
        if self.request_rate is not None:
            requests = 1 + self.waiting + returning_tokens / cost_tokens
            beyond = max(0.0, requests - self.request_rate.capacity)
            wait_s = self.request_rate.wait_s(requests, now) + beyond / self.request_rate.per_s
        if self.token_rate is not None:
            ahead = cost_tokens + self.waiting_tokens + returning_tokens
            beyond = max(0.0, ahead - self.token_rate.capacity)
            level_wait_s = self.token_rate.wait_s(ahead, now)
            wait_s = max(wait_s, level_wait_s + beyond / self.token_rate.per_s)
        rate = self.drain.per_s(now) if self.rule.of_one_tenant else None
        if not rate:
            return wait_s
        return max(wait_s, (self.waiting_tokens + returning_tokens + cost_tokens) / rate)

    def _can_borrow_request(self) -> bool:
        return any(lender.lendable_requests() >= 1 for lender in self.lenders())

    def _borrowable(self) -> float:
        return sum(lender.lendable_tokens() for lender in self.lenders())


@dataclass(slots=True)
class Holding:
    """What a lease holds of one counter: on its own limits, and borrowed."""

    counter: Counter
    requests: int
    tokens: int
    loans: list[tuple[Counter, int, int]] = field(default_factory=list)


def take(counters: tuple[Counter, ...], cost_tokens: int, now: float) -> list[Holding]:
    """Count a request in all of its counters; the caller saw that each has room, or forces."""
    holdings = []
    for counter in counters:
        holding = Holding(counter, 1, cost_tokens)
        for lender in counter.lenders():
            requests = int(
                holding.requests > counter.free_requests and lender.lendable_requests() >= 1
            )
            short = max(0.0, holding.tokens - max(0.0, counter.free_tokens))
            tokens = int(min(short, lender.lendable_tokens()))
            if requests or tokens:
                lender.lent_requests += requests
                lender.lent_tokens += tokens
                holding.requests -= requests
                holding.tokens -= tokens
                holding.loans.append((lender, requests, tokens))
        counter.requests += holding.requests
        counter.tokens += holding.tokens
        if counter.request_rate is not None:
            counter.request_rate.take(1, now)
        if counter.token_rate is not None:
            counter.token_rate.take(cost_tokens, now)
        holdings.append(holding)
    return holdings


def give_back(holdings: list[Holding]) -> None:
    """The reverse of :func:`take`."""
    for holding in holdings:
        counter = holding.counter
        counter.requests -= holding.requests
        counter.tokens -= holding.tokens
        counter.wake()
        for lender, requests, tokens in holding.loans:
            lender.lent_requests -= requests
            lender.lent_tokens -= tokens
            lender.wake()


def _lendable(limit: float, share: float, free: float, lent: float) -> float:
    return 0.0 if limit == math.inf else max(0.0, min(free, math.floor(limit * share) - lent))


def _bucket(per_minute: float | None, burst_s: float, now: float) -> RateBucket | None:
    return None if per_minute is None else RateBucket(per_minute, burst_s, now)
