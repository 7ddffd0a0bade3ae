"""``Router``: filters, costs and picker put together for one pool.

``route`` only looks; ``note`` remembers a choice that was acted on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from extproc.errors import NoReadyWorker
from extproc.fleet.pool import Pool
from extproc.fleet.table import Bools, Floats, Ints, some
from extproc.policy import RoutingPolicy, Term
from extproc.routing import leaders
from extproc.routing.adapters import AdapterHomes
from extproc.routing.disaggregation import Handoff, handoff
from extproc.routing.history import Conversations, Placement, Sessions
from extproc.routing.hot import HotPrefixes
from extproc.routing.picker import Picker
from extproc.routing.prediction import MOST_RUNNING, cached_tokens, worth_moving_for
from extproc.routing.profiles import PROFILES, weights_of
from extproc.routing.terms import TERMS, Candidates, Places, hash_order
from extproc.routing.terms import load as share_of_slots
from extproc.tokens.blocks import Keys
from extproc.tokens.keyer import PromptKeys

_LAST_RESORT_COST = 1e9
"""More than any load, and small enough that ties are still ties: floats have 16 digits."""


class Asked(msgspec.Struct, frozen=True):
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


ANYTHING = Asked()


class Route(msgspec.Struct, frozen=True):
    """An ordered choice of workers and what the first is expected to have cached.

    Attributes:
        terms: weighted cost of each term by column, for explanations; those that cost nobody
            anything are left out.
        keys: of the first prompt that has any.
        before: where the conversation that this prompt continues went last.
        hot_key: the block that ends the longest cached prefix, if that is a good part.
        session: hash of the session that the request belongs to.
        adapter: the adapter that it needs, empty for the base model.
        handoff: who computes the prompt, where that is not the first worker.
        watched: what the pool's profile would have chosen, where it only watches.
    """

    columns: list[int]
    cached_tokens: int
    uncached_tokens: int
    prompt_tokens: int
    terms: dict[Term, Floats]
    keys: Keys | None = None
    before: Placement | None = None
    hot_key: int | None = None
    session: int | None = None
    adapter: str = ""
    handoff: Handoff | None = None
    watched: Route | None = None


class Router:
    """Chooses workers of one pool.

    Args:
        rng: source of ties, of drawn choices and of exploration.
        routing: how; the pool's own policy if not given.
    """

    def __init__(
        self, pool: Pool, rng: random.Random, routing: RoutingPolicy | None = None
    ) -> None:
        policy = routing or pool.policy.routing
        self.conversations = Conversations(policy.affinity.max_prefixes)
        self.sessions = Sessions(policy.affinity.max_sessions)
        self.adapters = AdapterHomes()
        self.hot = HotPrefixes(policy.replicas.max_prefixes)
        self._pool = pool
        self._rng = rng
        self._follows_pool = routing is None
        self._configure(policy)

    def _configure(self, policy: RoutingPolicy) -> None:
        """Go on by another policy; what is remembered stays."""
        spec = PROFILES[policy.profile]
        self._policy = policy
        self._uses_cache = spec.uses_cache
        self._weights = weights_of(policy)
        self._picker = Picker(
            self._rng,
            policy.picker or spec.picker,
            tie=spec.tie,
            temperature=policy.softmax_temperature,
        )

    def route(self, prompts: Sequence[PromptKeys], now: float, asked: Asked = ANYTHING) -> Route:
        """Choose workers for a request.

        The first column has room if any has. Later ones are for Envoy's retries: ready
        workers, full ones included, because a retry must land somewhere.

        Raises:
            NoReadyWorker: nobody that it may go to is ready.
        """
        pool = self._pool
        if self._follows_pool and pool.policy.routing is not self._policy:
            self._configure(pool.policy.routing)
        usable = pool.usable(asked.model)
        if asked.subset is not None:
            usable = usable & pool.among(asked.subset)
        total = sum([prompt.tokens for prompt in prompts])
        predicted = cached_tokens(pool, prompts, now)
        best, known_blocks = self._best_match(predicted, usable)
        keys = next((prompt.keys for prompt in prompts if len(prompt.keys)), None)
        found = None if keys is None else keys[:known_blocks]
        before = None if found is None else self.conversations.find(found)
        useful = best >= max(1.0, self._policy.replicas.min_share * total)
        hot_key = int(found[-1]) if found is not None and useful else None

        session = xxh3_64_intdigest(asked.session.encode()) if asked.session else None
        adapter = asked.model if asked.model and pool.is_adapter(asked.model) else ""
        places = self._places(keys, before, session, adapter)
        request = self._candidates(asked, usable, predicted, total, places, now)
        terms = self._terms(request)
        cost = sum(terms.values(), start=np.zeros(len(predicted)))
        avoided = self._avoided(total - predicted, now)
        if avoided is not None:
            cost[avoided] += _LAST_RESORT_COST
        first = self._allowed(asked, usable, avoided, total - int(best))
        if asked.needs_slot and self._uses_cache:
            first = self._narrowed(first, request, predicted, best, before, hot_key, now)
        columns = self._picker.pick(cost, first, usable, self._policy.endpoints)
        if not columns:
            raise NoReadyWorker("No worker that may serve this request is ready.")
        matched = int(predicted[columns[0]])
        return Route(
            columns,
            matched,
            total - matched,
            total,
            terms,
            keys,
            before,
            hot_key,
            session,
            adapter,
            self._handoff(asked, columns[0], avoided, predicted, total),
        )

    def note(self, route: Route, now: float) -> None:
        """The first column of a route gets the request: remember it."""
        address = self._pool.worker_at(route.columns[0]).address
        if route.keys is not None:
            self.conversations.place(route.keys, route.before, address, now)
        if route.adapter:
            self.adapters.note(self._pool, address, route.adapter)
        if route.session is not None:
            self.sessions.place(route.session, address)
        if route.hot_key is not None:
            self.hot.note(route.hot_key, now)

    def surplus(self, column: int, keys: Sequence[int], now: float) -> list[int]:
        """Those of a worker's hot prefixes that enough other workers hold, and keep getting."""
        most, seeds = self._policy.replicas.max_holders, self._pool.table.seed
        found = []
        for key in keys:
            holders = self._pool.holders(key)
            if holders[column] and holders.sum() > most and self.is_hot(key, now):
                order = hash_order(seeds, key)
                if (order[holders] < order[column]).sum() >= most:
                    found.append(key)
        return found

    def _handoff(
        self, asked: Asked, leader: int, avoided: Bools | None, predicted: Floats, total: int
    ) -> Handoff | None:
        policy, pool = self._policy.disaggregation, self._pool
        if not policy.min_uncached_tokens:
            return None
        able = pool.prefillers(asked.model)
        if avoided is not None:
            able = able & ~avoided
        if asked.subset is not None:
            able = able & pool.among(asked.subset)
        return handoff(pool.table, leader, able, predicted, total, policy)

    def _terms(self, request: Candidates) -> dict[Term, Floats]:
        """Weighted costs of the terms that cost somebody something."""
        weighted: dict[Term, Floats] = {}
        for term, weight in self._weights.items():
            values = TERMS[term](request)
            if values is not None:
                weighted[term] = np.multiply(values, weight, dtype=np.float64)
        return weighted

    def _best_match(self, predicted: Floats, usable: Bools) -> tuple[float, int]:
        """Most tokens that a worker is expected to have, and the prompt's blocks behind them."""
        reachable = predicted * usable
        column = int(reachable.argmax())
        best = float(reachable[column])
        tokens = best / float(self._pool.table.cache_credit[column])
        return best, math.ceil(tokens / self._pool.policy.block_size_tokens)

    def _allowed(
        self, asked: Asked, usable: Bools, avoided: Bools | None, uncached_tokens: int
    ) -> Bools:
        """Who may lead: workers with room, else with a slot, else anybody usable.

        Of each kind those that are not avoided, if there are any. While one of these has room,
        others may be a little over their slots: the costs tell whether that pays.
        """
        if not asked.needs_slot:
            return _sound(usable, avoided)
        pool, kv_tokens = self._pool, uncached_tokens + asked.output_tokens
        room = usable & pool.has_room(asked.model, kv_tokens)
        if not some(room):
            room = usable & pool.has_slot(asked.model)
            return _sound(room if some(room) else usable, avoided)
        sound = _sound(room, avoided)
        over = self._policy.max_over_slots if "over_slots" in self._weights else 0
        nobody_is_full = np.count_nonzero(room) == np.count_nonzero(usable)
        if not over or nobody_is_full or (sound is room and avoided is not None):
            return sound
        return _sound(usable & pool.has_room(asked.model, kv_tokens, over), avoided)

    def _places(
        self, keys: Keys | None, before: Placement | None, session: int | None, adapter: str
    ) -> Places:
        """Where the request's conversation, session and adapter are at home."""
        pool, affinity = self._pool, self._policy.affinity
        blocks = max(1, affinity.hash_tokens // pool.policy.block_size_tokens)
        beginning = None if keys is None else int(keys[:blocks][-1])
        return Places(
            last=-1 if before is None else pool.column_of(before.address),
            session=-1 if session is None else pool.column_of(self.sessions.find(session)),
            adapter_loaded=self.adapters.loaded(pool, adapter) if adapter else None,
            hash_key=beginning if session is None else session,
            hash_max_load=affinity.hash_max_load,
        )

    def _candidates(
        self,
        asked: Asked,
        usable: Bools,
        predicted: Floats,
        total: int,
        places: Places,
        now: float,
    ) -> Candidates:
        pool, table, policy = self._pool, self._pool.table, self._policy
        running: Floats | Ints = table.running()
        pending: Floats | Ints = table.pending_prefill_tokens
        new = None
        if now - pool.newest_at < policy.warmup.duration_s:
            new = leaders.newcomers(table, usable, policy.warmup, now)
        if new is not None:
            age_s = now - table.joined_at
            running = leaders.discounted(table.running(), new, age_s, policy.warmup)
            pending = leaders.discounted(table.pending_prefill_tokens, new, age_s, policy.warmup)
        return Candidates(
            table=table,
            usable=usable,
            prompt_tokens=total,
            output_tokens=asked.output_tokens,
            cached=worth_moving_for(predicted, total, running, usable, policy.affinity),
            running=running,
            pending_prefill=pending,
            new=new,
            places=places,
            slow=pool.health.any_slow,
            pressed=pool.health.any_pressed,
            zoned=pool.zoned,
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
        if before is not None and policy.affinity.sticky_s:
            load = share_of_slots(request)
            stay = leaders.staying(allowed, request.places.last, before, load, policy.affinity, now)
            if stay is not allowed:
                return stay
        if hot_key is None:
            if request.new is None:
                return allowed
            return leaders.exploring(
                allowed, request.new, request.running, request.usable, policy.warmup, self._rng
            )
        if self.is_hot(hot_key, now):
            holders = leaders.holders_of(predicted, best, request.usable)
            least = request.running[request.usable].min(initial=MOST_RUNNING)
            loaded = (share_of_slots(request) >= policy.replicas.max_load) | (
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

    def _avoided(self, uncached: Floats, now: float) -> Bools | None:
        """Silent and suspect workers, and for long prompts those that cool down; None: nobody."""
        if self._pool.all_sound(now):
            return None
        table = self._pool.table
        long = uncached >= self._policy.health.cool_down_min_tokens
        avoided: Bools = table.last_resort(now) | (long & (table.cooling_until > now))
        return avoided


def _sound(workers: Bools, avoided: Bools | None) -> Bools:
    """Those that are not avoided; the same array if nobody is, or everybody."""
    if avoided is None:
        return workers
    sound = workers & ~avoided
    return sound if some(sound) else workers
