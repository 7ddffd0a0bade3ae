"""Everything one simulated worker can be told, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from workers.simulator.config import EngineConfig
from workers.simulator.timing import RTX_PRO_6000, StepTimes


@dataclass(frozen=True)
class SimulatorSettings:
    """Settings of one worker; sizes are named as vLLM's flags.

    Args:
        adapters: names that ``model`` may carry beside ``model_name``.
        port: HTTP; 0 takes a free one.
        kv_events_port: ZMQ PUB; None publishes nothing, 0 takes a free port.
        kv_replay_port: ZMQ ROUTER for missed batches; None for none.
        kv_events_topic: ZMQ topic; vLLM's default is the empty string.
        speedup: divides all step times.
        hold_headers: send response headers with the first chunk, as kvgate's middleware
            does; False sends them at once, as plain vLLM does.
        cache_segments: tokenise as kvgate does, segment by segment, for load tests.
        stream_interval: tokens in a streamed chunk after the first.
        max_queued: requests running and waiting before a 503; None for no limit.
        seed: seed of the block hashes; workers with different seeds share no hash.
        socket: Unix socket of the agent, told of requests as kvgate's middleware does;
            None tells nobody.
        shutdown_s: how long requests in flight may finish after SIGTERM.
    """

    model_dir: Path
    model_name: str
    adapters: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8001
    kv_events_port: int | None = None
    kv_replay_port: int | None = None
    kv_events_topic: str = ""
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32768
    speedup: float = 1.0
    hold_headers: bool = True
    cache_segments: bool = False
    stream_interval: int = 1
    max_queued: int | None = None
    seed: int = 0
    socket: Path | None = None
    shutdown_s: float = 0.5
    timing: StepTimes = RTX_PRO_6000

    def __post_init__(self) -> None:
        for name in ("port", "kv_events_port", "kv_replay_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ValueError(f"{name} must be 0 to 65535, got {port}")
        if not self.model_name:
            raise ValueError("model_name must not be empty")
        if self.model_name in self.adapters or len(set(self.adapters)) < len(self.adapters):
            raise ValueError(f"adapters must be distinct names, got {self.adapters}")
        if self.max_queued is not None and self.max_queued < 1:
            raise ValueError(f"max_queued must be positive, got {self.max_queued}")
        if self.stream_interval < 1:
            raise ValueError(f"stream_interval must be positive, got {self.stream_interval}")
        if self.shutdown_s < 0:
            raise ValueError(f"shutdown_s must not be negative, got {self.shutdown_s}")
        if self.kv_replay_port is not None and self.kv_events_port is None:
            raise ValueError("kv_replay_port needs kv_events_port")
        self.engine_config()  # a wrong size fails here and not at the first request

    def engine_config(self) -> EngineConfig:
        """The part that the engine core takes."""
        shared = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        values["timing"] = replace(self.timing, speedup=self.timing.speedup * self.speedup)
        return EngineConfig(record_events=self.kv_events_port is not None, **values)

    def adapter_id(self, model: str) -> int | None:
        """vLLM numbers adapters from 1; None for the base model."""
        return self.adapters.index(model) + 1 if model in self.adapters else None
