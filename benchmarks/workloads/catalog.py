"""Workloads by name and from YAML: ``kind`` and whatever differs from its defaults."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.workloads.contexts import LongShortMix, Retrieval, SharedPrompts
from benchmarks.workloads.conversations import Agents, Chats
from benchmarks.workloads.plan import PlanError
from benchmarks.workloads.tenants import Tenants

Workload = SharedPrompts | Chats | Agents | Retrieval | LongShortMix | Tenants

KINDS = ("shared", "chats", "agents", "rag", "mix", "tenants")


def workload(
    name: str,
    *,
    seed: int | None = None,
    rate_per_s: float | None = None,
    duration_s: float | None = None,
) -> Workload:
    """A kind with its defaults, or a YAML file's workload; what is given here wins.

    Raises:
        PlanError: no such kind or file, or a field is wrong.
    """
    fields = {"seed": seed, "rate_per_s": rate_per_s, "duration_s": duration_s}
    given = {field: value for field, value in fields.items() if value is not None}
    try:
        content = {"kind": name} if name in KINDS else msgspec.yaml.decode(Path(name).read_bytes())
        if not isinstance(content, dict):
            raise PlanError(f"{name}: not a workload")
        made: Workload = msgspec.convert({**content, **given}, Workload)
        return made
    except OSError as error:
        kinds = ", ".join(KINDS)
        raise PlanError(f"{name}: {error.strerror}; known workloads: {kinds}") from error
    except msgspec.MsgspecError as error:
        raise PlanError(f"{name}: {error}") from error
