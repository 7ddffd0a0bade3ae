"""Reference pages written from the code: the policy, metrics and refusals of ``docs/``.

A field's docstring, a metric's help text and a refusal's docstring are the only place where
they are explained.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from prometheus_client.metrics_core import Metric
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from extproc.errors import REFUSALS, Refusal
from extproc.policy import Policy, parse_policy
from extproc.replies import REASON, REFUSAL, refusal_headers
from extproc.scheduler import Scheduler
from extproc.server import build_keyer
from extproc.telemetry.metrics import Metrics

_NOTE = "<!-- Written by `make docs` from the code; edit the docstrings there. -->"
_EXAMPLE = """```yaml
version: 1
pools:
  - model: llama-3.1-8b
    tokenizer: /models/llama-3.1-8b        # directory or tokenizer.json
    block_size_tokens: 16                  # vLLM --block-size
    digest: {capacity_blocks: 131072}      # above the engine's number of KV blocks
    admission: {max_concurrency: 512, max_queue: 200, max_queue_time_s: 20}
```"""


def policy_reference() -> str:
    """The policy page in Markdown."""
    lines = [
        "# Policy reference",
        "",
        _NOTE,
        "",
        "One YAML file holds every number that steers decisions. Unknown fields are errors;",
        "`kvgate check FILE` says what is wrong and where. Paths start at the file's folder.",
        "",
        _EXAMPLE,
    ]
    for title, section in _sections(Policy, ""):
        lines += ["", f"## {title or 'Top level'}", ""]
        lines += [_one_line(section.__doc__), "", "| field | default | meaning |", "|---|---|---|"]
        lines += [_row(name, field) for name, field in section.model_fields.items()]
    return "\n".join(lines) + "\n"


def metrics_reference() -> str:
    """The metrics page in Markdown."""
    lines = [
        "# Metrics reference",
        "",
        _NOTE,
        "",
        "Served at `/metrics` on the admin port. Labels are bounded: `model` is a pool of the",
        "policy or `other`, `worker` an address in the fleet. `outcome` is `allowed`, `selected`",
        "(a worker without admission), `dry_run`, `client_gone` or a refusal's code.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric, labels in sorted(_metrics(), key=lambda pair: pair[0].name):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        shown = ", ".join(labels)
        lines.append(f"| `{name}` | {metric.type} | {shown} | {metric.documentation} |")
    return "\n".join(lines) + "\n"


def refusals_reference() -> str:
    """The refusals page in Markdown."""
    lines = [
        "# Refusals",
        "",
        _NOTE,
        "",
        "Every no of kvgate's, in OpenAI's error shape: `message`, `type`, `param` (the field or",
        f"header at fault, where there is one) and `code`. The code is also the header `{REFUSAL}`",
        "and the metric label `outcome`; Envoy's access log has it as `kvgate_<code>`. Where",
        f"admission refused, `{REASON}` names what was missing: `quota:<rule>` or",
        "`capacity:<pool>`. Retrying helps where the header says how long to wait first, in",
        "seconds and in milliseconds, from the measured drain rate; client libraries heed both,",
        "and `x-should-retry: false` as well. A client that then sends the same body again finds",
        "its place kept for two seconds and a quarter of that wait.",
        "",
        "| code | status | type | retry helps | headers | meaning |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_refusal_row, REFUSALS)]) + "\n"


def write_references(folder: Path) -> None:
    """Write all pages into a folder."""
    (folder / "refusals.md").write_text(refusals_reference(), encoding="utf-8")
    (folder / "policy.md").write_text(policy_reference(), encoding="utf-8")
    (folder / "metrics.md").write_text(metrics_reference(), encoding="utf-8")


def _sections(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """A section and those below it; each type once, where it is met first."""
    seen: set[type[BaseModel]] = set()

    def walk(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
        if section in seen:
            return
        seen.add(section)
        yield path, section
        for name, field in section.model_fields.items():
            for inner, marker in _inner(field.annotation):
                yield from walk(inner, f"{path}.{name}{marker}".lstrip("."))

    return walk(section, path)


def _inner(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """The sections in a field's type and how its path shows them: ``[]`` for a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
        return
    origin = get_origin(annotation)
    marker = "[]" if origin is tuple else ".*" if origin is dict else ""
    for argument in get_args(annotation):
        for inner, below in _inner(argument):
            yield inner, marker + below


def _row(name: str, field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    elif isinstance(field.default, BaseModel):
        default = "see below"
    elif field.default_factory is not None or field.default in (None, (), ""):
        default = "none"
    else:
        default = f"`{_yaml(field.default)}`"
    return f"| `{name}` | {default} | {_one_line(field.description)} |"


def _refusal_row(kind: type[Refusal]) -> str:
    headers = [
        f"`{name}`" if kind.retryable else f"`{name}: {value}`"
        for name, value in refusal_headers(kind(""))
        if name != REFUSAL
    ]
    meaning = _one_line(kind.__doc__).replace("``", "`")
    retry = "yes" if kind.retryable else "no"
    cells = (f"`{kind.code}`", kind.http_status, f"`{kind.error_type}`", retry)
    return f"| {' | '.join(map(str, cells))} | {', '.join(headers)} | {meaning} |"


def _yaml(value: Any) -> str:
    if isinstance(value, BaseModel):
        given = [name for name in type(value).model_fields if name in value.model_fields_set]
        return f"{{{', '.join(f'{name}: {_yaml(getattr(value, name))}' for name in given)}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _metrics() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Every metric with its labels, one of each name, from a scheduler with one worker."""
    policy = parse_policy({"pools": [{"model": "m", "workers": ["127.0.0.1:1"]}]})
    keyers = {pool.model: build_keyer(pool, policy) for pool in policy.pools}
    scheduler = Scheduler(policy, keyers, random.Random(0), 0.0)
    metrics = Metrics()
    labels = {
        metric._name: metric._labelnames
        for metric in vars(metrics).values()
        if hasattr(metric, "_labelnames")
    }
    metrics.watch(scheduler, lambda: 0.0)
    for metric in metrics.registry.collect():
        yield metric, tuple(labels.get(metric.name) or getattr(metric, "_labelnames", None) or ())
