"""``kvgate up``: the whole system on loopback, for trying it and for demonstrations.

Real Envoy, the scheduler, simulated workers with an agent each. What it writes (model,
policy, Envoy configuration, logs) goes to one state directory; a worker or the scheduler
may be killed to see what happens, and is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TextIO

import aiohttp
import yaml
from rich.console import Console
from rich.text import Text

from extproc.envoy_config import BodyMode, EnvoySettings, envoy_binary, write
from extproc.errors import KvgateError
from extproc.policy import Policy, load_policy
from extproc.supervisor import Check, Program, Stage, StartFailed, Supervisor, Times
from workers.middleware import SOCKET_VARIABLE
from workers.simulator.model import make_model_dir
from workers.vllm_model import ADAPTERS, SIZES, make_vllm_model
from workers.vllm_server import BLOCK_TOKENS, ENVIRONMENT, UNSET, VllmServer

HOST = "127.0.0.1"
SETTINGS_ERROR = 2
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
NAME_WIDTH = 10
DRAIN_POLL_S = 0.1
MAX_SOCKET_PATH_BYTES = 107
# A base id of its own lets several Envoys share a machine.
ENVOY_OPTIONS = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning")


Engine = Literal["simulator", "vllm"]
ROOT = Path(__file__).parents[1]
# Two of vLLM's servers start in half a minute, the first time of all in two.
VLLM_START_S = 300.0
VLLM_SIZE = "tiny"
VLLM_BLOCKS = 2_048


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
    max_running: int = 8
    """Sequences that a worker runs at once: few, so that a handful of curls shows queueing."""
    engine: Engine = "simulator"
    vllm_python: Path = ROOT / ".venv-vllm" / "bin" / "python"
    """Interpreter of vLLM's environment, where ``engine`` is vllm."""
    state_dir: Path = Path(".kvgate")
    body_mode: BodyMode = "full_duplex"
    policy: Path | None = None
    """None: one pool with the simulated model, written to the state directory."""
    times: Times = field(default_factory=Times)


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
    except (KvgateError, OSError) as error:
        _complain(err, error)
        return SETTINGS_ERROR
    try:
        asyncio.run(_run(settings, stages, out, err))
    except StartFailed as error:
        _complain(err, error)
        return 1
    out.print("kvgate stopped")
    return 0


def _complain(console: Console, error: Exception) -> None:
    console.print(f"kvgate up: {error}", style="red", markup=False, soft_wrap=True)


async def _run(settings: UpSettings, stages: list[Stage], out: Console, err: Console) -> None:
    with contextlib.closing(_Log(settings.state_dir / "logs", err)) as log:
        supervisor = Supervisor(
            stages,
            on_line=log.line,
            on_ready=lambda: out.print(_welcome(settings), markup=False, soft_wrap=True),
            times=_times(settings),
        )
        await supervisor.run()


def _times(settings: UpSettings) -> Times:
    """vLLM takes its time to start."""
    times = settings.times
    return replace(times, start_s=VLLM_START_S) if settings.engine == "vllm" else times


class _Log:
    """Lines of all children: to the terminal under their names, and to a file each."""

    def __init__(self, folder: Path, console: Console) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._console = console
        self._files: dict[str, TextIO] = {}

    def line(self, name: str, text: str) -> None:
        """Show and keep one line."""
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.log").open("w", encoding="utf-8")
        self._files[name].write(f"{text}\n")
        self._files[name].flush()
        colour = COLOURS[list(self._files).index(name) % len(COLOURS)]
        shown = Text.assemble((name.ljust(NAME_WIDTH), colour), " ", Text.from_ansi(text))
        self._console.print(shown, soft_wrap=True)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _welcome(settings: UpSettings) -> str:
    """What to do now; the first line is for scripts too."""
    url = f"http://{HOST}:{settings.envoy_port}"
    return "\n".join(
        (
            f"kvgate is ready: {url}",
            "",
            "A chat with a long system prompt; the x-kvgate-* headers say where it went and why:",
            f"  {_curl(url, settings.model, 'What is in the list?')}",
            "Another question to the same prompt goes to the worker that has it cached:",
            f"  {_curl(url, settings.model, 'And what is not?')}",
            "What the scheduler counts:",
            f"  curl -s http://{HOST}:{settings.admin_port}/metrics | grep ^kvgate_",
            "",
            "Ctrl-C stops everything.",
        )
    )


