"""What happens to the workers during a simulation: a YAML list, validated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from benchmarks.workloads.plan import PlanError


class Trouble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One event.

    ``kill``: the worker dies with what runs on it, and comes back empty after ``seconds``.
    ``freeze``: its engine stands still for ``seconds``. ``roll``: every worker in turn drains for
    at most ``seconds``, restarts in ``restart_s`` and is ready before the next one goes.
    ``add``: ``count`` new workers come.
    """

    at_s: Annotated[float, msgspec.Meta(ge=0)]
    action: Literal["kill", "freeze", "roll", "add"]
    worker: Annotated[int, msgspec.Meta(ge=0)] = 0
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    restart_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


def read_script(path: Path) -> tuple[Trouble, ...]:
    """Events of a YAML file.

    Raises:
        PlanError: it cannot be read or is wrong.
    """
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=tuple[Trouble, ...])
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise PlanError(f"{path}: {error}") from error
