"""A ZMQ relay between an engine's KV events and its agent that loses messages on purpose."""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Self

import zmq

POLL_MS = 50


class EventTap:
    """Passes events on from one port to another; ``loss`` is the share that it drops."""

    def __init__(self, source_port: int, port: int, seed: int) -> None:
        self.loss = 0.0
        self.passed = 0
        self.dropped = 0
        self._ports = (source_port, port)
        self._rng = random.Random(seed)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _relay(self) -> None:
        with (
            zmq.Context() as context,
            context.socket(zmq.SUB) as sub,
            context.socket(zmq.PUB) as pub,
        ):
            sub.setsockopt(zmq.RECONNECT_IVL, 100)
            sub.setsockopt(zmq.RCVHWM, 0)
            sub.subscribe(b"")
            sub.connect(f"tcp://127.0.0.1:{self._ports[0]}")
            pub.setsockopt(zmq.LINGER, 0)
            pub.bind(f"tcp://127.0.0.1:{self._ports[1]}")
            while not self._stopped.is_set():
                if sub.poll(POLL_MS):
                    self._pass_on(pub, sub.recv_multipart())

    def _pass_on(self, pub: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if self._rng.random() < self.loss:
            self.dropped += 1
        else:
            self.passed += 1
            pub.send_multipart(frames)
