"""``ceiling_hit_ratio``: the most that any router could find cached in a plan."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.workloads.plan import Planned, SegmentId

_Path = int
"""Hash of the segments that a prompt begins with."""


def ceiling_hit_ratio(requests: Iterable[Planned]) -> float:
    """Share of all prompt tokens that an earlier prompt began with, 0 to 1.

    One engine with an infinite cache and no delay would find these. Answers are not counted:
    a prompt that repeats one may find a little more.
    """
    longest: dict[tuple[_Path, SegmentId], int] = {}
    known: set[_Path] = set()
    found = total = 0
    for request in requests:
        path, still_known = 0, True
        for segment in request.prompt:
            beginning = (path, segment.id)
            seen_tokens = longest.get(beginning, 0)
            if still_known:
                found += min(segment.tokens, seen_tokens)
            longest[beginning] = max(segment.tokens, seen_tokens)
            path = hash((*beginning, segment.tokens))
            still_known = still_known and path in known
            known.add(path)
        total += request.prompt_tokens
    return found / total if total else 0.0
