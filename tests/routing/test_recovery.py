"""HE3: whatever happened to a worker, half a minute of good reports brings it back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.fleet.worker import EngineError, Outcome, Worker, WorkerState
from tests.support.builders import Fleet, address, join, prompt_keys, ready, text_blocks

WORKERS = 3
TROUBLES = st.one_of(
    st.tuples(st.just("error"), st.sampled_from(list(EngineError))),
    st.tuples(st.just("state"), st.sampled_from(list(WorkerState))),
    st.tuples(st.just("suspect"), st.none()),
    st.tuples(st.just("stale"), st.floats(0, 60)),
    st.tuples(st.just("full"), st.none()),
    st.tuples(st.just("silence"), st.floats(0.1, 6)),
)


class History:
    def __init__(self) -> None:
        self.fleet = Fleet(workers=WORKERS, slots=64)
        self.now = 0.0

    def worker(self, number: int) -> Worker:
        """A worker; one that was silent for too long begins anew, as its agent does."""
        pool = self.fleet.pool
        return pool.workers.get(address(number)) or join(pool, number, now=self.now, slots=64)

    def suffers(self, number: int, kind: str, what: object) -> None:
        fleet, pool = self.fleet, self.fleet.pool
        worker = self.worker(number)
        if kind == "error":
            assert isinstance(what, EngineError)
            outcome = Outcome("lease", 503, what, 1.0)
            fleet.scheduler.outcome(fleet.served, worker, outcome, self.now)
        elif kind == "state":
            pool.report(worker, ready(state=what), self.now)
        elif kind == "suspect":
            pool.suspect(worker, self.now)
        elif kind == "stale":
            pool.report(worker, ready(age_s=what), self.now)
        elif kind == "full":
            pool.report(worker, ready(kv_usage=1.0, kv_blocks=100, waiting=50.0), self.now)
        else:
            assert isinstance(what, float)
            self.now += what
        fleet.scheduler.tick(self.now)

    def goes_well(self, seconds: int) -> None:
        for _ in range(seconds * 4):
            self.now += 0.25
            for number in range(WORKERS):
                worker = self.worker(number)
                self.fleet.scheduler.report(self.fleet.served, worker, ready(), self.now)
            self.fleet.scheduler.tick(self.now)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), TROUBLES), max_size=30))
def test_every_worker_gets_traffic_again(troubles: list[tuple[int, tuple[str, object]]]) -> None:
    history = History()
    for number, (kind, what) in troubles:
        history.suffers(number, kind, what)
    history.goes_well(30)
    fleet, now = history.fleet, history.now
    present = fleet.pool.table.present
    assert present.sum() == WORKERS
    assert not fleet.pool.table.last_resort(now)[present].any()
    assert fleet.pool.has_room(None, 1_000)[present].all()
    prompts = [prompt_keys(text_blocks(seed, 2)) for seed in range(30)]
    led = Counter(t.decision.endpoints[0] for t in (
        fleet.arrive(prompt, now=now) for prompt in prompts) if t.decision)  # fmt: skip
    assert set(led) == {address(number) for number in range(WORKERS)}
