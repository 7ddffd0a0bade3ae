"""``kvgate up``: the whole system on loopback, for trying it and for demonstrations.

Real Envoy, the scheduler, simulated workers with an agent each. What it writes (model,
policy, Envoy configuration, logs) goes to one state directory; a worker or the scheduler
may be killed to see what happens, and is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shlex
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import yaml
from rich.console import Console
from rich.text import Text

from extproc.envoy_config import BodyMode, EnvoySettings, envoy_binary, write
from extproc.errors import KvgateError
from extproc.policy import Policy, PoolPolicy, load_policy
from extproc.supervisor import Check, Program, Stage, StartFailed, Supervisor, Times
from workers.simulator.model import make_model_dir

HOST = "127.0.0.1"
SETTINGS_ERROR = 2
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
NAME_WIDTH = 10
DRAIN_POLL_S = 0.1


class UpError(KvgateError):
    """Nothing was started; the message is one line that says what to change."""


@dataclass(frozen=True)
class UpSettings:
    """What ``kvgate up`` starts; all of it listens on 127.0.0.1."""

    workers: int = 3
    envoy_port: int = 10_000
    envoy_admin_port: int = 9_901
    extproc_port: int = 9_002
    control_port: int = 9_003
    admin_port: int = 9_090
    worker_port: int = 8_001
    """Port of the first worker; the others follow, likewise below."""
    kv_events_port: int = 5_557
    kv_replay_port: int = 5_657
    model: str = "sim-8b"
    speedup: float = 1.0
    """Divides every step time of the simulated workers."""
    max_running: int = 32
    """Sequences that a worker runs at once."""
    state_dir: Path = Path(".kvgate")
    body_mode: BodyMode = "full_duplex"
    policy: Path | None = None
    """None: one pool with the simulated model, written to the state directory."""
    times: Times = Times()


@dataclass(frozen=True)
class Port:
    """A port that something wants, and the flag that moves it."""

    number: int
    owner: str
    flag: str


def up(settings: UpSettings) -> int:
    """Run the system until Ctrl-C or SIGTERM.

    Returns:
        0 after a clean stop, 1 if a part did not come up, 2 if the settings cannot work.
    """
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        check_ports(wanted_ports(settings))
        stages = _prepare(settings, err)
    except KvgateError as error:
        err.print(f"kvgate up: {error}", style="red", markup=False, soft_wrap=True)
        return SETTINGS_ERROR
    try:
        asyncio.run(_run(settings, stages, out, err))
    except StartFailed as error:
        err.print(f"kvgate up: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    out.print("kvgate stopped")
    return 0


async def _run(settings: UpSettings, stages: list[Stage], out: Console, err: Console) -> None:
    with contextlib.closing(_Log(settings.state_dir / "logs", err)) as log:
        supervisor = Supervisor(
            stages,
            on_line=log.line,
            on_ready=lambda: out.print(_welcome(settings), markup=False, soft_wrap=True),
            times=settings.times,
        )
        await supervisor.run()


class _Log:
    """Lines of all children: to the terminal under their names, and to a file each."""

    def __init__(self, folder: Path, console: Console) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._console = console
        self._stack = contextlib.ExitStack()
        self._files: dict[str, tuple[str, object]] = {}

    def line(self, name: str, text: str) -> None:
        """Show and keep one line."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files."""
        self._stack.close()


# Before anything starts


def wanted_ports(settings: UpSettings) -> list[Port]:
    """Every port that the system will listen on."""
    ports = [
        Port(settings.envoy_port, "Envoy", "--envoy-port"),
        Port(settings.envoy_admin_port, "Envoy's admin page", "--envoy-admin-port"),
        Port(settings.extproc_port, "the external processor", "--extproc-port"),
        Port(settings.control_port, "the scheduler's agent port", "--control-port"),
        Port(settings.admin_port, "the scheduler's admin server", "--admin-port"),
    ]
    for index in range(settings.workers):
        name = f"worker-{index + 1}"
        ports += [
            Port(settings.worker_port + index, name, "--worker-port"),
            Port(settings.kv_events_port + index, f"{name}'s KV events", "--kv-events-port"),
            Port(settings.kv_replay_port + index, f"{name}'s KV replay", "--kv-replay-port"),
        ]
    return ports


def check_ports(ports: list[Port]) -> None:
    """Find the first port that cannot be had.

    Raises:
        UpError: it is taken, wanted twice or no port; names its owner and flag.
    """
    owners: dict[int, str] = {}
    for port in ports:
        problem = _problem(port, owners)
        if problem:
            raise UpError(f"port {port.number} {problem}; {port.owner} wants it, "
                          f"{port.flag} moves it")
        owners[port.number] = port.owner


def _problem(port: Port, owners: dict[int, str]) -> str:
    if port.number in owners:
        return f"is also for {owners[port.number]}"
    if not 0 < port.number < 65_536:
        return "does not exist"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port.number))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return "is taken" if taken else f"cannot be used ({error.strerror})"
    return ""


def _prepare(settings: UpSettings, console: Console) -> list[Stage]:
    """Model, policy and Envoy configuration on disk; what to start with them."""
    if settings.workers < 1:
        raise UpError("--workers must be at least 1")
    envoy_binary()
    state = settings.state_dir.resolve()
    policy_path = settings.policy or state / "policy.yaml"
    if settings.policy is None:
        _write_policy(policy_path, settings.model)
    policy = load_policy(policy_path)
    model_dir = _pool(policy, settings.model, policy_path).tokenizer or state / "model"
    if not model_dir.exists():
        with console.status("making the simulated model's tokenizer (a few seconds, once)"):
            make_model_dir(model_dir)
    envoy_yaml = state / "envoy.yaml"
    write(_envoy_settings(settings, policy), envoy_yaml)
    return _stages(settings, policy_path, model_dir, envoy_yaml)
