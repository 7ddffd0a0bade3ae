"""What an engine's middleware tells, without a socket between."""

from __future__ import annotations

from typing import Any

from extproc.generated.kvgate.v1 import agent_pb2
from workers.agent.request_watch import RequestWatch
from workers.engine_errors import EngineError
from workers.request_events import Ended, Event, FirstChunk, Hello, Started, encode
from workers.request_table import RequestTable

INSTANCE = "0123456789abcdef"


class Told:
    """A watch over a real table, fed as the socket feeds it."""

    def __init__(self) -> None:
        self.outcomes: list[agent_pb2.Outcome] = []
        self.table = RequestTable()
        self.watch = RequestWatch(self.outcomes.append)
        self.watch.attach(self.table)

    def tell(self, event: Event, now_s: float = 0.0) -> None:
        if (news := self.table.take(encode(event), now_s)) is not None:
            self.watch.take(news)

    def hello(self, in_flight: int = 0, *, reset: bool = False, instance: str = INSTANCE) -> None:
        self.tell(Hello(instance, 7, reset, in_flight, 0))

    def start(self, number: int, lease: str | None, instance: str = INSTANCE) -> None:
        self.tell(Started(instance, number, lease, "chat", 1.0))

    def first_chunk(self, number: int, ttft_s: float) -> None:
        self.tell(FirstChunk(INSTANCE, number, ttft_s))

    def end(self, number: int, lease: str | None = None, **fields: Any) -> None:
        told = {
            "status": 200,
            "error": EngineError.NONE,
            "duration_s": 2.0,
            "ttft_s": None,
            "prompt_tokens": None,
            "output_tokens": None,
            "cached_tokens": None,
            "streamed": True,
            **fields,
        }
        self.tell(Ended(INSTANCE, number, lease, **told))
