"""What every benchmark prints and writes: percentiles, tables, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

_MIN_WIDTH = 110
"""Columns of a table that is read in a file or a log."""

console = Console(highlight=False, width=max(_MIN_WIDTH, get_terminal_size().columns))


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile; ``share`` is 0 to 1, the unit is the values' own."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Iterable[float]) -> float:
    """The middle value (the upper one of two)."""
    return percentile(values, 0.5)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on the terminal: the first column names the row, the others are figures."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console.print(table)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result, NaN as null; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_with_nulls(result), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
    console.print(f"written: {path}", soft_wrap=True, markup=False)


def _with_nulls(value: Any) -> Any:
    """The same with None for NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _with_nulls(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(each) for each in value]
    return None if isinstance(value, float) and value != value else value
