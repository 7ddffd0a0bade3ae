"""Other routers from PyPI as arms of a comparison, each in a virtual environment of its own.

Their best cache-aware settings are used, as their own documentation gives them; the command
line of each is part of the result.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.cluster import MODEL, Engine, Front
from benchmarks.rig import HOST, free_ports, running

PEERS_DIR = Path(".kvgate/peers")
_INSTALL_S = 900.0
_START_S = 180.0
"""LiteLLM compiles and imports for over half a minute the first time."""


class CannotInstall(Exception):
    """The package index, or this Python, does not have it; the message says what pip said."""


@dataclass(frozen=True)
class Start:
    """What a peer is started with."""

    bin: Path
    """Folder of its executables."""
    engines: Sequence[Engine]
    port: int
    metrics_port: int
    folder: Path
    model_dir: Path
    """Tokenizer and chat template, for a router that renders prompts."""


@dataclass(frozen=True)
class Package:
    """What is installed from PyPI: its name, and the requirement that pip is given.

    ``needs`` are installed in place of what the package itself asks for, if there are any.
    """

    package: str
    requirement: str
    needs: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Peer(Package):
    """A router from PyPI with one of its policies.

    ``{folder}`` in the environment stands for the run's folder. ``adapter`` is a process between
    router and workers.
    """

    policy: str
    command: Callable[[Start, str], tuple[str, ...]]
    environment: Mapping[str, str] = field(default_factory=dict)
    adapter: Callable[[Start], tuple[str, ...]] | None = None

    @property
    def name(self) -> str:
        """``package:policy``."""
        return f"{self.package}:{self.policy}"


def installed(peer: Package, peers_dir: Path = PEERS_DIR) -> Path:
    """Folder of its executables, after installing it once.

    Raises:
        CannotInstall: pip could not.
    """
    home = (peers_dir / peer.package).resolve()
    done = home / ".ready"
    if not done.exists():
        _checked((sys.executable, "-m", "venv", str(home)))
        pip = (str(home / "bin" / "python"), "-m", "pip", "install")
        quiet = (*pip, "--quiet", "--disable-pip-version-check")
        _checked((*quiet, *(("--no-deps",) if peer.needs else ()), peer.requirement))
        if peer.needs:
            _checked((*quiet, *peer.needs))
        done.touch()
    return home / "bin"


def version(peer: Package, peers_dir: Path = PEERS_DIR) -> str:
    """Installed version of its package."""
    python = (peers_dir / peer.package).resolve() / "bin" / "python"
    code = f"from importlib.metadata import version; print(version({peer.package!r}))"
    done = subprocess.run((str(python), "-c", code), capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


@contextmanager
def peer_front(
    peer: Peer,
    all_engines: list[Engine],
    model_dir: Path,
    folder: Path,
    peers_dir: Path = PEERS_DIR,
) -> Iterator[Front]:
    """A peer in front of the workers; its adapter is part of its cost.

    Raises:
        CannotInstall: see :func:`installed`.
    """
    port, metrics_port = free_ports(2)
    bin_dir = installed(peer, peers_dir)
    start = Start(bin_dir, all_engines, port, metrics_port, folder, model_dir.resolve())
    environment = {k: value.format(folder=folder) for k, value in peer.environment.items()}
    commands = {"peer": peer.command(start, peer.policy)}
    if peer.adapter is not None:
        commands["adapter"] = peer.adapter(start)
    with ExitStack() as stack:
        processes = tuple(
            stack.enter_context(running(name, command, folder, environment=environment))
            for name, command in commands.items()
        )
        processes[0].wait_for_port(port, _START_S)
        yield Front(f"http://{HOST}:{port}", processes)


def _checked(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"took longer than {_INSTALL_S:g} s") from None
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise CannotInstall(said[-1] if said else f"status {done.returncode}")


# How each is started


def _vllm_router(start: Start, policy: str) -> tuple[str, ...]:
    events: tuple[str, ...] = ()
    if policy == "kv_aware":
        sources = (f"{each.url}={each.kv_events}" for each in start.engines)
        events = (
            *(word for source in sources for word in ("--kv-event-source", source)),
            *("--kv-event-block-size", "16", "--kv-event-model", MODEL),
        )
    return (str(start.bin / "vllm-router"), *_rust_router(start, policy), *events)


def _smg(start: Start, policy: str) -> tuple[str, ...]:
    router = _rust_router(start, policy)
    return (str(start.bin / "smg"), "launch", *router, "--backend", "vllm")


def _sglang_router(start: Start, policy: str) -> tuple[str, ...]:
    module = (str(start.bin / "python"), "-m", "sglang_router.launch_router")
    return (*module, *_rust_router(start, policy))


def _rust_router(start: Start, policy: str) -> tuple[str, ...]:
    """Flags that vllm-router, SMG and sglang-router have in common: one descends from another."""
    urls = (each.url for each in start.engines)
    return (
        *("--worker-urls", *urls, "--policy", policy, "--host", HOST, "--port", str(start.port)),
        *("--prometheus-port", str(start.metrics_port), "--worker-startup-check-interval", "1"),
    )


def _litellm(start: Start, policy: str) -> tuple[str, ...]:
    deployments = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"hosted_vllm/{MODEL}",
                "api_base": f"{each.url}/v1",
                "api_key": "none",
            },
        }
        for each in start.engines
    ]
    config = start.folder / "litellm.yaml"
    settings = {"model_list": deployments, "router_settings": {"routing_strategy": policy}}
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    flags = ("--host", HOST, "--port", str(start.port), "--num_workers", "1")
    return (str(start.bin / "litellm"), "--config", str(config), *flags, "--telemetry", "False")


def _dynamo(start: Start, policy: str) -> tuple[str, ...]:
    module = (str(start.bin / "python"), "-m", "dynamo.frontend", "--router-mode", policy)
    listen = ("--http-host", HOST, "--http-port", str(start.port))
    all_there = ("--router-min-initial-workers", str(len(start.engines)))
    return (*module, *listen, *all_there, "--router-kv-overlap-score-credit", "2")


def _dynamo_adapter(start: Start) -> tuple[str, ...]:
    # -P: its folder holds modules that have the names of others'.
    script = (str(start.bin / "python"), "-P", str(Path(__file__).with_name("dynamo_worker.py")))
    engines = (f"{each.url}={each.kv_events}" for each in start.engines)
    return (*script, "--model", MODEL, "--model-dir", str(start.model_dir), *engines)


PEERS = (
    Peer("vllm-router", "vllm-router", "kv_aware", _vllm_router),
    Peer("vllm-router", "vllm-router", "cache_aware", _vllm_router),
    Peer("smg", "smg", "cache_aware", _smg),
    Peer("sglang-router", "sglang-router", "cache_aware", _sglang_router),
    Peer(
        "litellm",
        "litellm[proxy]!=1.107.*,!=1.109.*,!=1.110.*",
        "least-busy",
        _litellm,
        # Everything here is on loopback; prices are nobody's business and on the Internet.
        {
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    Peer(
        "ai-dynamo",
        "ai-dynamo==1.6.1",
        "kv",
        _dynamo,
        {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": "{folder}/discovery",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            **{f"DYN_{name}_HOST": HOST for name in ("TCP_RPC", "TCP_RESPONSE_STREAM")},
            "DYN_EVENT_PLANE_HOST": HOST,
            "HOME": "{folder}",
        },
        _dynamo_adapter,
        # Frontend and router alone; the package asks for what its GPU workers use.
        needs=(
            "ai-dynamo-runtime==1.6.1",
            *("aiohttp", "msgspec", "packaging", "prometheus-client", "pyyaml"),
        ),
    ),
)
