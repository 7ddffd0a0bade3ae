from __future__ import annotations

from workers.engine_metrics import EngineMetrics
from workers.engine_state import Answer, CacheFate, EngineState, LoadNumbers, Look

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
    assert not state.ready
    state.observe(REFUSED, 0.0)
    assert not state.ready
    state.observe(Look(Answer.UP), 1.0)
    assert not state.ready
    state.observe(up(), 2.0)
    assert state.ready
    assert state.models == ("tiny",)


def test_silence_makes_it_not_ready_and_keeps_what_is_known() -> None:
    state = EngineState()
    state.observe(up(), 0.0)
    assert state.observe(SILENT, 1.0) is CacheFate.KEPT
    assert (state.ready, state.models) == (False, ("tiny",))
    assert state.load(1.0, 1.0).running == 2.0


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
    assert (state.ready, state.asleep) == (False, True)


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
    assert state.load(15.0, 1.0) == LoadNumbers(ready=True, age_s=5.0, running=2.0)
    assert state.load(15.1, 1.0).running is None
    assert state.ready


def test_load_is_absent_before_the_first_page_and_after_a_death() -> None:
    state = EngineState()
    assert state.load(5.0, 1.0) == LoadNumbers(ready=False)
    state.observe(up(), 5.0)
    state.observe(REFUSED, 6.0)
    assert state.load(6.0, 1.0) == LoadNumbers(ready=False)
