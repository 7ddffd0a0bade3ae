"""``VirtualWorker``: one engine that steps under virtual time, and may die, freeze or drain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.simulation.agent import VirtualAgent
from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.engine import FastEngine
from extproc.fleet.worker import WorkerState
from extproc.policy import PoolPolicy
from workers.simulator.config import EngineConfig
from workers.simulator.engine import Step
from workers.simulator.requests import EngineRequest, Output

OnOutputs = Callable[[Sequence[Output]], None]


@dataclass(slots=True)
class _Skip:
    """Plain steps under way: since when, how many, how long each."""

    began_at: float
    steps: int
    step_s: float


@dataclass
class VirtualWorker:
    """One worker. ``up`` False: nobody answers at its address.

    ``on_outputs`` gets what steps made, ``on_news`` is called when the cache changed.
    """

    address: str
    config: EngineConfig
    pool: PoolPolicy
    clock: VirtualClock
    on_outputs: OnOutputs
    on_news: Callable[[VirtualWorker], None]
    up: bool = False
    draining: bool = False
    frozen_until: float = 0.0
    epoch: int = 0
    news_due: bool = False
    engine: FastEngine = field(init=False)
    agent: VirtualAgent = field(init=False)
    _version: int = 0
    _stepping: bool = False
    _skip: _Skip | None = None

    def start(self) -> None:
        """A new engine with an empty cache."""
        self.epoch += 1
        self.engine = FastEngine(self.config)
        self.agent = VirtualAgent(self.pool, self.engine, self.epoch)
        self.up, self.draining, self.news_due = True, False, False
        self._forget_steps()

    def stop(self) -> None:
        """The engine is gone, with everything that ran on it."""
        self.up = False
        self._forget_steps()

    def freeze(self, seconds: float) -> None:
        """No step ends for a while; what is under way is done afterwards."""
        self.frozen_until = self.clock.now + seconds

    @property
    def state(self) -> WorkerState:
        """What the agent reports."""
        if not self.up:
            return WorkerState.DOWN
        if self.draining:
            return WorkerState.DRAINING if self.engine.busy else WorkerState.DRAINED
        return WorkerState.READY

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        self.engine.add(request, self.clock.now)
        if not self._stepping:
            self._step()
        elif self._skip is not None:
            self._shorten(self._skip)

    def _step(self) -> None:
        """Begin the next step, or many plain ones at once."""
        steps = self.engine.plain_steps
        if steps > 1:
            skip = self._skip = _Skip(self.clock.now, steps, self.engine.plain_step_s)
            self._stepping = True
            self._later(steps * skip.step_s, self._end_skip)
            return
        step = self.engine.begin(self.clock.now)
        self._stepping = step is not None
        if step is not None:
            self._later(step.duration_s, partial(self._end, step))

    def _end(self, step: Step) -> None:
        result = self.engine.complete(step)
        if result.events:
            self.agent.take(result.events)
            self.on_news(self)
        self.on_outputs(result.outputs)
        self._step()

    def _end_skip(self) -> None:
        skip, self._skip = self._skip, None
        if skip is not None:
            # Where blocks run out nothing is skipped, and the next ordinary step preempts.
            self.engine.skip(skip.steps)
        self._step()

    def _shorten(self, skip: _Skip) -> None:
        """End a skip with the step under way: somebody has come."""
        done = int((self.clock.now - skip.began_at) / skip.step_s) + 1
        if done < skip.steps:
            skip.steps = done
            self._version += 1
            self._later(skip.began_at + done * skip.step_s - self.clock.now, self._end_skip)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Run a step's end, unless the engine is another by then; frozen ones wait."""
        version = self._version

        def when_due() -> None:
            if version != self._version:
                return
            if self.frozen_until > self.clock.now:
                self.clock.at(self.frozen_until, when_due)
            else:
                call()

        self.clock.after(seconds, when_due)

    def _forget_steps(self) -> None:
        self._version += 1
        self._stepping = False
        self._skip = None
