"""``SwitchedRouter``: a pool's routing, which can be switched off or left to watch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from msgspec.structs import replace

from extproc.fleet.pool import Pool
from extproc.routing.router import Asked, Route, Router
from extproc.tokens.keyer import PromptKeys

Rollout = Literal["on", "off", "shadow"]


class SwitchedRouter:
    """The policy's profile, and beside it the worker with the fewest requests.

    The history that the profile looks at tells where requests really went, whoever chose.
    """

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        self._pool = pool
        self._rng = rng
        self.by_policy = Router(pool, rng)

    @cached_property
    def by_load(self) -> Router:
        """Chooses when the profile does not."""
        changes: dict[str, object] = {"profile": "least_requests", "weights": {}, "picker": None}
        routing = self._pool.policy.routing.model_copy(update=changes)
        return Router(self._pool, self._rng, routing)

    def route(
        self, prompts: Sequence[PromptKeys], now: float, asked: Asked, rollout: Rollout = "on"
    ) -> Route:
        """Choose workers as :meth:`Router.route` does.

        Args:
            rollout: ``on``: by the profile; ``off``: by load; ``shadow``: by load, and the
                profile's choice is in the route's ``watched``.
        """
        if rollout == "on":
            return self.by_policy.route(prompts, now, asked)
        route = self.by_load.route(prompts, now, asked)
        if rollout == "off":
            return route
        return replace(route, watched=self.by_policy.route(prompts, now, asked))

    def note(self, route: Route, now: float) -> None:
        """The first column of a route gets the request: remember it."""
        watched = route.watched
        self.by_policy.note(
            route if watched is None else replace(watched, columns=route.columns), now
        )
