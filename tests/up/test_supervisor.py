"""Stages of child processes, with small fake children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from extproc.supervisor import Check, Program, Stage, StartFailed, Supervisor, Times
from tests.support.envoy import free_ports

QUICK = Times(start_s=10, grace_s=0.5, restart_s=0.05)
TELL = "import os, sys; print('pid', os.getpid(), flush=True);"
SLEEP = TELL + "import time; time.sleep(60)"
STUBBORN = (
    TELL + "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "child = subprocess.Popen(['sleep', '60']); print('pid', child.pid, flush=True); child.wait()"
)


class Lines:
    """What the children said, and which processes they are."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    def add(self, name: str, line: str) -> None:
        self.all.append((name, line))

    def pids(self, name: str = "") -> list[int]:
        told = [line for who, line in self.all if line.startswith("pid ") and name in who]
        return [int(line.split()[1]) for line in told]

    async def has_pids(self, count: int) -> list[int]:
        async with asyncio.timeout(5):
            while len(self.pids()) < count:
                await asyncio.sleep(0.01)
        return self.pids()


def python(name: str, code: str) -> Program:
    return Program(name, (sys.executable, "-c", code))


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


async def all_gone(pids: list[int]) -> None:
    """A killed grandchild is gone soon, not at once: its new parent has to be told."""
    async with asyncio.timeout(5):
        while any(map(alive, pids)):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def supervised(
    *stages: Stage, times: Times = QUICK
) -> AsyncIterator[tuple[Supervisor, Lines]]:
    """A supervisor whose stages are ready; stopped afterwards unless the test did."""
    lines, ready = Lines(), asyncio.Event()
    supervisor = Supervisor(stages, on_line=lines.add, on_ready=ready.set, times=times)
    run = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(10):
            await ready.wait()
        yield supervisor, lines
    finally:
        supervisor.stop()
        await run


class TestStart:
    async def test_a_stage_starts_when_the_checks_before_it_have_passed(self) -> None:
        (port,) = free_ports(1)
        late = TELL + f"import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={port})"
        first = Stage((python("first", late),), (Check("web", f"http://127.0.0.1:{port}/"),))
        answering = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/');" + SLEEP
        second = Stage((python("second", answering),), (Check("tcp", f"tcp://127.0.0.1:{port}"),))
        async with supervised(first, second) as (_, lines):
            assert len(await lines.has_pids(2)) == 2

    async def test_a_child_that_dies_stops_the_rest_and_its_lines_are_told(self) -> None:
        lines = Lines()
        stage = Stage(
            (python("good", SLEEP), python("bad", "print('no model'); raise SystemExit(3)")),
            (Check("never", "tcp://127.0.0.1:1"),),
        )
        supervisor = Supervisor([stage], on_line=lines.add, on_ready=lambda: None, times=QUICK)
        with pytest.raises(StartFailed, match="bad ended with status 3 during start\n  no model"):
            await supervisor.run()
        assert not any(map(alive, lines.pids()))

    async def test_a_check_that_never_passes_is_named(self) -> None:
        stage = Stage((python("mute", SLEEP),), (Check("the web page", "http://127.0.0.1:1"),))
        supervisor = Supervisor(
            [stage], on_line=Lines().add, on_ready=lambda: None, times=Times(0.3, 0.5, 0.1)
        )
        with pytest.raises(StartFailed, match=r"not ready after 0\.3 s: the web page"):
            await supervisor.run()

    async def test_a_command_that_does_not_exist_is_named(self) -> None:
        stage = Stage(
            (Program("ghost", ("/nonexistent/ghost",)),), (Check("x", "tcp://127.0.0.1:1"),)
        )
        supervisor = Supervisor([stage], on_line=Lines().add, on_ready=lambda: None, times=QUICK)
        with pytest.raises(StartFailed, match=r"ghost: .*nonexistent"):
            await supervisor.run()

    async def test_a_signal_during_start_is_a_clean_stop(self) -> None:
        lines = Lines()
        stage = Stage((python("one", SLEEP),), (Check("never", "tcp://127.0.0.1:1"),))
        supervisor = Supervisor([stage], on_line=lines.add, on_ready=lambda: None, times=QUICK)
        run = asyncio.create_task(supervisor.run())
        (pid,) = await lines.has_pids(1)
        os.kill(os.getpid(), signal.SIGINT)
        await run
        assert not alive(pid)


class TestRun:
    async def test_a_killed_child_is_told_of_and_started_again(self) -> None:
        async with supervised(Stage((python("one", SLEEP),), ())) as (_, lines):
            (first,) = await lines.has_pids(1)
            os.kill(first, signal.SIGKILL)
            assert (await lines.has_pids(2))[1] != first
            assert ("one", "was killed by SIGKILL; starts again in 0.05 s") in lines.all

    async def test_a_very_long_line_does_not_end_the_reading(self) -> None:
        code = "print('x' * 3_000_000); print('pid 1', flush=True);" + SLEEP
        async with supervised(Stage((python("one", code),), ())) as (_, lines):
            await lines.has_pids(2)
            assert max(len(line) for _, line in lines.all) < 1_100_000


class TestStop:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    async def test_a_signal_stops_every_child(self, number: signal.Signals) -> None:
        stages = [Stage((python("one", SLEEP), python("two", SLEEP)), ())]
        async with supervised(*stages) as (_, lines):
            pids = await lines.has_pids(2)
            os.kill(os.getpid(), number)
        await all_gone(pids)

    async def test_stages_stop_in_reverse_each_after_its_drain(self) -> None:
        last_word = (
            "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')));"
        )
        drained: list[str] = []

        async def drain() -> None:
            drained.extend(line for _, line in lines.all)

        stages = (
            Stage((python("inner", last_word + SLEEP),), ()),
            Stage((python("outer", last_word + SLEEP),), (), drain),
        )
        async with supervised(*stages) as (_, lines):
            await lines.has_pids(2)
        assert [name for name, line in lines.all if line == "bye"] == ["outer", "inner"]
        assert drained
        assert "bye" not in drained

    async def test_a_stubborn_child_and_its_children_are_killed(self) -> None:
        async with supervised(Stage((python("mule", STUBBORN),), ())) as (_, lines):
            pids = await lines.has_pids(2)
        await all_gone(pids)

    async def test_a_second_signal_does_not_wait(self) -> None:
        patient = Times(start_s=10, grace_s=60, restart_s=1)
        async with supervised(Stage((python("mule", STUBBORN),), ()), times=patient) as (it, lines):
            pids = await lines.has_pids(2)
            it.stop()
            await asyncio.sleep(0.1)
            assert all(map(alive, pids))
        await all_gone(pids)

    @pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
    def test_children_die_with_a_supervisor_that_is_killed_hard(self) -> None:
        code = (
            "import asyncio, sys\n"
            "from extproc.supervisor import *\n"
            f"stages = [Stage((Program('one', (sys.executable, '-c', {SLEEP!r})),), ())]\n"
            "async def main():\n"
            "    show = lambda name, line: print(line, flush=True)\n"
            "    ready = lambda: None\n"
            "    await Supervisor(stages, on_line=show, on_ready=ready, times=Times()).run()\n"
            "asyncio.run(main())\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        ) as it:
            assert it.stdout is not None
            pid = int(it.stdout.readline().split()[1])
            assert alive(pid)
            it.kill()
            it.wait()
            deadline = 100
            while alive(pid) and deadline:
                deadline -= 1
                signal.sigtimedwait([], 0.02)
        assert not alive(pid)
