"""``ProgressWatch``: tells a frozen engine, which answers its health page, from a busy one.

An engine is alive when its counters move, not when /health says 200: a stopped EngineCore
leaves every page of the HTTP server at 200 while all requests hang.
"""

from __future__ import annotations

from typing import TypeAlias

Marks: TypeAlias = tuple[float, ...]
"""Numbers that move while an engine works."""


class ProgressWatch:
    """Frozen: requests run and no number has moved for ``frozen_after_s``."""

    def __init__(self, frozen_after_s: float) -> None:
        self._frozen_after_s = frozen_after_s
        self._marks: Marks = ()
        self._still_since_s: float | None = None
        self.frozen = False
        """What the last look showed."""

    def observe(self, has_requests: bool, marks: Marks, now_s: float) -> None:
        """Take a look in. Without requests, or without marks, nothing is frozen."""
        moved = marks != self._marks
        self._marks = marks
        if moved or not marks or not has_requests:
            self.forget()
            return
        if self._still_since_s is None:
            self._still_since_s = now_s
        self.frozen = now_s - self._still_since_s >= self._frozen_after_s

    def forget(self) -> None:
        """Nothing is known: judge afresh from the next look on."""
        self.frozen = False
        self._still_since_s = None
