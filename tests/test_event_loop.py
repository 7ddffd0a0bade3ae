"""Scheduler and agents run without preempting others, where that is allowed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest
import uvloop

from extproc import event_loop

SHOWN = """
import asyncio, os, threading
from extproc import event_loop
async def main():
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return {os.sched_getscheduler(0), *found}
assert event_loop.run(main()) == {os.SCHED_BATCH}
"""


def test_all_threads_are_batch_threads() -> None:
    subprocess.run([sys.executable, "-c", SHOWN], check=True)


def test_it_runs_where_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    async def main() -> tuple[asyncio.AbstractEventLoop, str]:
        return asyncio.get_running_loop(), threading.current_thread().name

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    loop, thread = event_loop.run(main())
    assert isinstance(loop, uvloop.Loop)
    assert thread == "MainThread"
    monkeypatch.delattr(os, "SCHED_BATCH")
    event_loop.run(main())
