"""Tables of a result, by layouts: which fields are its rows and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.report_page import markdown
from benchmarks.report_page.fields import Json, Labels, find, value


class Column(msgspec.Struct, frozen=True):
    """A figure of each row: its heading, its field and how it is written."""

    heading: str
    field: str
    form: str = "{:.2f}"
    times: float = 1.0


class Layout(msgspec.Struct, frozen=True):
    """One table: what a row is (a path), how its labels are headed, and its figures.

    ``grouped``: a table for each value of the first label.
    """

    title: str
    rows: str
    heads: tuple[str, ...]
    columns: tuple[Column, ...]
    grouped: bool = False


def tables(result: Json, layouts: Sequence[Layout]) -> Iterator[str]:
    """Markdown lines of all tables; those without rows are left out."""
    for layout in layouts:
        groups: dict[str, list[tuple[Labels, Json]]] = {}
        for labels, row in find(result, layout.rows):
            if len(labels) != len(layout.heads):
                continue  # a result of another shape
            group = labels[0] if layout.grouped else ""
            groups.setdefault(group, []).append((labels[layout.grouped :], row))
        for group, rows in groups.items():
            yield f"**{': '.join(part for part in (group, layout.title) if part)}**"
            yield ""
            heads = (*layout.heads[layout.grouped :], *(each.heading for each in layout.columns))
            yield from markdown.table(
                heads, [(*labels, *_cells(layout, row)) for labels, row in rows]
            )


def _cells(layout: Layout, row: Json) -> Iterator[str]:
    for each in layout.columns:
        yield markdown.figure(value(row, each.field), each.form, each.times)
