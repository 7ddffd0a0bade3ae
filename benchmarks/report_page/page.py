"""``kvgate bench report``: REPORT.md from whatever the benchmarks left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.machine import without_folders
from benchmarks.report import console
from benchmarks.report_page import markdown, readme
from benchmarks.report_page.comparison import COMPARISON, KVGATE, Contest, configurations, contests
from benchmarks.report_page.fields import Json, find, value
from benchmarks.report_page.layouts import LAYOUTS
from benchmarks.report_page.results import Found, read
from benchmarks.report_page.tables import tables
from benchmarks.targets import Checked, check

FILE = "REPORT.md"
_NOT_SHOWN = (
    "The simulated worker's step times come from one measured GPU and model. They rank routers; "
    "they do not predict your latency.",
    "Load generator, router and simulated workers share one machine's cores: what a router "
    "spends is missing to the others.",
    "Simulated engines have no network, no model and no attention cost over long contexts.",
    "Answers are as long as planned; real ones are not known before.",
    "One scheduler, one Envoy: no figure here is of several.",
    "Peers run with the settings printed above; their makers may know better ones.",
)


def run(folder: Path, readme_path: Path | None) -> None:
    """Write the report into the results folder, and the summary into the README if given.

    Raises:
        readme.NoMarkers: the README has no place for the summary.
        OSError: a file cannot be read or written.
    """
    found = read(folder)
    results = {name: each.result for name, each in found.items()}
    checked = check(results)
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(page(folder, found, checked)) + "\n", encoding="utf-8")
    if readme_path is not None:
        readme.update(readme_path, results, checked)
    for target in checked:
        what, measured, bound, *_ = _target_cells(target)
        told = f"{target.verdict}: {what}: {measured}, {bound}"
        console.print(told, markup=False, soft_wrap=True)
    for each in found.values():
        if each.missing:
            console.print(f"{each.source.name}: {each.missing}", markup=False)
    console.print(f"written: {path}", soft_wrap=True, markup=False)


def page(folder: Path, found: Mapping[str, Found], checked: list[Checked]) -> Iterator[str]:
    """Lines of the report."""
    results = {name: each.result for name, each in found.items()}
    yield from ("# Benchmark report", "")
    yield "Written by `make bench-report` from the JSON beside it. What is measured, and how, is in"
    yield from ("[docs/benchmarks.md](../../docs/benchmarks.md).", "")
    yield from _targets(checked)
    yield from _contests(list(contests(results)))
    yield from _runs(found)
    for each in found.values():
        yield from _section(folder, each)
    yield from _not_shown(found)


_TARGET_HEADS = ("target", "measured", "target", "ratio", "", "read from")


def _targets(checked: list[Checked]) -> Iterator[str]:
    yield from ("## Targets", "")
    yield from markdown.table(_TARGET_HEADS, map(_target_cells, checked))


def _target_cells(each: Checked) -> tuple[str, ...]:
    target = each.target
    bound = "at least" if target.at_least else "at most"
    return (
        target.what,
        markdown.short(each.measured),
        f"{bound} {markdown.short(target.limit)} {target.unit}".strip(),
        markdown.short(each.ratio),
        each.verdict,
        f"{target.source}: {target.read_from}",
    )


# Against the others


def _contests(each_contest: list[Contest]) -> Iterator[str]:
    yield from ("## Where kvgate is ahead of every other router, and where not", "")
    if not each_contest:
        yield from ("No other router was measured: run `make bench-compare`.", "")
        return
    rows = [
        (
            each.workload,
            each.figure.heading,
            each.figure.form.format(each.ours),
            f"{each.figure.form.format(each.theirs)} ({each.best})",
            "ahead" if each.ahead else "NOT AHEAD",
        )
        for each in each_contest
    ]
    yield from markdown.table(("workload", "figure", "kvgate", "best other", ""), rows)
    behind = [each for each in each_contest if not each.ahead]
    best = Counter(KVGATE if each.ahead else each.best for each in each_contest)
    counts = ", ".join(f"{arm} {count}" for arm, count in best.most_common())
    yield from (f"Best in how many of {len(each_contest)}: {counts}.", "")
    for each in behind:
        yield f"- {each.workload}, {each.figure.heading}, behind {each.best}: {each.why}."
    yield ""


# What was run


def _runs(found: Mapping[str, Found]) -> Iterator[str]:
    yield from ("## Runs", "")
    measured = [each for each in found.values() if not each.missing]
    machines: dict[str, list[str]] = {}
    for each in measured:
        machines.setdefault(_machine(each.result), []).append(each.source.name)
    for machine, names in machines.items():
        yield f"- {machine}" + (f" ({', '.join(names)})" if len(machines) > 1 else "")
    yield ""
    rows = [
        (
            each.source.name,
            each.date,
            _commit(each.result),
            markdown.figure(_seed(each.result), "{}"),
            ", ".join(map(str, value(each.result, "machine.load_average") or ())),
            f"`{value(each.result, 'machine.command') or each.source.target}`",
        )
        for each in measured
    ]
    heads = ("benchmark", "date (UTC)", "commit", "seed", "load average at the end", "command")
    yield from markdown.table(heads, rows)


def _machine(result: Json) -> str:
    machine = value(result, "machine") or {}
    packages = ", ".join(f"{name} {told}" for name, told in machine.get("packages", {}).items())
    return (
        f"{machine.get('cpu', 'unknown CPU')}, {machine.get('usable_cores', '?')} cores, "
        f"kernel {machine.get('kernel', '?')}, Python {machine.get('python', '?')}, {packages}"
    )


def _commit(result: Json) -> str:
    commit, plus, changes = str(value(result, "machine.commit") or "unknown").partition("+")
    return f"{commit[:12]}{plus}{changes}"


def _seed(result: Json) -> object:
    paths = ("seed", "settings.seed", "settings.arms.seed", "model.seed")
    return next((told for path in paths if (told := value(result, path)) is not None), None)


# One benchmark


def _section(folder: Path, found: Found) -> Iterator[str]:
    source = found.source
    yield from (f"## {source.name}", "", source.question, "")
    if found.missing:
        yield from (found.missing, "")
        return
    yield from tables(found.result, LAYOUTS[source.name])
    if source.name == COMPARISON:
        yield from _arms(found.result)
    subfolder = (folder / source.file).parent
    if subfolder != folder:
        yield from markdown.images(subfolder, folder)


def _arms(result: Json) -> Iterator[str]:
    """How each arm was started, which could not be, and which came to no end."""
    yield from ("<details><summary>Configuration of every arm</summary>", "")
    for name, version, command in configurations(result):
        told = " ".join(without_folders(word) for word in command)
        yield from (f"{name} {version}".strip(), "", "```", told, "```", "")
    yield from ("</details>", "")
    for name, why in (value(result, "skipped") or {}).items():
        yield from (f"{name} is missing: {without_folders(why)}", "")
    for (workload, name), rounds in find(result, "workloads[].arms[].rounds"):
        if not rounds:
            yield from (f"{name} finished no round of {workload}.", "")


# Limits


def _not_shown(found: Mapping[str, Found]) -> Iterator[str]:
    yield from ("## What this does not show", "")
    measured = [each for each in found.values() if not each.missing]
    for line in (*_NOT_SHOWN, *_doubts(measured)):
        yield f"- {line}"


def _doubts(measured: list[Found]) -> Iterator[str]:
    """What of these very runs is less than it should be."""
    busy = [each.source.name for each in measured if _busy(each.result)]
    if busy:
        names = ", ".join(busy)
        yield f"More wanted to run than there are cores, the benchmark itself included: {names}."
    commits = {str(value(each.result, "machine.commit")) for each in measured}
    if len(commits) > 1:
        yield f"The runs are of {len(commits)} states of the code."
    once = [each.source.name for each in measured if value(each.result, "settings.rounds") == 1]
    if once:
        yield f"One round only, so no spread: {', '.join(once)}."


def _busy(result: Json) -> bool:
    """Whether more wanted to run over the last quarter of an hour than there were cores."""
    load, cores = value(result, "machine.load_average"), value(result, "machine.usable_cores")
    return bool(load and cores) and load[-1] > cores
