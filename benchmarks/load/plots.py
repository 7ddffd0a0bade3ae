"""Plots of runs as PNG files; needs matplotlib (``pip install 'kvgate[bench]'``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.load.figures import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_IN = (8.0, 4.5)
_DPI = 110


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def ttft_distribution(path: Path, ttfts_s: Mapping[str, Sequence[float]]) -> None:
    """Share of answers whose first token came within a time, one line for each run."""
    with Plot(path, "first token within (s)", "share of answers") as axes:
        axes.set_xscale("log")
        for name, values in ttfts_s.items():
            ordered = sorted(values)
            shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
            axes.step(ordered, shares, where="post", label=name)


def over_time(path: Path, what: str, lines: Mapping[str, Series]) -> None:
    """Values over the time of the run, one line for each name."""
    with Plot(path, "time (s)", what) as axes:
        for name, (times_s, values) in lines.items():
            axes.plot(times_s, values, label=name, linewidth=1.0)
        axes.set_ylim(bottom=0.0)


class Plot:
    """A figure that is written when left, and closed however that is."""

    def __init__(self, path: Path, x: str, y: str) -> None:
        self._path, self._x, self._y = path, x, y

    def __enter__(self) -> Axes:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=_SIZE_IN, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(self._figure)
        self._axes = self._figure.add_subplot()
        self._axes.set_xlabel(self._x)
        self._axes.set_ylabel(self._y)
        self._axes.grid(visible=True, alpha=0.3)
        return self._axes

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            if self._axes.lines:
                self._axes.legend(fontsize="small")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._figure.savefig(self._path)
