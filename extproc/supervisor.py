"""Child processes in stages: start, check, watch, restart, stop in reverse.

Every child leads a process group of its own, so that Ctrl-C reaches only the supervisor, and
the kernel kills it when the supervisor is gone, however it went. Its lines are passed on
under its name, and the last ones are kept for the day it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from extproc.errors import KvgateError

LAST_LINES = 15
LONGEST_LINE_BYTES = 1024 * 1024
CHECK_INTERVAL_S = 0.1
CHECK_TIMEOUT_S = 3.0
PR_SET_PDEATHSIG = 1

OnLine = Callable[[str, str], None]
"""Gets a child's name and one of its lines."""


class StartFailed(KvgateError):
    """The children did not all come up; the message says which and why."""


@dataclass(frozen=True)
class Program:
    """One child process."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """Something that must answer: ``http://`` with 200, ``tcp://`` by accepting."""

    name: str
    url: str


@dataclass(frozen=True)
class Stage:
    """Programs that start together; the next stage starts when all checks have passed."""

    programs: tuple[Program, ...]
    checks: tuple[Check, ...]
    drain: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Awaited before the stage's programs are told to stop."""


@dataclass(frozen=True)
class Times:
    """Deadlines of the supervisor, in seconds."""

    start_s: float = 60.0
    """For all stages together."""
    grace_s: float = 5.0
    """Between SIGTERM and SIGKILL, for each stage."""
    restart_s: float = 1.0
    """Before a child that died is started again."""


class Child:
    """A running program."""

    def __init__(self, program: Program, process: Process, on_line: OnLine) -> None:
        self.program = program
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = process
        self._on_line = on_line

    @classmethod
    async def start(cls, program: Program, on_line: OnLine) -> Child:
        """Start it.

        Raises:
            StartFailed: the command cannot be run.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *program.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                limit=LONGEST_LINE_BYTES,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise StartFailed(f"{program.name}: {error}") from error
        return cls(program, process, on_line)

    async def ended(self) -> int:
        """Pass its lines on until it ends; the return code, negative for a signal."""
        assert self._process.stdout is not None  # noqa: S101 - PIPE was asked for
        async for line in _lines(self._process.stdout):
            self.last_lines.append(line)
            self._on_line(self.program.name, line)
        return await self._process.wait()

    def ask_to_stop(self) -> None:
        """SIGTERM; nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to it and whatever it started; nothing if all of it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Supervisor:
    """Runs stages of programs until told to stop."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        on_line: OnLine,
        on_ready: Callable[[], None],
        times: Times,
    ) -> None:
        self._stages = stages
        self._on_line = on_line
        self._on_ready = on_ready
        self._times = times
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._unchecked: set[str] = set()
        self._ready = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: asyncio.Future[StartFailed] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Start everything, keep it running, stop it after SIGINT or SIGTERM.

        Raises:
            StartFailed: a child died before all were ready, or a check never passed.
        """
        with _signals(self.stop):
            try:
                if await self._started():
                    self._ready = True
                    self._on_ready()
                    await self._stop.wait()
            finally:
                self._stop.set()
                await self._stop_all()

    def stop(self) -> None:
        """Stop everything in order; asked a second time, at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _started(self) -> bool:
        """True when all is ready, False if told to stop before that."""
        start = asyncio.ensure_future(self._start_stages())
        stop = asyncio.ensure_future(self._stop.wait())
        first = (start, stop, self._failure)
        limit = self._times.start_s
        try:
            done, _ = await asyncio.wait(first, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(start, stop)
        if self._failure in done:
            raise self._failure.result()
        if not done:
            raise StartFailed(f"not ready after {limit:g} s: {', '.join(sorted(self._unchecked))}")
        return start in done

    async def _start_stages(self) -> None:
        async with aiohttp.ClientSession() as session:
            for stage in self._stages:
                for program in stage.programs:
                    self._keepers[program.name] = asyncio.create_task(self._keep(program))
                self._unchecked = {check.name for check in stage.checks}
                await asyncio.gather(*(self._pass(check, session) for check in stage.checks))

    async def _pass(self, check: Check, session: aiohttp.ClientSession) -> None:
        while not await _passes(check, session):  # noqa: ASYNC110 - another process makes it so
            await asyncio.sleep(CHECK_INTERVAL_S)
        self._unchecked.discard(check.name)

    async def _keep(self, program: Program) -> None:
        """Run a program, and again whenever it ends, until told to stop."""
        while not self._stop.is_set():
            try:
                child = await Child.start(program, self._on_line)
            except StartFailed as error:
                self._fail(error)
                return
            self._children[program.name] = child
            how = _how(await child.ended())
            child.kill()  # what it may have left behind
            if self._stop.is_set():
                return
            if not self._ready:
                said = "".join(f"\n  {line}" for line in child.last_lines)
                self._fail(StartFailed(f"{program.name} {how} during start{said}"))
                return
            self._on_line(program.name, f"{how}; starts again in {self._times.restart_s:g} s")
            await _first(self._stop.wait(), within_s=self._times.restart_s)

    def _fail(self, error: StartFailed) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    async def _stop_all(self) -> None:
        for stage in reversed(self._stages):
            await self._stop_stage(stage)

    async def _stop_stage(self, stage: Stage) -> None:
        names = [each.name for each in stage.programs if each.name in self._keepers]
        keepers = [self._keepers[name] for name in names]
        if stage.drain is not None and self._ready:
            await _first(stage.drain(), self._hurry.wait(), within_s=self._times.grace_s)
        for child in self._running(names):
            child.ask_to_stop()
        await _first(_all(keepers), self._hurry.wait(), within_s=self._times.grace_s)
        for child in self._running(names):
            child.kill()
        await _all(keepers)

    def _running(self, names: Sequence[str]) -> list[Child]:
        return [
            self._children[name]
            for name in names
            if name in self._children and not self._keepers[name].done()
        ]


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _die_with_parent() -> None:
    """Runs in the child between fork and exec; execve keeps what it sets."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            yield f"(a line over {LONGEST_LINE_BYTES} bytes)"
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _first(*work: Coroutine[Any, Any, object], within_s: float) -> None:
    """Await until one of these is done or the time is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancelled(*tasks)


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Await tasks without cancelling them when this is cancelled."""
    if tasks:
        await asyncio.wait(tasks)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _passes(check: Check, session: aiohttp.ClientSession) -> bool:
    url = urlsplit(check.url)
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            if url.scheme == "tcp":
                _, writer = await asyncio.open_connection(url.hostname, url.port)
                writer.close()
                return True
            async with session.get(check.url) as answer:
                return answer.status == 200
    except (OSError, TimeoutError, aiohttp.ClientError):
        return False
