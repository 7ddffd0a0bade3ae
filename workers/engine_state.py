"""``EngineState``: what the agent knows of its engine's health and load.

Fed with one ``Look`` per report interval. It tells ready from not ready, a new life of
the engine from a slow answer, and how old the load numbers are. Pure: time is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from workers.engine_metrics import EngineMetrics

KEPT_INTERVALS = 5
"""Load numbers older than this many report intervals are told as absent."""


class Answer(Enum):
    """How the engine's HTTP server behaved."""

    UP = "up"
    REFUSED = "refused"
    """Nobody listens: the process is gone, and its cache with it."""
    SILENT = "silent"
    """No answer in time, or a broken one: nothing is known of its cache."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the engine."""

    answer: Answer
    models: tuple[str, ...] = ()
    """Served model names, base first; empty if the engine did not list them."""
    metrics: EngineMetrics | None = None
    """None if the page was broken."""


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

    ready: bool
    age_s: float = 0.0
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    kv_blocks: int | None = None


class EngineState:
    """Latest knowledge of one engine."""

    def __init__(self) -> None:
        self.models: tuple[str, ...] = ()
        """The last list that the engine gave; kept while it is down."""
        self.answer: Answer | None = None
        """How it answered last; None before the first look."""
        self.metrics_broken = False
        self._listed = False
        self._metrics: EngineMetrics | None = None
        self._metrics_at_s = 0.0
        self._started: float | None = None
        self._asleep = False
        # The end of the present life has been told already.
        self._life_over = True

    @property
    def ready(self) -> bool:
        """The engine answered the last look, listed its models and is awake."""
        return self._listed and not self._asleep

    @property
    def asleep(self) -> bool:
        """The engine says that it sleeps."""
        return self._asleep

    def new_life_heard(self) -> None:
        """The event numbers went back: do not tell the same new life once more."""
        self._life_over = True

    def observe(self, look: Look, now_s: float) -> CacheFate:
        """Take a look in; ``now_s`` is monotonic time."""
        self.answer = look.answer
        self._listed = look.answer is Answer.UP and bool(look.models)
        self.models = look.models or self.models
        if look.answer is Answer.REFUSED:
            return self._end_life()
        self.metrics_broken = look.metrics is None
        return CacheFate.KEPT if look.metrics is None else self._take(look.metrics, now_s)

    def _end_life(self) -> CacheFate:
        told, self._life_over = self._life_over, True
        self._metrics = None
        self._asleep = False
        return CacheFate.KEPT if told else CacheFate.NEW_LIFE

    def _take(self, metrics: EngineMetrics, now_s: float) -> CacheFate:
        self._metrics, self._metrics_at_s = metrics, now_s
        was_asleep, self._asleep = self._asleep, metrics.awake is False
        started, self._started = self._started, metrics.process_start_time_s
        known, self._life_over = not self._life_over, False
        if known and None not in (started, self._started) and started != self._started:
            return CacheFate.NEW_LIFE
        return CacheFate.CLEARED if self._asleep and not was_asleep else CacheFate.KEPT

    def load(self, now_s: float, interval_s: float) -> LoadNumbers:
        """Load as of now; numbers older than 5 intervals are left out."""
        age_s = max(0.0, now_s - self._metrics_at_s)
        metrics = self._metrics
        if metrics is None or age_s > KEPT_INTERVALS * interval_s:
            return LoadNumbers(self.ready, age_s if metrics else 0.0)
        return LoadNumbers(
            ready=self.ready,
            age_s=age_s,
            running=metrics.running,
            waiting=metrics.waiting,
            kv_usage=metrics.kv_usage,
            kv_blocks=metrics.kv_blocks,
        )
