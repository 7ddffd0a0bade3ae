from __future__ import annotations

import pytest

from tests.workers.agent.told import Told
from workers.agent.engine_metrics import EngineMetrics
from workers.agent.engine_state import Answer, CacheFate, Condition, EngineState, LoadNumbers, Look
from workers.agent.signals import Signals

REFUSED = Look(Answer.REFUSED)
SILENT = Look(Answer.SILENT)


def up(started: float | None = 1.0, *, awake: bool | None = True, running: float = 2.0) -> Look:
    metrics = EngineMetrics(running=running, awake=awake, process_start_time_s=started)
    return Look(Answer.UP, ("tiny",), metrics)


def fates(*looks: Look) -> list[str]:
    state = EngineState()
    return [state.observe(look, float(number)).value for number, look in enumerate(looks)]


def test_an_engine_is_ready_once_it_lists_its_models() -> None:
    state = EngineState()
    assert state.condition is Condition.DOWN
    state.observe(REFUSED, 0.0)
    assert state.condition is Condition.DOWN
    state.observe(Look(Answer.UP), 1.0)
    assert state.condition is Condition.STARTING
    state.observe(up(), 2.0)
    assert state.ready
    assert state.models == ("tiny",)


def test_the_second_silence_in_a_row_makes_it_down_and_keeps_what_is_known() -> None:
    state = EngineState()
    state.observe(up(), 0.0)
    assert state.observe(SILENT, 1.0) is CacheFate.KEPT
    assert state.condition is Condition.READY
    state.observe(up(), 2.0)
    state.observe(SILENT, 3.0)
    state.observe(SILENT, 4.0)
    assert (state.condition, state.models) == (Condition.DOWN, ("tiny",))
    assert state.load(4.0, 1.0).running == 2.0
    state.observe(up(), 5.0)
    assert state.ready


def test_another_start_time_is_a_new_life() -> None:
    assert fates(up(1.0), up(1.0), up(2.0), up(2.0)) == ["kept", "kept", "new_life", "kept"]


def test_a_refused_connection_ends_the_life_once() -> None:
    looks = (up(1.0), REFUSED, REFUSED, SILENT, up(2.0), up(2.0))
    assert fates(*looks) == ["kept", "new_life", "kept", "kept", "kept", "kept"]


def test_refused_and_back_is_a_new_life_without_a_start_time_too() -> None:
    assert fates(up(None), REFUSED, up(None), REFUSED) == ["kept", "new_life", "kept", "new_life"]


def test_an_engine_refused_from_the_start_has_no_life_to_end() -> None:
    assert fates(REFUSED, REFUSED, up(1.0)) == ["kept"] * 3


def test_a_new_life_heard_from_the_events_is_not_told_again() -> None:
    state = EngineState()
    state.observe(up(1.0), 0.0)
    state.new_life_heard()
    assert state.observe(up(2.0), 1.0) is CacheFate.KEPT
    assert state.observe(up(3.0), 2.0) is CacheFate.NEW_LIFE


def test_an_engine_that_falls_asleep_is_not_ready_and_has_an_empty_cache() -> None:
    asleep = up(awake=False)
    assert fates(up(), asleep, asleep, up()) == ["kept", "cleared", "kept", "kept"]
    state = EngineState()
    state.observe(asleep, 0.0)
    assert state.condition is Condition.ASLEEP


def test_an_engine_that_does_not_say_whether_it_sleeps_is_awake() -> None:
    state = EngineState()
    state.observe(up(awake=None), 0.0)
    assert state.ready


def test_a_broken_page_keeps_the_last_numbers_for_5_intervals() -> None:
    broken = Look(Answer.UP, ("tiny",), None)
    state = EngineState()
    state.observe(up(), 10.0)
    state.observe(broken, 11.0)
    assert state.metrics_broken
    assert state.load(15.0, 1.0) == LoadNumbers(age_s=5.0, running=2.0)
    assert state.load(15.1, 1.0).running is None
    assert state.ready


def test_load_is_absent_before_the_first_page_and_after_a_death() -> None:
    state = EngineState()
    assert state.load(5.0, 1.0) == LoadNumbers()
    state.observe(up(), 5.0)
    state.observe(REFUSED, 6.0)
    assert state.load(6.0, 1.0) == LoadNumbers()


