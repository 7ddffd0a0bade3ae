"""What the rollout switches let act, as requests and counters show it."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.desk import facts_of
from extproc.request.profile import TokenPrompt
from tests.support.builders import Fleet, address, policy, pool_policy, profile, text_blocks
from tests.support.scheduler_api import Clock, desk_of

PROMPT = profile(TokenPrompt([*text_blocks(1, 50), 0]))


def fleet_with(**rollout: Any) -> Fleet:
    fleet = Fleet(workers=2)
    fleet.scheduler.reload(policy(pool_policy(), rollout=rollout), 0.0)
    return fleet


@pytest.mark.parametrize(
    ("mode", "leads", "watched"), [("on", 0, None), ("off", 1, None), ("shadow", 1, address(0))]
)
async def test_cache_routing(mode: str, leads: int, watched: str | None) -> None:
    fleet = fleet_with(cache_routing=mode)
    desk = desk_of(fleet.scheduler, Clock())
    keys = desk.scheduler.models["sim"].keyer
    prompts = await desk.cold_text.keys(keys, PROMPT)
    fleet.pool.credit(fleet.workers[0], prompts[0].keys)
    fleet.pool.book(fleet.workers[0].column, 0, "other")
    ticket = await desk.arrive(PROMPT)
    decision = await desk.turn(ticket)
    assert decision.endpoints[0] == address(leads)
    assert ticket.watched_pick == watched
    assert facts_of(ticket)["watched_pick"] == (watched or "-")
    counted = {
        sample.labels["agreement"]: sample.value
        for metric in desk.metrics.watched_picks.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    assert counted == ({"other": 1.0} if mode == "shadow" else {})
    desk.finish(ticket)
    explained = (await desk.estimate(PROMPT)).workers[0].terms
    assert ("uncached" in explained) == (mode == "on")


async def test_both_picks_may_agree() -> None:
    fleet = fleet_with(cache_routing="shadow")
    desk = desk_of(fleet.scheduler, Clock())
    fleet.pool.book(fleet.workers[0].column, 0, "other")
    await desk.turn(await desk.arrive(profile(TokenPrompt([1, 2, 3]))))
    assert desk.metrics.watched_picks.labels("sim", "same")._value.get() == 1
