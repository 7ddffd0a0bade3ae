"""``EventSender``: datagrams to the agent that never block and never raise.

The kernel keeps only ten datagrams for a reader that is busy (net.unix.max_dgram_qlen), so
a short backlog waits here until the socket is writable; beyond it datagrams are dropped
and counted. An agent that is not there is looked for at most once a second. Standard
library only, Python 3.10.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

MAX_BACKLOG = 4096
"""Datagrams that wait for a slow agent: at most about 1 MB."""
RETRY_S = 1.0


class EventSender:
    """A connection to the agent's socket, if there is one."""

    def __init__(self, path: str, clock: Callable[[], float], backlog: int = MAX_BACKLOG) -> None:
        self.dropped = 0
        """Datagrams that nobody will get."""
        self.lost = False
        """The agent that is connected missed a datagram; whoever tells it again clears this."""
        self._path = path
        self._clock = clock
        self._max_backlog = backlog
        self._socket: socket.socket | None = None
        self._retry_at_s = float("-inf")
        self._backlog: deque[bytes] = deque()
        self._watcher: asyncio.AbstractEventLoop | None = None

    @property
    def connected(self) -> bool:
        """False while there is no agent, as far as is known."""
        return self._socket is not None

    @property
    def backlogged(self) -> bool:
        """Datagrams wait until the agent has read others."""
        return bool(self._backlog)

    def connect(self) -> bool:
        """Look for the agent, unless that was done within the last second."""
        now_s = self._clock()
        if self._socket is not None or now_s < self._retry_at_s:
            return self._socket is not None
        self._retry_at_s = now_s + RETRY_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        connection.setblocking(False)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            return False
        self._socket = connection
        self.lost = False
        return True

    def send(self, datagram: bytes) -> None:
        """Send it now or a little later, or count it as dropped."""
        if self._socket is None:
            self.dropped += 1
        elif self._backlog or not self._write(self._socket, datagram):
            self._keep(self._socket, datagram)

    def close(self) -> None:
        """Forget the agent and what waits for it."""
        self.dropped += len(self._backlog)
        self._backlog.clear()
        self._stop_watching()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _write(self, connection: socket.socket, datagram: bytes) -> bool:
        """False if it must be tried again; a datagram for an agent that is gone is dropped."""
        try:
            connection.send(datagram)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.dropped += 1
            self.close()
        return True

    def _keep(self, connection: socket.socket, datagram: bytes) -> None:
        if len(self._backlog) >= self._max_backlog:
            self.dropped += 1
            self.lost = True
            return
        self._backlog.append(datagram)
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop()
            self._watcher.add_writer(connection, self._flush)

    def _flush(self) -> None:
        while self._backlog and self._socket is not None:
            datagram = self._backlog.popleft()
            if not self._write(self._socket, datagram):
                self._backlog.appendleft(datagram)
                return
        self._stop_watching()

    def _stop_watching(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and self._socket is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                watcher.remove_writer(self._socket)
