"""Traces as planned requests: Mooncake JSONL, Azure CSV, kvgate JSONL.

Mooncake's conversation trace has one timestamp every 3 s for ten requests; replayed as it is,
it sends clumps, and a router that reads load in between sees zeros. ``spread_s`` moves each
request by a uniform share of that gap (seeded).
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from benchmarks.workloads.plan import PlanError, Planned, Segment, numbered_lines, read_plan

MOONCAKE_BLOCK_TOKENS = 512
_AZURE_FIELDS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class _MooncakeRow(msgspec.Struct):
    """``timestamp`` in milliseconds; one hash id for each 512 tokens, the last may be partial."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int]


def read_trace(path: Path, *, spread_s: float = 0.0, seed: int = 0) -> list[Planned]:
    """Requests of a trace file in order of time; its kind is read from its content.

    Raises:
        PlanError: the file cannot be read, is of no known kind, or a line of it is wrong.
    """
    lines = numbered_lines(path)
    if not lines:
        raise PlanError(f"{path}: no requests")
    first = lines[0][1]
    if first.startswith(b"TIMESTAMP,"):
        requests = read_azure(path)
    elif b'"hash_ids"' in first:
        requests = read_mooncake(path)
    elif b'"at_s"' in first:
        requests = read_plan(path)
    else:
        raise PlanError(f"{path}: neither Mooncake JSONL, Azure CSV nor kvgate JSONL")
    return spread(requests, spread_s, seed)


def read_mooncake(path: Path) -> list[Planned]:
    """Mooncake JSONL; one user message a request.

    Raises:
        PlanError: a line is wrong, or has not one id for each 512 tokens begun.
    """
    decoder = msgspec.json.Decoder(_MooncakeRow)
    requests = []
    for number, line in numbered_lines(path):
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise PlanError(f"{path}:{number}: {error}") from error
        if len(row.hash_ids) != -(-row.input_length // MOONCAKE_BLOCK_TOKENS):
            raise PlanError(
                f"{path}:{number}: hash_ids: {len(row.hash_ids)} ids for "
                f"{row.input_length} tokens in blocks of {MOONCAKE_BLOCK_TOKENS}"
            )
        requests.append(Planned(row.timestamp / 1_000, _blocks(row), max(1, row.output_length)))
    return sorted(requests, key=lambda request: request.at_s)


def _blocks(row: _MooncakeRow) -> tuple[Segment, ...]:
    full = MOONCAKE_BLOCK_TOKENS
    last = row.input_length - full * (len(row.hash_ids) - 1)
    sizes = [full] * (len(row.hash_ids) - 1) + [last]
    return tuple(map(Segment, row.hash_ids, sizes))


def read_azure(path: Path) -> list[Planned]:
    """Azure's 2023 CSV: lengths and times only, so no two prompts share anything.

    Raises:
        PlanError: a line is wrong.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames != _AZURE_FIELDS:
            raise PlanError(f"{path}:1: columns {rows.fieldnames} are not {_AZURE_FIELDS}")
        parsed = [_azure_row(path, rows.line_num, row) for row in rows]
    if not parsed:
        raise PlanError(f"{path}: no requests")
    start = min(time for time, _, _ in parsed)
    requests = [
        Planned(
            (time - start).total_seconds(),
            (Segment(f"azure-{number}", max(1, prompt)),),
            max(1, output),
        )
        for number, (time, prompt, output) in enumerate(parsed)
    ]
    return sorted(requests, key=lambda request: request.at_s)


def _azure_row(path: Path, number: int, row: dict[str, str]) -> tuple[datetime, int, int]:
    try:
        time, prompt, output = (row[field] for field in _AZURE_FIELDS)
        return datetime.fromisoformat(time), int(prompt), int(output)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{path}:{number}: {error}") from error


def spread(requests: Sequence[Planned], spread_s: float, seed: int) -> list[Planned]:
    """Move each request later by a uniform time below ``spread_s``."""
    if not spread_s:
        return list(requests)
    rng = random.Random(f"spread {seed}")
    moved = [
        msgspec.structs.replace(request, at_s=request.at_s + rng.uniform(0.0, spread_s))
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.at_s)


def cut(
    requests: Sequence[Planned],
    *,
    skip: int = 0,
    limit: int | None = None,
    speedup: float = 1.0,
    max_prompt_tokens: int | None = None,
) -> list[Planned]:
    """Rows ``skip`` to ``skip + limit``, starting at 0 s, ``speedup`` times as fast.

    Longer prompts than ``max_prompt_tokens`` are left out: engines refuse them.
    """
    end = None if limit is None else skip + limit
    kept = [
        request
        for request in requests[skip:end]
        if max_prompt_tokens is None or request.prompt_tokens <= max_prompt_tokens
    ]
    start = kept[0].at_s if kept else 0.0
    return [
        msgspec.structs.replace(request, at_s=(request.at_s - start) / speedup) for request in kept
    ]
