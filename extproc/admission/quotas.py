"""Quotas: rules, what they match, and what of each is in use."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from extproc.admission.counters import Counter
from extproc.policy import POOL_RULE, PoolPolicy, QuotaMatch, QuotaRule

MAX_COUNTERS = 65_536
"""Counters of one rule with ``per``; idle ones beyond it are forgotten, oldest first."""
_SWEPT_AT_ONCE = 256


class Subject(Protocol):
    """What rules match on."""

    pool: str
    adapter: str
    tenant: str
    tenant_class: str
    lane: str


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

    def adopt_rates(self, former: Rule, now: float) -> None:
        """Go on with the used part of a former rule's rates."""
        for values, counter in former.counters.items():
            if counter.request_rate is None and counter.token_rate is None:
                continue
            fresh = self.counters[values] = Counter(self, values, now)
            if fresh.request_rate is not None and counter.request_rate is not None:
                fresh.request_rate.adopt(counter.request_rate, now)
            if fresh.token_rate is not None and counter.token_rate is not None:
                fresh.token_rate.adopt(counter.token_rate, now)

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

    def adopt_rates(self, former: QuotaBook, now: float) -> None:
        """Rates remember how much of them was used under the former rules of the same names."""
        old_rules = {(pool, rule.name): rule for pool, rule in former.all_rules()}
        for pool, rule in self.all_rules():
            old = old_rules.get((pool, rule.name))
            if old is not None and old.policy.per == rule.policy.per:
                rule.adopt_rates(old, now)

    def _of_pool(self, model: str) -> list[Rule]:
        return [
            rule
            for rule in self.rules
            if not rule.policy.match.models or model in rule.policy.match.models
        ]


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
