"""Processes of a benchmark: started on a core of their own, waited for, always stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
_START_S = 30.0
_STOP_S = 5.0
_PR_SET_PDEATHSIG = 1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class RigFailure(Exception):
    """A process did not come up or ended on its own; the message holds its log."""


@dataclass(frozen=True)
class Usage:
    """What a process has used since it began."""

    cpu_s: float
    switches: int

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(self.cpu_s - earlier.cpu_s, self.switches - earlier.switches)


class Running:
    """A started process with its log."""

    def __init__(
        self, name: str, command: Sequence[str], process: subprocess.Popen[str], log: Path
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.process = process
        self._log = log

    def usage(self) -> Usage:
        """CPU time (user and system, all threads) and context switches so far."""
        proc = Path("/proc", str(self.process.pid))
        fields = (proc / "stat").read_text().rpartition(") ")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return Usage(ticks / _TICKS_PER_S, sum(map(_switches, proc.glob("task/*/status"))))

    def peak_bytes(self) -> int:
        """Most memory that it has held so far."""
        status = Path("/proc", str(self.process.pid), "status").read_text()
        [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peak.split()[1]) * 1024

    def wait_for_port(self, port: int, limit_s: float = _START_S) -> None:
        """Return when something accepts on the port.

        Raises:
            RigFailure: the process ended, or took too long.
        """
        deadline = time.monotonic() + limit_s
        while not _accepts(port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self.failure(f"does not listen on {port}")
            time.sleep(0.02)

    def ask(self, line: str) -> str:
        """Send a line to its standard input; the line that it answers.

        Raises:
            RigFailure: it ended instead.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("is gone") from None
        answer = self.process.stdout.readline()
        if not answer:
            raise self.failure("said nothing")
        return answer.rstrip("\n")

    def failure(self, what: str) -> RigFailure:
        """An error that shows the end of its log."""
        return RigFailure(f"{self.name} {what}\n{self._log.read_text()[-4_000:]}")


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    folder: Path,
    core: int | None = None,
    *,
    talks: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start a process, on one core if given; stop it whatever happens.

    ``environment`` is added to ours.

    What it says goes to a log in ``folder``, but for the answers of one that ``talks``: its
    standard input and output are for ``ask``.
    """
    log = folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else said,
            stderr=said,
            text=True,
            env={**os.environ, **(environment or {})},
            preexec_fn=_before_exec(core),
        )
        try:
            yield Running(name, command, process, log)
        finally:
            _stop(process)


def cores() -> tuple[int, int] | tuple[None, None]:
    """One core for what is measured and one for the load; none where there are not two."""
    usable = sorted(os.sched_getaffinity(0))
    return (usable[0], usable[1]) if len(usable) > 1 else (None, None)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on just now."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in held]


def _before_exec(core: int | None) -> Callable[[], None]:
    """What the child does between fork and exec: pin itself, and die with its parent."""

    def prepare() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare


def _stop(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(BrokenPipeError):
        if process.stdin is not None:
            process.stdin.close()
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _switches(status: Path) -> int:
    """Context switches of one thread; 0 if it has just ended."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.rpartition("\t")[2]) for line in lines if "ctxt_switches" in line)
