from __future__ import annotations

import numpy as np

from extproc.fleet.table import ALWAYS, NEVER, WorkerTable


def table(width: int = 4) -> WorkerTable:
    made = WorkerTable()
    made.resize(width)
    for column in range(width):
        made.reset(column)
    return made


def test_an_empty_table_has_no_columns() -> None:
    assert len(WorkerTable()) == 0
    assert {len(array) for array in vars(WorkerTable()).values()} == {0}
    assert not WorkerTable().has_slot().any()


def test_it_grows_and_keeps_its_values_and_never_shrinks() -> None:
    grown = table(2)
    grown.present[1], grown.slots[1], grown.fresh_until[1] = True, 7, 9.0
    grown.resize(5)
    grown.resize(3)
    assert {len(array) for array in vars(grown).values()} == {5}
    assert (grown.present[1], grown.slots[1], grown.fresh_until[1]) == (True, 7, 9.0)
    assert grown.slots[2] == 0
    assert [array.dtype for array in vars(grown).values()] == [
        array.dtype for array in vars(WorkerTable()).values()
    ]


def test_a_reset_column_is_nobodys() -> None:
    used = table(2)
    for array in vars(used).values():
        array[:] = 1
    used.reset(0)
    counts = (used.present, used.ready, used.in_flight, used.foreign, used.slots)
    assert [int(array[0]) for array in counts] == [0, 0, 0, 0, 0]
    assert used.fresh_until[0] == used.suspect_until[0] == used.digest_until[0] == NEVER
    assert used.slots[1] == 1


def test_a_slot_is_for_a_ready_worker_that_leads_and_is_not_full() -> None:
    workers = table(5)
    workers.slots[:] = 2
    workers.leads[:] = [False, True, True, True, True]
    workers.ready[:] = [True, False, True, True, True]
    workers.in_flight[:] = [0, 0, 1, 1, 2]
    workers.foreign[:] = [0, 0, 0, 1, 1]
    assert workers.usable().tolist() == [False, False, True, True, True]
    assert workers.running().tolist() == [0, 0, 1, 2, 3]
    assert workers.has_slot().tolist() == [False, False, True, False, False]


def test_silent_and_suspect_workers_are_the_last_resort() -> None:
    """LD3, RT1: both end at a stated time."""
    workers = table(4)
    workers.fresh_until[:] = [ALWAYS, 10.0, ALWAYS, 10.1]
    workers.suspect_until[:] = [NEVER, NEVER, 10.1, 10.0]
    assert workers.last_resort(10.0).tolist() == [False, True, True, False]
    assert np.array_equal(workers.last_resort(10.1), [False, True, False, True])
