"""Markdown pieces: tables and figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MISSING = "-"
_FIGURE = re.compile(r"\**[-+]?[\d.,]+%?\**|-")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table; columns of nothing but figures are flush right."""
    rows = list(rows)
    marks = [
        "--:" if rows and all(_FIGURE.fullmatch(row[number]) for row in rows) else "---"
        for number in range(len(heads))
    ]
    return [_row(heads), _row(marks), *map(_row, rows), ""]


def figure(value: Any, form: str = "{:.2f}", times: float = 1.0) -> str:
    """A number as a table shows it, anything else as it is, nothing as a dash."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return form.format(value if times == 1 else times * value)


def short(value: float | None) -> str:
    """A number with three digits that count."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def images(folder: Path, root: Path) -> list[str]:
    """Plots of a folder: distributions shown, one of each worker's load linked."""
    paths = sorted(folder.rglob("*.png")) if folder.is_dir() else []
    shown = [path for path in paths if not path.name.startswith("worker_load")]
    linked = [path for path in paths if path.name.startswith("worker_load")]
    lines = [f"![{_title(path, folder)}]({_link(path, root)})" for path in shown]
    if linked:
        links = (f"[{_title(path, folder)}]({_link(path, root)})" for path in linked)
        lines.append(f"Load of each worker: {', '.join(links)}.")
    return [part for line in lines for part in (line, "")]


def _title(path: Path, folder: Path) -> str:
    return " ".join(path.relative_to(folder).with_suffix("").parts).replace("_", " ")


def _link(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix().replace(" ", "%20")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