def test_it_is_starting_until_its_health_page_agrees_and_down_once_it_no_longer_does() -> None:
    state = EngineState()
    ill = Look(Answer.UP, ("tiny",), EngineMetrics(), healthy=False)
    state.observe(ill, 0.0)
    assert state.condition is Condition.STARTING
    state.observe(up(), 1.0)
    assert state.ready
    state.observe(ill, 2.0)
    state.observe(ill, 2.2)
    assert state.condition is Condition.DOWN
    state.observe(up(), 3.0)
    assert state.ready


@pytest.mark.parametrize(
    "bad",
    [
        Look(Answer.UP, ("tiny",), EngineMetrics(), healthy=False),
        Look(Answer.UP, (), EngineMetrics()),
        SILENT,
    ],
)
def test_a_single_bad_look_takes_no_engine_out(bad: Look) -> None:
    state = EngineState()
    state.observe(up(), 0.0)
    for second in range(1, 9, 2):
        state.observe(bad, float(second))
        assert state.ready
        state.observe(up(), float(second + 1))
        assert not state.in_doubt
    state.observe(bad, 9.0)
    state.observe(bad, 10.0)
    assert not state.ready


def test_a_bad_look_is_doubted_once_and_only_of_an_engine_that_served() -> None:
    state = EngineState()
    unlisted = Look(Answer.UP, (), None)
    doubts = []
    for number, look in enumerate((unlisted, up(), unlisted, unlisted, unlisted, up(), REFUSED)):
        state.observe(look, float(number))
        doubts.append(state.in_doubt)
    assert doubts == [False, False, True, False, False, False, False]


def test_a_slow_list_of_models_keeps_the_last_one() -> None:
    state = EngineState()
    state.observe(up(), 0.0)
    state.observe(Look(Answer.UP, None, None), 1.0)
    assert (state.ready, state.models) == (True, ("tiny",))


def test_adapters_are_known_among_the_models() -> None:
    state = EngineState()
    state.observe(Look(Answer.UP, ("tiny", "ad1"), None, adapters=("ad1",)), 0.0)
    assert (state.models, state.adapters) == (("tiny", "ad1"), ("ad1",))


def working(generated: float, running: float = 1.0, **more: float) -> Look:
    numbers = {"running": running, "waiting": 0.0, "generation_tokens": generated, **more}
    return Look(Answer.UP, ("tiny",), EngineMetrics(**numbers))


def test_it_is_frozen_when_requests_run_and_no_counter_moves_for_so_long() -> None:
    state = EngineState(frozen_after_s=10.0)
    for second in range(11):
        state.observe(working(5.0), float(second))
        assert state.ready
    state.observe(working(5.0), 11.0)
    assert state.condition is Condition.FROZEN
    state.observe(working(6.0), 12.0)
    assert state.ready


def test_an_idle_engine_is_never_frozen() -> None:
    state = EngineState()
    for second in range(100):
        state.observe(working(5.0, running=0.0), float(second))
    assert state.ready
    state.observe(working(5.0), 100.0)
    assert state.ready


def test_an_engine_without_counters_is_never_frozen() -> None:
    state = EngineState()
    for second in range(100):
        state.observe(up(), float(second))
    assert state.ready


def test_a_page_that_fails_for_a_while_begins_the_judgement_anew() -> None:
    state = EngineState()
    for second in range(9):
        state.observe(working(5.0), float(second))
    state.observe(Look(Answer.UP, ("tiny",), None), 9.0)
    for second in range(10, 19):
        state.observe(working(5.0), float(second))
    assert state.ready


def test_requests_that_only_the_middleware_knows_can_freeze_it_and_their_progress_not() -> None:
    state = EngineState(frozen_after_s=3.0)
    told = Told()
    told.hello()
    told.start(1, "lease-1")
    for second in range(5):
        state.observe(working(5.0, running=0.0), float(second), told.watch)
    assert state.condition is Condition.FROZEN
    told.first_chunk(1, 0.5)
    state.observe(working(5.0, running=0.0), 6.0, told.watch)
    assert state.ready


def test_signals_come_from_two_pages_and_die_with_the_engine() -> None:
    state = EngineState()
    state.observe(working(100.0), 0.0)
    assert state.load(0.0, 1.0).signals == Signals()
    state.observe(working(160.0), 2.0)
    assert state.load(2.0, 1.0).signals.generation_tokens_per_s == 30.0
    state.observe(REFUSED, 3.0)
    state.observe(working(5.0), 4.0)
    assert state.load(4.0, 1.0).signals == Signals()
