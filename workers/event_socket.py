"""``EventSocket``: the agent's end of the Unix socket that the engine's middleware writes to.

It owns the socket file: replaces a stale one, makes its own again if somebody removes it,
and takes it away at the end. What arrives is folded into a ``RequestTable`` and handed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from workers.request_events import MAX_DATAGRAM_BYTES, Event
from workers.request_table import Counts, RequestTable, Window

CHECK_S = 2.0
"""How often the socket file is looked for and silent processes are given up."""
_READS_A_TURN = 256
"""Datagrams read before other tasks get their turn."""

log = logging.getLogger("kvgate.agent")


class EventSocket:
    """An async context manager, open while it is entered.

    ``on_event`` gets each event as it arrives, once.

    Raises:
        OSError: on entering; the path is taken by a live agent or by another kind of
            file, too long, or in a folder that does not exist or may not be written.
    """

    def __init__(
        self,
        path: Path | str,
        on_event: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        mode: int = 0o600,
    ) -> None:
        self._path = Path(path)
        self._on_event = on_event
        self._clock = clock
        self._mode = mode
        self._table = RequestTable()
        self._socket: socket.socket | None = None
        self._file: tuple[int, int] | None = None
        self._check: asyncio.TimerHandle | None = None

    @property
    def counts(self) -> Counts:
        """Totals since the start, for metrics."""
        return self._table.counts

    @property
    def in_flight(self) -> int:
        """Requests in the engine, with a lease or without."""
        return self._table.in_flight

    @property
    def instances(self) -> tuple[str, ...]:
        """API server processes whose middleware is heard; none = no middleware."""
        return self._table.instances

    def in_flight_leases(self) -> list[str]:
        """Lease ids of the requests in the engine."""
        return self._table.in_flight_leases()

    def take_window(self) -> Window:
        """What happened since the last call; for one caller."""
        return self._table.take_window()

    def drop_instance(self, instance: str) -> list[str]:
        """A process is known to be dead; the leases that were in flight there."""
        return self._table.drop_instance(instance)

    def drop_all(self) -> list[str]:
        """The engine is known to be dead; the leases that were in flight."""
        return self._table.drop_all()

    async def __aenter__(self) -> Self:
        self._open()
        self._wait_for_check()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._check is not None:
            self._check.cancel()
        self._close()

    def _open(self) -> None:
        _remove_stale(self._path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.setblocking(False)
            # Before it has a name, so that nobody else can ever connect.
            os.fchmod(bound.fileno(), self._mode)
            bound.bind(str(self._path))
        except OSError:
            bound.close()
            raise
        self._socket = bound
        self._file = _identity(self._path)
        asyncio.get_running_loop().add_reader(bound, self._read)

    def _close(self) -> None:
        bound, self._socket = self._socket, None
        if bound is None:
            return
        asyncio.get_running_loop().remove_reader(bound)
        if _identity(self._path) == self._file:
            with contextlib.suppress(OSError):
                self._path.unlink()
        bound.close()

    def _read(self) -> None:
        for _ in range(_READS_A_TURN):
            bound = self._socket
            if bound is None:
                return
            try:
                # One more byte than any of ours has: what is cut does not decode.
                datagram = bound.recv(MAX_DATAGRAM_BYTES + 1)
            except OSError:
                return
            event = self._table.take(datagram, self._clock())
            if event is not None:
                self._on_event(event)

    def _wait_for_check(self) -> None:
        self._check = asyncio.get_running_loop().call_later(CHECK_S, self.check)

    def check(self) -> None:
        """Make the socket again if its file is gone; give up processes that fell silent."""
        self._wait_for_check()
        self._table.expire(self._clock())
        if self._socket is not None and _identity(self._path) == self._file:
            return
        log.warning("socket for the middleware is gone: making it again")
        self._close()
        # Until the processes find the new one, nothing is known of their requests.
        self._table.drop_all()
        try:
            self._open()
        except OSError as error:
            log.error("socket for the middleware: %s", error.strerror)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens on."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise FileExistsError(errno.EEXIST, "is there and no socket", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another agent listens", str(path))
