from __future__ import annotations

import pytest

from workers.simulator.busy import BusyMeter


def meter(*steps: tuple[float, float]) -> BusyMeter:
    made = BusyMeter()
    for began_s, ended_s in steps:
        made.begin(began_s)
        made.end(ended_s)
    return made


def test_it_is_the_share_of_the_last_second() -> None:
    assert meter((10.0, 10.2), (10.5, 10.6)).ratio(11.0) == pytest.approx(0.3)


def test_a_step_that_began_before_the_window_counts_in_part() -> None:
    assert meter((9.0, 10.4)).ratio(11.0) == pytest.approx(0.4)


def test_a_step_under_way_counts_as_far_as_it_is() -> None:
    busy = meter((10.0, 10.1))
    busy.begin(10.7)
    assert busy.ratio(11.0) == pytest.approx(0.4)
    assert busy.ratio(20.0) == 1.0


def test_idle_is_0_and_old_steps_are_forgotten() -> None:
    busy = meter((1.0, 2.0), (2.0, 3.0))
    assert busy.ratio(4.5) == 0.0
    assert meter().ratio(1.0) == 0.0


def test_an_end_without_a_beginning_counts_nothing() -> None:
    busy = BusyMeter()
    busy.end(1.0)
    assert busy.ratio(1.0) == 0.0
