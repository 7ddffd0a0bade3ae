"""``EngineState``: what the agent knows of its engine's health and load.

Fed with one ``Look`` per report interval. It tells a serving engine from one that starts,
sleeps, hangs or is gone, a new life of the engine from a slow answer, and how old the load
numbers are. Pure: time is handed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from workers.agent.engine_metrics import EngineMetrics
from workers.agent.gpu import GpuUse
from workers.agent.progress import ProgressWatch
from workers.agent.request_watch import RequestWatch
from workers.agent.signals import NO_SIGNALS, SignalMeter, Signals

KEPT_INTERVALS = 5
"""Load numbers older than this many report intervals are told as absent."""
MISSED_LOOKS = 2
"""Looks in a row without any answer after which the engine counts as down."""
DEFAULT_FROZEN_AFTER_S = 30.0


class Answer(Enum):
    """How the engine's HTTP server behaved."""

    UP = "up"
    REFUSED = "refused"
    """Nobody listens: the process is gone, and its cache with it."""
    SILENT = "silent"
    """No answer in time, or a broken one: nothing is known of its cache."""


class Condition(Enum):
    """The engine's own state; a drain comes on top of it."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    ASLEEP = "asleep"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the engine."""

    answer: Answer
    models: tuple[str, ...] | None = ()
    """Served model names, base first; empty if the engine lists none, None if it did not
    say in time although another page answered."""
    metrics: EngineMetrics | None = None
    """None if the page was broken."""
    healthy: bool = True
    """False if /health answered with an error."""
    adapters: tuple[str, ...] = ()
    """Those of the models that are adapters."""
    gpu: GpuUse | None = None


class CacheFate(Enum):
    """What a look says about the engine's cache."""

    KEPT = "kept"
    NEW_LIFE = "new_life"
    """Another process, or none: the cache is gone and event numbers start again."""
    CLEARED = "cleared"
    """Same process, empty cache: it went to sleep."""


@dataclass(frozen=True, slots=True)
class LoadNumbers:
    """Load as it is told to schedulers; None = the engine does not say."""

    age_s: float = 0.0
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    kv_blocks: int | None = None
    max_adapters: int | None = None
    signals: Signals = NO_SIGNALS


