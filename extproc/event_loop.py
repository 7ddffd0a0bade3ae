"""How the scheduler and the agents run: on uvloop, and without preempting anybody."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a process's main coroutine to its end. Call it before anything starts a thread.

    gRPC has threads of its own for sockets. Woken by each message, they would interrupt the
    loop's thread in the middle of a decision, some 50 times a request: as a batch process
    (Linux's ``SCHED_BATCH``) they wait until it pauses, and then take all that has come. An
    agent does not interrupt the engine beside it either. Where that is not allowed, or there
    is no such thing, nothing is different.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return uvloop.run(main)
