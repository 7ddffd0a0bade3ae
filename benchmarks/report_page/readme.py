"""The README's summary table: a few lines between two markers, made from the results.

It has parts. One whose JSON is not there keeps the lines of before, so that a single benchmark
can be run again without losing the others' figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.report_page import markdown
from benchmarks.report_page.comparison import FIVE, KVGATE, Contest, contests
from benchmarks.report_page.fields import Json, find, number, value
from benchmarks.targets import Checked

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
PARTS = ("compare", "overload", "cost", "targets")
"""In their order."""
_PART = re.compile(r"<!-- benchmarks:(\w+) -->\n")
_ARMS = ("Envoy alone", "bare processor", KVGATE)


class NoMarkers(ValueError):
    """The file has no place for the summary."""


def update(path: Path, results: Mapping[str, Json], checked: list[Checked]) -> None:
    """Write the parts that the results give between the file's markers.

    Raises:
        NoMarkers: the file lacks them.
        OSError: it cannot be read or written.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise NoMarkers(f"{path} has not both {BEGIN} and {END}")
    parts = {**_parts(old), **summary(results, checked)}
    told = "".join(f"<!-- benchmarks:{name} -->\n{parts[name]}" for name in PARTS if name in parts)
    path.write_text(f"{before}{begin}\n{told}{end}{after}", encoding="utf-8")


def summary(results: Mapping[str, Json], checked: list[Checked]) -> dict[str, str]:
    """Markdown of each part that there are results for."""
    parts = {
        "compare": list(_compare(results)),
        "overload": list(_overload(results.get("overload", {}))),
        "cost": list(_cost(results.get("overhead", {}))),
        "targets": list(_targets(checked)),
    }
    return {name: "\n".join(lines) + "\n" for name, lines in parts.items() if lines}


def _parts(old: str) -> dict[str, str]:
    _, *found = _PART.split(old)
    return dict(zip(found[::2], found[1::2], strict=True))


def _compare(results: Mapping[str, Json]) -> Iterator[str]:
    """kvgate, and of each figure the best of all other arms, whichever that is."""
    workloads: dict[str, list[Contest]] = {}
    for each in contests(results, FIVE):
        workloads.setdefault(each.workload, []).append(each)
    if not workloads:
        return
    rows = []
    for workload, figures in workloads.items():
        ours = {
            each.figure: _bold(each.figure.form.format(each.ours), each.ahead) for each in figures
        }
        theirs = {each.figure: each.figure.form.format(each.theirs) for each in figures}
        for label, told in ((f"{workload}: kvgate", ours), ("best other, each figure", theirs)):
            rows.append((label, *(told.get(figure, markdown.MISSING) for figure in FIVE)))
    yield from markdown.table(("", *(figure.heading for figure in FIVE)), rows)
    settings = value(results.get("compare", {}), "settings") or {}
    rounds, workers = value(settings, "rounds"), value(settings, "cluster.workers")
    yield f"Medians of {rounds} rounds, {workers} simulated workers; bold: no other arm is better."
    yield ""


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _overload(result: Json) -> Iterator[str]:
    ratio, factor = number(result, "goodput_ratio"), number(result, "settings.factor")
    if ratio is None or factor is None:
        return
    told = [
        f"{name}: {markdown.figure(good)} good answers/s, online TTFT p99 {markdown.figure(p99)} s"
        for (name,), arm in find(result, "arms[]")
        for good in [number(arm, "figures.goodput_per_s")]
        for p99 in [number(arm, "lanes.online.ttft_s.p99")]
    ]
    arms = "; ".join(told)
    yield f"At {factor:g} times the sustainable rate, {arms}: {ratio:.1f} times the goodput."
    yield ""


def _cost(result: Json) -> Iterator[str]:
    rows = []
    for (workload,), each in find(result, "workloads[workload.name]"):
        cells = [_cpu(each, arm) for arm in _ARMS]
        rows.append((workload, *cells, markdown.figure(number(each, "above_bare_cpu_ms.median"))))
    if rows:
        heads = ("CPU ms a request, Envoy + processor", *_ARMS, "kvgate above bare")
        yield from markdown.table(heads, rows)


def _cpu(workload: Json, arm: str) -> str:
    envoy, processor = (
        number(workload, f"medians.{arm}.{field}") for field in ("envoy_cpu_ms", "processor_cpu_ms")
    )
    told = markdown.figure(envoy)
    return f"{told} + {markdown.figure(processor)}" if processor else told


def _targets(checked: list[Checked]) -> Iterator[str]:
    verdicts = [each.verdict for each in checked]
    if set(verdicts) - {"not measured"}:
        counts = (f"{verdicts.count(word)} {word}" for word in ("met", "MISSED", "not measured"))
        yield f"Targets: {', '.join(counts)}."