class EngineState:
    """Latest knowledge of one engine."""

    def __init__(self, frozen_after_s: float = DEFAULT_FROZEN_AFTER_S) -> None:
        self.models: tuple[str, ...] = ()
        """The last list that the engine gave; kept while it is down."""
        self.adapters: tuple[str, ...] = ()
        """Those of ``models`` that are adapters."""
        self.answer: Answer | None = None
        """How it answered last; None before the first look."""
        self.metrics_broken = False
        self.in_doubt = False
        """It served, and the last look showed a bad health page or no models: look again soon.
        Servers refuse a page when they are busy; only the next bad look takes it out."""
        self.looked_at_s = -math.inf
        """When the last look was taken in."""
        self._metrics: EngineMetrics | None = None
        self._metrics_at_s = 0.0
        self._signals = NO_SIGNALS
        self._meter = SignalMeter()
        self._progress = ProgressWatch(frozen_after_s)
        self._listed = False
        self._healthy = False
        self._served = False
        self._missed = 0
        self._started: float | None = None
        self._asleep = False
        # The end of the present life has been told already.
        self._life_over = True

    @property
    def condition(self) -> Condition:
        """What the last looks add up to."""
        if self.answer in (None, Answer.REFUSED) or self._missed >= MISSED_LOOKS:
            return Condition.DOWN
        if not self._listed or not self._healthy:
            # An engine that served and lost its health is not starting: it has died inside.
            broken = self._served and not self._healthy
            return Condition.DOWN if broken else Condition.STARTING
        if self._asleep:
            return Condition.ASLEEP
        return Condition.FROZEN if self._progress.frozen else Condition.READY

    @property
    def ready(self) -> bool:
        """The engine serves."""
        return self.condition is Condition.READY

    @property
    def requests_by_metrics(self) -> float | None:
        """Requests on the engine by its metrics, as of the last look; None = unknown."""
        if self.answer is Answer.REFUSED:
            return 0.0
        if self.metrics_broken or self._metrics is None:
            return None
        return self._metrics.busy_requests

    def new_life_heard(self) -> None:
        """The event numbers went back: do not tell the same new life once more."""
        self._life_over = True

    def observe(self, look: Look, now_s: float, requests: RequestWatch | None = None) -> CacheFate:
        """Take a look in; ``now_s`` is monotonic time, ``requests`` what the middleware tells."""
        requests = requests if requests and requests.known else None
        self.looked_at_s = now_s
        self.answer = look.answer
        if look.answer is Answer.REFUSED:
            return self._end_life()
        self.metrics_broken = look.metrics is None
        self._missed = self._missed + 1 if look.answer is Answer.SILENT else 0
        if look.answer is Answer.UP:
            self._take_pages(look)
        if look.metrics is None:
            # Counters that nobody reads prove nothing.
            self._progress.forget()
            return CacheFate.KEPT
        return self._take(look, look.metrics, requests, now_s)

    def _take_pages(self, look: Look) -> None:
        serves = look.healthy and look.models != ()
        self.in_doubt = self._listed and self._healthy and not serves and not self.in_doubt
        if self.in_doubt:
            return
        self._healthy = look.healthy
        if look.models is not None:
            self._listed = bool(look.models)
        if look.models:
            self.models, self.adapters = look.models, look.adapters
        self._served = self._served or (self._listed and self._healthy)

    def _end_life(self) -> CacheFate:
        told, self._life_over = self._life_over, True
        self._metrics = None
        self._signals = NO_SIGNALS
        self._meter = SignalMeter()
        self._progress.forget()
        self._listed = self._healthy = self._served = self._asleep = self.in_doubt = False
        self._missed = 0
        return CacheFate.KEPT if told else CacheFate.NEW_LIFE

    def _take(
        self, look: Look, metrics: EngineMetrics, requests: RequestWatch | None, now_s: float
    ) -> CacheFate:
        self._metrics, self._metrics_at_s = metrics, now_s
        sums = requests.sums if requests else None
        self._signals = self._meter.measure(metrics, now_s, sums, look.gpu)
        self._watch(metrics, requests, now_s)
        was_asleep, self._asleep = self._asleep, metrics.awake is False
        started, self._started = self._started, metrics.process_start_time_s
        known, self._life_over = not self._life_over, False
        if known and None not in (started, self._started) and started != self._started:
            return CacheFate.NEW_LIFE
        return CacheFate.CLEARED if self._asleep and not was_asleep else CacheFate.KEPT

    def _watch(self, metrics: EngineMetrics, requests: RequestWatch | None, now_s: float) -> None:
        has_requests = bool(metrics.busy_requests) or bool(requests and requests.count)
        # Without counters of its own an engine that generates for long looks still.
        marks = metrics.progress and (*metrics.progress, *(requests.progress if requests else ()))
        self._progress.observe(has_requests, marks, now_s)

    def load(self, now_s: float, interval_s: float) -> LoadNumbers:
        """Load as of now; numbers older than 5 intervals are left out."""
        age_s = max(0.0, now_s - self._metrics_at_s)
        metrics = self._metrics
        if metrics is None:
            return LoadNumbers()
        if age_s > KEPT_INTERVALS * interval_s:
            return LoadNumbers(age_s, max_adapters=metrics.max_adapters)
        return LoadNumbers(
            age_s=age_s,
            running=metrics.running,
            waiting=metrics.waiting,
            kv_usage=metrics.kv_usage,
            kv_blocks=metrics.kv_blocks,
            max_adapters=metrics.max_adapters,
            signals=self._signals,
        )
