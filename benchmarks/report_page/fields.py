"""Fields of a result by path: ``arms[].figures.ttft_s.p99``.

A step is a key, or one of these behind it: ``[]`` every item (of a dict with its key as label),
``[path]`` every item of a list, labelled by its own field, ``[path=text]`` the items whose field
reads so; a second bracket looks at each of these. What is not there yields nothing, so that a
result of another version is no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]
Labels = tuple[str, ...]

_STEP = re.compile(r"\[([^\]=]*)(?:=([^\]]*))?\]|([^.\[\]]+)")
_Step = Sequence[str]
"""Inner path, text that it must equal, key: the expression's groups."""


def find(result: Any, path: str) -> Iterator[tuple[Labels, Any]]:
    """Everything at a path, with the labels of the items on the way."""
    steps = [step.groups(default="") for step in _STEP.finditer(path)]
    yield from _walk(result, steps, ())


def value(result: Any, path: str) -> Any:
    """The first thing at a path; None if there is none."""
    return next((found for _, found in find(result, path)), None)


def number(result: Any, path: str) -> float | None:
    """The same if it is a number."""
    found = value(result, path)
    known = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if known else None


def _walk(here: Any, steps: Sequence[_Step], labels: Labels) -> Iterator[tuple[Labels, Any]]:
    if not steps:
        yield labels, here
        return
    (inner, text, key), rest = steps[0], steps[1:]
    if key:
        if isinstance(here, dict) and key in here:
            yield from _walk(here[key], rest, labels)
    elif isinstance(here, dict) and not inner:
        for name, item in here.items():
            yield from _walk(item, rest, (*labels, name))
    else:
        items = here if isinstance(here, list) else [here] if isinstance(here, dict) else []
        for item in items:
            told = str(value(item, inner)) if inner else ""
            if not text:
                yield from _walk(item, rest, (*labels, told) if inner else labels)
            elif told == text:
                yield from _walk(item, rest, labels)
