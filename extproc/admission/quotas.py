"""Quotas: rules, what each counts, and taking and giving back over all of them at once."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from extproc.admission.drain_rate import DrainRate
from extproc.admission.rate_bucket import RateBucket
from extproc.policy import POOL_RULE, PoolPolicy, QuotaMatch, QuotaRule

MAX_COUNTERS = 65_536
"""Counters of one rule with ``per``; idle ones beyond it are forgotten, oldest first."""
_SWEPT_AT_ONCE = 256


class Block(Enum):
    """Why a counter has no room."""

    COUNT = "count"
    """No room for any request."""
    SIZE = "size"
    """Room for some, not for this one: it must not be passed for ever by smaller ones."""


class Subject(Protocol):
    """What rules match on."""

    pool: str
    adapter: str
    tenant: str
    tenant_class: str
    lane: str


class Parking(Protocol):
    """Where flows wait that are not looked at."""

    def unpark(self, tenant: str) -> None:
        """Look at a tenant again."""


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

    def __init__(self, rule: Rule, key: tuple[str, ...], now: float) -> None:
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


class Rule:
    """A quota rule at work.

    Attributes:
        for_all: it counts every request of its pools in one counter.
        of_one_tenant: each of its counters is a single tenant's.
        tightness: part of the limits that hold now; 1 unless pressed.
        counters: by the values of ``per``, least recently made first.
    """

    def __init__(self, policy: QuotaRule) -> None:
        self.policy = policy
        self.name = policy.name
        self.lenders: list[Rule] = []
        self.counters: OrderedDict[tuple[str, ...], Counter] = OrderedDict()
        self.tightness = 1.0
        self.concurrency = _limit(policy.concurrency, 1.0)
        self.tokens_in_flight = _limit(policy.tokens_in_flight, 1.0)
        match = policy.match
        self._matches = [
            (field_name, frozenset(wanted))
            for field_name, wanted in (
                ("pool", match.models),
                ("adapter", match.adapters),
                ("tenant", match.tenants),
                ("tenant_class", match.tenant_classes),
                ("lane", match.lanes),
            )
            if wanted
        ]
        self.of_one_tenant = "tenant" in policy.per or len(match.tenants) == 1
        self.for_all = not policy.per and all(name == "pool" for name, _ in self._matches)
        self._per = [_FIELDS[dimension] for dimension in policy.per]

    def matches(self, subject: Subject) -> bool:
        """Whether it counts this request."""
        return all(getattr(subject, name) in wanted for name, wanted in self._matches)

    def counter_of(self, subject: Subject, now: float) -> Counter:
        """The counter of a matching request, made when first needed."""
        key = tuple([getattr(subject, name) for name in self._per])
        counter = self.counters.get(key)
        if counter is None:
            if len(self.counters) >= MAX_COUNTERS:
                self._drop_one()
            counter = self.counters[key] = Counter(self, key, now)
        return counter

    def shared(self) -> Counter:
        """The only counter of a rule without ``per``."""
        counter = self.counters.get(())
        if counter is None:
            counter = self.counters[()] = Counter(self, (), 0.0)
        return counter

    def tighten(self, tightness: float) -> None:
        """Let this part of the limits hold."""
        self.tightness = tightness
        self.concurrency = _limit(self.policy.concurrency, tightness)
        self.tokens_in_flight = _limit(self.policy.tokens_in_flight, tightness)
        for counter in self.counters.values():
            counter.wake()

    def sweep(self, now: float) -> None:
        """Drop counters that nothing depends on, a few at each call."""
        for _ in range(min(_SWEPT_AT_ONCE, len(self.counters)) if self._per else 0):
            key, counter = self.counters.popitem(last=False)
            if not counter.idle(now):
                self.counters[key] = counter

    def _drop_one(self) -> None:
        """Make room by forgetting the rates of somebody who has nothing running or waiting."""
        for key, counter in self.counters.items():
            if not counter.requests and not counter.waiting:
                del self.counters[key]
                return

    def ever_fits(self, cost_tokens: int) -> bool:
        """Whether a request of this cost could run with all else idle."""
        lent = sum(_limit(rule.policy.tokens_in_flight, rule.policy.lend_share)
                   for rule in self.lenders if rule.policy.tokens_in_flight)  # fmt: skip
        return cost_tokens <= _limit(self.policy.tokens_in_flight, 1.0) + lent


class QuotaBook:
    """Every rule of a policy, the pools' own included."""

    def __init__(self, rules: Sequence[QuotaRule], pools: Iterable[PoolPolicy]) -> None:
        self.rules = [Rule(rule) for rule in rules]
        by_name = {rule.name: rule for rule in self.rules}
        for rule in self.rules:
            rule.lenders = [by_name[name] for name in rule.policy.borrow_from]
        self._by_pool = {
            pool.model: [Rule(_pool_rule(pool)), *self._of_pool(pool.model)] for pool in pools
        }

    def all_rules(self) -> Iterator[tuple[str, Rule]]:
        """Every rule with its pool, empty for those of the policy's list."""
        for pool, rules in self._by_pool.items():
            yield pool, rules[0]
        for rule in self.rules:
            yield "", rule

    def counters_of(self, subject: Subject, now: float) -> tuple[Counter, ...]:
        """The counters that a request needs room in."""
        return tuple(
            [
                rule.counter_of(subject, now)
                for rule in self._by_pool[subject.pool]
                if rule.matches(subject)
            ]
        )

    def _of_pool(self, model: str) -> list[Rule]:
        return [
            rule
            for rule in self.rules
            if not rule.policy.match.models or model in rule.policy.match.models
        ]


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


_FIELDS = {
    "model": "pool",
    "adapter": "adapter",
    "tenant": "tenant",
    "tenant_class": "tenant_class",
    "lane": "lane",
}


def _pool_rule(pool: PoolPolicy) -> QuotaRule:
    own = pool.admission
    return QuotaRule(
        name=POOL_RULE,
        match=QuotaMatch(models=(pool.model,)),
        concurrency=own.max_concurrency,
        max_queue=own.max_queue,
        max_queue_time_s=own.max_queue_time_s,
    )


def _limit(limit: int | None, part: float) -> float:
    return math.inf if limit is None else max(1, math.floor(limit * part))


def _lendable(limit: float, share: float, free: float, lent: float) -> float:
    return 0.0 if limit == math.inf else max(0.0, min(free, math.floor(limit * share) - lent))


def _bucket(per_minute: float | None, burst_s: float, now: float) -> RateBucket | None:
    return None if per_minute is None else RateBucket(per_minute, burst_s, now)