def _curl(url: str, model: str, question: str) -> str:
    prompt = "You answer from this list. $(seq -s , 1000)"
    body = {
        "model": model,
        "max_tokens": 16,
        "messages": [
            {"role": "system", "content": prompt},
            {"role": "user", "content": question},
        ],
    }
    quoted = json.dumps(body).replace('"', '\\"')
    json_type = "-H 'content-type: application/json'"
    return f'curl -si {url}/v1/chat/completions {json_type} -d "{quoted}"'


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
            raise UpError(
                f"port {port.number} {problem}; {port.owner} wants it, {port.flag} moves it"
            )
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
    """Put model, policy and Envoy configuration on disk; what to start with them."""
    if settings.workers < 1:
        raise UpError(f"--workers {settings.workers} is not a positive number")
    longest = _socket(settings, settings.workers)
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
        raise UpError(f"{longest} is too long a path for a socket; --state-dir moves it")
    envoy = envoy_binary()
    state = settings.state_dir.resolve()
    own_model = state / ("vllm-model/tiny" if settings.engine == "vllm" else "model")
    if settings.engine == "vllm" and not settings.vllm_python.is_file():
        raise UpError(f"vLLM is not installed at {settings.vllm_python}: run make vllm")
    policy_path = settings.policy or _write_policy(settings, state, own_model)
    policy = load_policy(policy_path)
    model_dir = _tokenizer_of(policy, settings.model) or own_model
    if model_dir == own_model:
        with console.status("Making a small model (a few seconds, once)"):
            if settings.engine == "vllm":
                make_vllm_model(own_model, SIZES[VLLM_SIZE])
            else:
                make_model_dir(own_model)
    config = state / "envoy.yaml"
    write(_envoy_settings(settings, policy), config)
    return _stages(settings, policy_path, model_dir, (str(envoy), "-c", str(config)))


def _write_policy(settings: UpSettings, state: Path, model_dir: Path) -> Path:
    """One pool with our model; everything else as kvgate's defaults have it."""
    real = settings.engine == "vllm"
    pool = {
        "model": settings.model,
        "tokenizer": str(model_dir.relative_to(state)),
        "block_size_tokens": BLOCK_TOKENS if real else 16,
        "adapters": list(ADAPTERS) if real else [],
    }
    state.mkdir(parents=True, exist_ok=True)
    path = state / "policy.yaml"
    path.write_text(
        "# Made by `kvgate up` at each start; pass a file of your own by --policy.\n"
        + yaml.safe_dump({"pools": [pool]}, sort_keys=False),
        encoding="utf-8",
    )
    return path


def _tokenizer_of(policy: Policy, model: str) -> Path | None:
    """The tokenizer directory of the model's pool, so that both sides see the same tokens."""
    for pool in policy.pools:
        if model in pool.names:
            path = pool.tokenizer
            return path.parent if path is not None and path.is_file() else path
    served = ", ".join(name for pool in policy.pools for name in pool.names)
    raise UpError(f"the policy has no model {model!r} (it has {served}); --model picks one")


def _envoy_settings(settings: UpSettings, policy: Policy) -> EnvoySettings:
    held_s = max(pool.admission.max_queue_time_s for pool in policy.pools)
    ports = range(settings.worker_port, settings.worker_port + settings.workers)
    return EnvoySettings(
        workers=tuple(f"{HOST}:{port}" for port in ports),
        listen_port=settings.envoy_port,
        admin_port=settings.envoy_admin_port,
        processor_port=settings.extproc_port,
        body_mode=settings.body_mode,
        max_body_bytes=policy.requests.max_body_bytes,
        queue_time_s=held_s,
        stream_idle_timeout_s=max(EnvoySettings.stream_idle_timeout_s, held_s + 60),
    )


# What to start


