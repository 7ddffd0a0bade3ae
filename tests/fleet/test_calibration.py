from __future__ import annotations

import pytest

from extproc.fleet.calibration import Calibration
from extproc.fleet.worker import EngineError, LoadReport, Outcome, WorkerState
from tests.support.builders import join, pool


def test_predictions_that_come_true_keep_their_worth() -> None:
    calibration = Calibration()
    for number in range(100):
        calibration.expect(f"{number}", 1_000)
        assert calibration.learn(0, f"{number}", 1_024) == 1.0


def test_a_worker_whose_engine_finds_nothing_loses_its_credit() -> None:
    calibration = Calibration()
    worth = []
    for number in range(200):
        calibration.expect(f"{number}", 1_000)
        worth.append(calibration.learn(0, f"{number}", 0))
    assert worth == sorted(worth, reverse=True)
    assert 0.05 < worth[-1] < 0.1
    calibration.forget(0)
    calibration.expect("again", 1_000)
    assert calibration.learn(0, "again", 1_000) == 1.0


def test_one_wrong_prediction_is_not_all() -> None:
    calibration = Calibration()
    calibration.expect("a", 1_000)
    assert calibration.learn(0, "a", 0) == pytest.approx(0.8, abs=0.01)


def test_requests_without_a_prediction_teach_nothing() -> None:
    calibration = Calibration()
    calibration.expect("a", 0)
    assert calibration.learn(0, "a", 500) == 1.0
    assert calibration.learn(0, "unknown", 0) == 1.0


def test_predictions_that_nobody_answers_are_dropped() -> None:
    """MM1."""
    calibration = Calibration()
    for number in range(20_000):
        calibration.expect(f"{number}", 1)
    assert len(calibration) == 16_384


@pytest.mark.parametrize("calibrate", [True, False])
def test_the_pool_learns_from_outcomes_if_it_is_to(calibrate: bool) -> None:
    some = pool(routing={"calibrate": calibrate})
    worker = join(some, 1)
    some.book(worker.column, 0, "a", cached_tokens=4_096)
    some.outcome(worker, Outcome("a", 200, EngineError.NONE, 1.0, cached_tokens=0), 1.0)
    some.outcome(worker, Outcome("b", 200, EngineError.NONE, 1.0), 1.0)
    assert some.table.cache_credit[worker.column] == (0.5 if calibrate else 1.0)
    some.report(worker, LoadReport(WorkerState.DOWN), 2.0)
    assert some.table.cache_credit[worker.column] == 1.0
