"""Cache-aware routing switched off, or watching only."""

from __future__ import annotations

import random

import pytest

from extproc.fleet.pool import Pool
from extproc.routing.rollout import Rollout, SwitchedRouter
from extproc.routing.router import Asked
from tests.support.builders import join, pool, prompt_keys, text_blocks

PROMPT = prompt_keys(text_blocks(1, 50))


def warm_and_busy() -> tuple[Pool, SwitchedRouter]:
    """Worker 0 has the prompt and one request, worker 1 is idle."""
    some = pool(routing={"weights": {"uncached": 9.0}, "picker": "two_choices"})
    holder = join(some, 0)
    join(some, 1)
    some.credit(holder, PROMPT.keys)
    some.book(holder.column, 0, "other")
    return some, SwitchedRouter(some, random.Random(1))


@pytest.mark.parametrize(("rollout", "leads"), [("on", 0), ("off", 1), ("shadow", 1)])
def test_the_profile_leads_only_when_it_is_on(rollout: Rollout, leads: int) -> None:
    _, router = warm_and_busy()
    route = router.route([PROMPT], 0.0, Asked(), rollout)
    assert route.columns == [leads, 1 - leads]
    assert (route.watched is not None) == (rollout == "shadow")


def test_what_watches_names_its_own_pick() -> None:
    _, router = warm_and_busy()
    route = router.route([PROMPT], 0.0, Asked(), "shadow")
    assert route.watched is not None
    assert route.watched.columns[0] == 0
    assert route.watched.cached_tokens == 200
    assert route.cached_tokens == 0, "what the acting pick has"


@pytest.mark.parametrize("rollout", ["on", "off", "shadow"])
def test_the_history_tells_where_a_conversation_really_went(rollout: Rollout) -> None:
    some, router = warm_and_busy()
    route = router.route([PROMPT], 0.0, Asked(), rollout)
    router.note(route, 0.0)
    placed = router.by_policy.conversations.find(PROMPT.keys)
    assert placed is not None
    assert placed.address == some.worker_at(route.columns[0]).address