def _stages(
    settings: UpSettings, policy: Path, model_dir: Path, envoy: tuple[str, ...]
) -> list[Stage]:
    """Workers and scheduler, then agents, then Envoy; they stop the other way round."""
    numbers = range(settings.workers)
    url = f"http://{HOST}:{settings.envoy_port}"
    return [
        Stage(
            programs=(
                _scheduler(settings, policy),
                *(_worker(settings, number, model_dir) for number in numbers),
            ),
            checks=(
                Check("the scheduler's agent port", f"tcp://{HOST}:{settings.control_port}"),
                *(
                    Check(f"worker-{number + 1}", f"{_engine(settings, number)}/health")
                    for number in numbers
                ),
            ),
        ),
        Stage(
            programs=tuple(_agent(settings, number) for number in numbers),
            checks=(Check("the scheduler", f"http://{HOST}:{settings.admin_port}/readyz"),),
        ),
        Stage(
            programs=(Program("envoy", (*envoy, *ENVOY_OPTIONS)),),
            checks=(Check("a request through Envoy", f"{url}/v1/models"),),
            drain=lambda: _drain_envoy(settings.envoy_admin_port),
        ),
    ]


def _scheduler(settings: UpSettings, policy: Path) -> Program:
    return _python(
        "scheduler",
        "extproc.cli",
        "serve",
        "--policy", policy,
        "--extproc-port", settings.extproc_port,
        "--control-port", settings.control_port,
        "--admin-port", settings.admin_port,
        "--access-log",
        "--log-format", "text",
    )  # fmt: skip


def _worker(settings: UpSettings, number: int, model_dir: Path) -> Program:
    if settings.engine == "vllm":
        return _vllm(settings, number, model_dir)
    return _python(
        f"worker-{number + 1}",
        "workers.simulator",
        "--model-dir", model_dir,
        "--model-name", settings.model,
        "--host", HOST,
        "--port", settings.worker_port + number,
        "--kv-events-port", settings.kv_events_port + number,
        "--kv-replay-port", settings.kv_replay_port + number,
        "--max-num-seqs", settings.max_running,
        "--speedup", settings.speedup,
        "--seed", number,
        "--socket", _socket(settings, number),
    )  # fmt: skip


def _vllm(settings: UpSettings, number: int, model_dir: Path) -> Program:
    server = VllmServer(
        python=settings.vllm_python,
        model_dir=model_dir,
        size=VLLM_SIZE,
        model_name=settings.model,
        host=HOST,
        port=settings.worker_port + number,
        kv_events_port=settings.kv_events_port + number,
        kv_replay_port=settings.kv_replay_port + number,
        blocks=VLLM_BLOCKS,
        max_num_seqs=settings.max_running,
    )
    given = {**ENVIRONMENT, SOCKET_VARIABLE: str(_socket(settings, number))}
    changes = [item for name in UNSET for item in ("-u", name)]
    changes += [f"{name}={value}" for name, value in given.items()]
    return Program(f"worker-{number + 1}", ("env", *changes, *server.command()))


def _socket(settings: UpSettings, number: int) -> Path:
    # As given: an absolute path may be too long for a socket.
    return settings.state_dir / f"worker-{number + 1}.sock"


def _agent(settings: UpSettings, number: int) -> Program:
    return _python(
        f"agent-{number + 1}",
        "workers.agent",
        "--engine", _engine(settings, number),
        "--kv-events", f"tcp://{HOST}:{settings.kv_events_port + number}",
        "--kv-replay", f"tcp://{HOST}:{settings.kv_replay_port + number}",
        "--scheduler", f"{HOST}:{settings.control_port}",
        "--max-running", settings.max_running,
        "--socket", _socket(settings, number),
    )  # fmt: skip


def _python(name: str, module: str, *arguments: object) -> Program:
    return Program(name, (sys.executable, "-m", module, *map(str, arguments)))


def _engine(settings: UpSettings, number: int) -> str:
    return f"http://{HOST}:{settings.worker_port + number}"


async def _drain_envoy(admin_port: int) -> None:
    """Close Envoy's listener and wait until no request is in flight."""
    base = f"http://{HOST}:{admin_port}"
    active = f"{base}/stats?filter=^http.llm.downstream_rq_active$"
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session:
            await session.post(f"{base}/drain_listeners")
            while True:
                async with session.get(active) as answer:
                    if (await answer.text()).endswith(": 0\n"):
                        return
                await asyncio.sleep(DRAIN_POLL_S)
