"""``read_page``: samples of a metrics page in Prometheus text or OpenMetrics format."""

from __future__ import annotations

import math
import re
from collections.abc import Set
from typing import TypeAlias

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""A real page has about 100 KB; nothing longer is read."""

_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)"
    r"(?:\{(?P<labels>(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?"
    r"[ \t]+(?P<value>[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|Inf|NaN))(?=[ \t]|$)",
    re.ASCII,
)
_LABEL = re.compile(r"(\w+)=\"((?:[^\"\\]|\\.)*)\"", re.ASCII)

Sample: TypeAlias = tuple[dict[str, str], float]
Samples: TypeAlias = dict[str, list[Sample]]


class MetricsError(Exception):
    """The page is no metrics page, or only part of one."""


def read_page(page: bytes, wanted: Set[str]) -> Samples:
    """Samples of the wanted names.

    Raises:
        MetricsError: too long, cut in the middle, or without a single sample.
    """
    if len(page) > MAX_PAGE_BYTES:
        raise MetricsError(f"metrics page has over {MAX_PAGE_BYTES} bytes")
    text = page.decode("utf-8", "replace")
    # A page ends with a newline or "# EOF"; otherwise its last number may be half a number.
    if not text.endswith("\n") and not text.endswith("# EOF"):
        raise MetricsError("metrics page is empty or cut")
    found: Samples = {}
    any_sample = False
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if any_sample and name not in wanted:
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        any_sample = True
        if name in wanted:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            found.setdefault(name, []).append((labels, _number(match["value"])))
    if not any_sample:
        raise MetricsError("no metric on the page")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
