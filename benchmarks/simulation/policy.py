"""Policies of simulated clusters: a benchmark's file without a tokenizer."""

from __future__ import annotations

from pathlib import Path

import yaml

from benchmarks.cluster import MODEL
from extproc.policy import Policy, parse_policy


def keyless_policy(path: Path) -> Policy:
    """The policy of an arm for keys that are made from the plan, not from text."""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    [pool] = content.get("pools") or [{}]
    return parse_policy({**content, "pools": [{**pool, "model": MODEL}]})
