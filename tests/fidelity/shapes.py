"""The shape of JSON: keys and types without values, so that two engines can be compared."""

from __future__ import annotations

import json
from typing import Any

_NAMES = {
    bool: "boolean", int: "integer", float: "number", str: "text", type(None): "null",
}  # fmt: skip


def shape(value: Any) -> Any:
    """Keys sorted, values as the names of their types; a list is the set of its items' shapes.

    A key whose value is null is left out: to a client it is as good as absent.
    """
    if isinstance(value, dict):
        return {key: shape(value[key]) for key in sorted(value) if value[key] is not None}
    if isinstance(value, list):
        shapes = {json.dumps(item): item for item in map(shape, value)}
        return [shapes[text] for text in sorted(shapes)]
    return _NAMES[type(value)]


def sequence(shapes: list[Any]) -> list[Any]:
    """A sequence with its runs of equal items told once, as ``["repeated", item]``."""
    told: list[Any] = []
    for item in shapes:
        if told and told[-1] in (item, ["repeated", item]):
            told[-1] = ["repeated", item]
        else:
            told.append(item)
    return told


def once(item: Any) -> Any:
    """An item of :func:`sequence` without the mark of a run."""
    return item[1] if isinstance(item, list) and item[0] == "repeated" else item


def sse_shapes(events: list[tuple[str, str]]) -> list[Any]:
    """Shape of a stream: event names and data, runs told once."""
    shapes = []
    for name, data in events:
        content = data if data == "[DONE]" else shape(json.loads(data))
        shapes.append([name, content] if name else content)
    return sequence(shapes)
