"""``Router``: filters, costs and picker put together for one pool.

``route`` only looks; ``note`` remembers a choice that was acted on.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from extproc.fleet.pool import Pool
from extproc.fleet.table import Bools, Floats
from extproc.policy import Term
from extproc.routing import leaders
from extproc.routing.history import Conversations, Placement, Sessions
from extproc.routing.hot import HotPrefixes
from extproc.routing.picker import Picker
from extproc.routing.prediction import cached_tokens, worth_moving_for
from extproc.routing.profiles import PROFILES, weights_of
from extproc.routing.terms import TERMS, Candidates, hash_order
from extproc.tokens.blocks import Keys
from extproc.tokens.keyer import PromptKeys

_LAST_RESORT_COST = 1e15
"""More than any load: workers to avoid come after all others."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of routing beside its prompts.

    Attributes:
        model: model or adapter name; None for requests that name none.
        needs_slot: False for pages that take no room (model lists, health).
        output_tokens: what the request is expected to generate.
        session: id of the client's session, empty if it has none.
        subset: addresses or bare ips that the gateway allows; None allows all.
    """

    model: str | None = None
    needs_slot: bool = True
    output_tokens: int = 0
    session: str = ""
    subset: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """An ordered choice of workers and what the first is expected to have cached.

    Attributes:
        terms: weighted cost of each term by column, for explanations.
        keys: of the first prompt that has any.
        before: where the conversation that this prompt continues went last.
        hot_key: the block that ends the longest cached prefix, if that is a good part.
        session: the session that the request belongs to.
    """

    columns: list[int]
    cached_tokens: int
    uncached_tokens: int
    prompt_tokens: int
    terms: dict[Term, Floats]
    keys: Keys | None = None
    before: Placement | None = None
    hot_key: int | None = None
    session: str = ""


class Router:
    """Chooses workers of one pool.

    Args:
        rng: source of ties, of drawn choices and of exploration.
    """

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        policy = pool.policy.routing
        spec = PROFILES[policy.profile]
        self.conversations = Conversations(policy.affinity.max_prefixes)
        self.sessions = Sessions(policy.affinity.max_sessions)
        self.hot = HotPrefixes(policy.replicas.max_prefixes)
        self._pool = pool
        self._policy = policy
        self._uses_cache = spec.uses_cache
        self._rng = rng
        self._weights = weights_of(policy)
        self._picker = Picker(
            rng, policy.picker or spec.picker, tie=spec.tie, temperature=policy.softmax_temperature
        )

    def route(self, prompts: Sequence[PromptKeys], now: float, asked: Asked = Asked()) -> Route:
        """Choose workers for a request; the caller knows that at least one is allowed.

        The first column has room, unless none is needed. Later ones are for Envoy's retries:
        ready workers, full ones included, because a retry must land somewhere.
        """
        pool = self._pool
        usable = pool.usable(asked.model)
        if asked.subset is not None:
            usable = usable & pool.among(asked.subset)
        total = sum(prompt.tokens for prompt in prompts)
        predicted = cached_tokens(pool, prompts, now)
        best = float(predicted[usable].max(initial=0.0))
        keys = next((prompt.keys for prompt in prompts if len(prompt.keys)), None)
        found = keys[: -(-int(best) // pool.policy.block_size_tokens)] if keys is not None else None
        before = None if found is None else self.conversations.find(found)
        useful = best >= max(1.0, self._policy.replicas.min_share * total)
        hot_key = int(found[-1]) if found is not None and useful else None

        request = self._candidates(asked, usable, predicted, total, keys, before, now)
        terms = {term: weight * TERMS[term](request) for term, weight in self._weights.items()}
        cost = sum(terms.values(), start=np.zeros(len(predicted)))
        avoided = self._avoided(total - predicted, now)
        cost[avoided] += _LAST_RESORT_COST
        first = self._allowed(asked, usable, total)
        if (first & ~avoided).any():
            first = first & ~avoided
        if asked.needs_slot and self._uses_cache:
            first = self._narrowed(first, request, predicted, best, before, hot_key, now)
        columns = self._picker.pick(cost, first, usable, self._policy.endpoints)
        matched = int(predicted[columns[0]])
        return Route(
            columns, matched, total - matched, total, terms, keys, before, hot_key, asked.session
        )

    def note(self, route: Route, now: float) -> None:
        """The first column of a route gets the request: remember it."""
        address = self._pool.worker_at(route.columns[0]).address
        if route.keys is not None:
            self.conversations.place(route.keys, route.before, address, now)
        if route.session:
            self.sessions.place(route.session, address)
        if route.hot_key is not None:
            self.hot.note(route.hot_key, now)

    def _allowed(self, asked: Asked, usable: Bools, prompt_tokens: int) -> Bools:
        """Who may lead: workers with room, else with a slot, else (pages) anybody usable."""
        if not asked.needs_slot:
            return usable
        room = usable & self._pool.has_room(asked.model, prompt_tokens + asked.output_tokens)
        return room if room.any() else usable & self._pool.has_slot(asked.model)

    def _candidates(
        self,
        asked: Asked,
        usable: Bools,
        predicted: Floats,
        total: int,
        keys: Keys | None,
        before: Placement | None,
        now: float,
    ) -> Candidates:
        pool, table, policy = self._pool, self._pool.table, self._policy
        new = leaders.newcomers(table, usable, policy.warmup, now)
        age_s = now - table.joined_at
        running = leaders.discounted(table.running().astype(float), new, age_s, policy.warmup)
        pending = table.pending_prefill_tokens.astype(float)
        return Candidates(
            table=table,
            usable=usable,
            prompt_tokens=total,
            output_tokens=asked.output_tokens,
            cached=worth_moving_for(predicted, total, running, usable, policy.affinity),
            running=running,
            pending_prefill=leaders.discounted(pending, new, age_s, policy.warmup),
            scores=pool.health.scores(now),
            trust=pool.trust(now),
            new=new,
            last=pool.column_of(before.address) if before else -1,
            session=pool.column_of(self.sessions.find(asked.session)) if asked.session else -1,
            hash_key=_hash_key(keys, policy.affinity.hash_tokens // pool.policy.block_size_tokens),
            hash_max_load=policy.affinity.hash_max_load,
        )

    def _narrowed(
        self,
        allowed: Bools,
        request: Candidates,
        predicted: Floats,
        best: float,
        before: Placement | None,
        hot_key: int | None,
        now: float,
    ) -> Bools:
        """The allowed workers that should lead, by the first rule that applies."""
        policy, table = self._policy, self._pool.table
        load = request.running / np.maximum(table.slots, 1)
        if before is not None and policy.affinity.sticky_s:
            stay = leaders.staying(allowed, request.last, before, load, policy.affinity, now)
            if stay is not allowed:
                return stay
        if hot_key is None:
            return leaders.exploring(
                allowed, request.new, request.running, request.usable, policy.warmup, self._rng
            )
        if self.is_hot(hot_key, now):
            holders = leaders.holders_of(predicted, best, request.usable)
            least = request.running[request.usable].min(initial=np.inf)
            loaded = (load >= policy.replicas.max_load) | (
                request.running >= least + policy.replicas.max_extra_running
            )
            order = hash_order(table.seed, hot_key)
            return leaders.keeping_to_holders(allowed, holders, loaded, order, policy.replicas)
        return allowed

    def is_hot(self, key: int, now: float) -> bool:
        """Whether requests here or what agents tell make a prefix hot."""
        if self.hot.per_s(key, now) >= self._policy.replicas.hot_per_s:
            return True
        return self._pool.told_hot(key) >= self._policy.replicas.hot_per_s

    def _avoided(self, uncached: Floats, now: float) -> Bools:
        """Silent and suspect workers, and for long prompts those that cool down."""
        table = self._pool.table
        long = uncached >= self._policy.health.cool_down_min_tokens
        avoided: Bools = table.last_resort(now) | (long & (table.cooling_until > now))
        return avoided


def _hash_key(keys: Keys | None, blocks: int) -> int | None:
    """Key of the prompt's beginning: of its last block within so many."""
    return None if keys is None else int(keys[: max(1, blocks)][-1])
