"""``Settings`` of the agent, from its command line.

Everything about the pool (keys, digest size, pace) comes from the schedulers; only what
the agent cannot learn from anybody is a flag. A secret comes by environment variable.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from extproc.policy import normal_address
from extproc.telemetry.logs import LOG_FORMATS, LogFormat

API_KEY_VARIABLE = "KVGATE_ENGINE_API_KEY"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent is told at start."""

    engine: str
    """Base URL of the vLLM server."""
    address: str
    """ip:port that Envoy reaches it at."""
    schedulers: tuple[str, ...]
    """host:port of each scheduler's control port."""
    kv_events: str = ""
    """ZMQ endpoint of the engine's KV events; without it digests stay empty."""
    kv_replay: str = ""
    """ZMQ endpoint that replays them; without it a lost event empties the digest."""
    max_running: int = 0
    """Sequences that the engine runs at once (--max-num-seqs); 0 = unknown."""
    api_key: str = field(default="", repr=False)
    """The engine's --api-key, which /v1/models asks for."""


def parse_settings(arguments: Sequence[str]) -> tuple[Settings, LogFormat]:
    """Command line to settings and log format; ends the process with 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        "python -m workers.agent",
        description="Report one vLLM worker's load and cache to kvgate's schedulers.",
        epilog=f"{API_KEY_VARIABLE} in the environment is the engine's --api-key.",
    )
    add = parser.add_argument
    add("--engine", required=True, metavar="URL", help="vLLM server, http://ip:port")
    add("--address", metavar="IP:PORT", help="what Envoy uses (default: from --engine)")
    add("--kv-events", default="", metavar="ENDPOINT", help="ZMQ, tcp://ip:port or ipc://path")
    add("--kv-replay", default="", metavar="ENDPOINT", help="ZMQ replay endpoint")
    add(
        "--scheduler",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="control port of a scheduler; once for each",
    )
    add("--max-running", type=int, default=0, metavar="N", help="engine's --max-num-seqs")
    add("--log-format", choices=LOG_FORMATS, default="text")
    options = parser.parse_args(arguments)
    try:
        settings = _settings_of(options)
    except ValueError as error:
        parser.error(str(error))
    return settings, options.log_format


def _settings_of(options: argparse.Namespace) -> Settings:
    url = urlsplit(options.engine)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ValueError(f"--engine {options.engine!r} is not http://ip:port")
    for endpoint in (options.kv_events, options.kv_replay):
        if endpoint and not endpoint.startswith(("tcp://", "ipc://")):
            raise ValueError(f"{endpoint!r} is not tcp://ip:port or ipc://path")
    if options.kv_replay and not options.kv_events:
        raise ValueError("--kv-replay needs --kv-events")
    if not 0 <= options.max_running < 2**32:
        raise ValueError(f"--max-running {options.max_running} is out of range")
    try:
        address = normal_address(options.address or url.netloc)
    except ValueError as error:
        raise ValueError(f"--address: {error}") from None
    return Settings(
        engine=options.engine,
        address=address,
        schedulers=tuple(dict.fromkeys(options.scheduler)),
        kv_events=options.kv_events,
        kv_replay=options.kv_replay,
        max_running=options.max_running,
        api_key=os.environ.get(API_KEY_VARIABLE, ""),
    )
