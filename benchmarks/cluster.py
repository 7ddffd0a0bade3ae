"""A simulated cluster as real processes, and the ways in front of it: kvgate, Envoy alone.

Everything listens on loopback at free ports and ends with the ``with`` block.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.rig import HOST, Running, Usage, free_ports, running
from extproc.envoy_config import EnvoySettings, bootstrap, envoy_binary, to_yaml
from extproc.policy import load_policy

MODEL = "sim-8b"
CLIENT_HEADERS = ("x-kvgate-lane", "x-kvgate-tenant")
"""The load generator is the gateway here: it says whose a request is."""
SESSION_HEADER = "x-session-id"
_READY_S = 60.0
_POLL_S = 0.1
_WARM_UPS = 10
_ENVOY = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning")


class Cluster(msgspec.Struct, frozen=True):
    """Simulated workers; sizes are named as the simulator's settings.

    ``tell_slots`` False: agents do not say how many sequences a worker runs.
    ``stream_interval``: tokens in a chunk after the first (vLLM's flag of that name).
    """

    workers: int = 8
    max_num_seqs: int = 16
    num_blocks: int = 4_096
    max_model_len: int = 32_768
    timing: str = "peers-mock"
    seed: int = 0
    tell_slots: bool = True
    stream_interval: int = 1


@dataclass(frozen=True)
class Engine:
    """Ports of one simulated worker, and the socket on which it tells of its requests."""

    port: int
    kv_events_port: int
    kv_replay_port: int
    socket: Path

    @property
    def address(self) -> str:
        """ip:port."""
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.address}"

    @property
    def kv_events(self) -> str:
        """ZMQ endpoint of its KV events."""
        return f"tcp://{HOST}:{self.kv_events_port}"


@dataclass(frozen=True)
class Front:
    """What clients talk to: its URL, and the processes that are its cost.

    ``beside`` are processes on the workers' side that the way needs, kvgate's agents say.
    """

    url: str
    processes: tuple[Running, ...]
    beside: tuple[Running, ...] = ()

    def usage(self) -> Usage:
        """CPU and switches of ``processes`` so far."""
        return _sum(self.processes)

    def beside_usage(self) -> Usage:
        """The same of ``beside``."""
        return _sum(self.beside)

    def peak_bytes(self) -> int:
        """Most memory of each of ``processes``, added up."""
        return sum(each.peak_bytes() for each in self.processes)


def _sum(processes: Sequence[Running]) -> Usage:
    each = [process.usage() for process in processes]
    return Usage(sum(u.cpu_s for u in each), sum(u.switches for u in each))


@contextmanager
def engines(settings: Cluster, model_dir: Path, folder: Path) -> Iterator[list[Engine]]:
    """Workers with empty caches, up."""
    ports = free_ports(3 * settings.workers)
    threes = zip(ports[::3], ports[1::3], ports[2::3], strict=True)
    all_engines = [
        Engine(port, events, replay, folder / f"engine-{number}.sock")
        for number, (port, events, replay) in enumerate(threes)
    ]
    with ExitStack() as stack:
        started = [
            stack.enter_context(running(f"engine-{number}", command, folder))
            for number, command in enumerate(engine_commands(settings, all_engines, model_dir))
        ]
        for engine, process in zip(all_engines, started, strict=True):
            process.wait_for_port(engine.port)
        yield all_engines


def engine_commands(
    settings: Cluster, all_engines: list[Engine], model_dir: Path
) -> Iterator[tuple[str, ...]]:
    """Command line of each simulated worker's process."""
    for number, engine in enumerate(all_engines):
        yield _python(
            "workers.simulator --cache-segments",
            model_dir=model_dir,
            model_name=MODEL,
            host=HOST,
            port=engine.port,
            kv_events_port=engine.kv_events_port,
            kv_replay_port=engine.kv_replay_port,
            max_num_seqs=settings.max_num_seqs,
            num_blocks=settings.num_blocks,
            max_model_len=settings.max_model_len,
            stream_interval=settings.stream_interval,
            timing=settings.timing,
            socket=engine.socket,
            seed=1_000 * settings.seed + number,
        )


@contextmanager
def kvgate_front(
    settings: Cluster, all_engines: list[Engine], policy: Path, folder: Path
) -> Iterator[Front]:
    """Envoy, scheduler and an agent for each worker, all workers ready."""
    extproc_port, control_port, admin_port, listen_port, envoy_admin_port = free_ports(5)
    with ExitStack() as stack:
        scheduler = stack.enter_context(
            running(
                "scheduler",
                _python(
                    "extproc.cli serve",
                    policy=policy,
                    extproc_port=extproc_port,
                    control_port=control_port,
                    admin_port=admin_port,
                ),
                folder,
            )
        )
        scheduler.wait_for_port(control_port)
        agents = tuple(
            stack.enter_context(running(f"agent-{number}", command, folder))
            for number, command in enumerate(_agent_commands(settings, all_engines, control_port))
        )
        held_s = max(pool.admission.max_queue_time_s for pool in load_policy(policy).pools)
        envoy = EnvoySettings(
            workers=tuple(engine.address for engine in all_engines),
            listen_port=listen_port,
            admin_port=envoy_admin_port,
            processor_port=extproc_port,
            queue_time_s=held_s,
            stream_idle_timeout_s=held_s + 300.0,
            client_headers=CLIENT_HEADERS,
        )
        proxy = stack.enter_context(_envoy(to_yaml(bootstrap(envoy)), folder))
        proxy.wait_for_port(listen_port)
        fleet = f"http://{HOST}:{admin_port}/api/v1/workers"
        _until(lambda: _ready(fleet) == len(all_engines), "all workers are ready", scheduler)
        yield Front(f"http://{HOST}:{listen_port}", (scheduler, proxy), agents)


def _agent_commands(
    settings: Cluster, all_engines: list[Engine], control_port: int
) -> Iterator[tuple[str, ...]]:
    for engine in all_engines:
        yield _python(
            "workers.agent",
            engine=engine.url,
            kv_events=engine.kv_events,
            kv_replay=f"tcp://{HOST}:{engine.kv_replay_port}",
            scheduler=f"{HOST}:{control_port}",
            max_running=settings.max_num_seqs if settings.tell_slots else 0,
            socket=engine.socket,
            drain_s=0,
        )


def write_policy(source: Path, model_dir: Path, folder: Path) -> Path:
    """A policy file of the arms with the cluster's model and tokenizer put in."""
    content = yaml.safe_load(source.read_text(encoding="utf-8")) or {}
    [pool] = content.get("pools") or [{}]
    pool = {**pool, "model": MODEL, "tokenizer": str(model_dir.resolve())}
    path = folder / f"policy-{source.name}"
    path.write_text(yaml.safe_dump({**content, "pools": [pool]}), encoding="utf-8")
    return path


@contextmanager
def envoy_front(all_engines: list[Engine], lb_policy: str, folder: Path) -> Iterator[Front]:
    """Envoy with kvgate's configuration but for the processor and the choice of a worker.

    ``lb_policy`` is a cluster's of Envoy (ROUND_ROBIN, LEAST_REQUEST, RING_HASH ...); hashes are
    of the session header.
    """
    listen_port, admin_port = free_ports(2)
    settings = EnvoySettings(
        workers=tuple(engine.address for engine in all_engines),
        listen_port=listen_port,
        admin_port=admin_port,
    )
    config = without_processor(settings)
    [workers] = config["static_resources"]["clusters"]
    del workers["load_balancing_policy"]
    workers["lb_policy"] = lb_policy
    [host] = _manager(config)["route_config"]["virtual_hosts"]
    hashed = [{"header": {"header_name": SESSION_HEADER}}]
    host["routes"][0]["route"]["hash_policy"] = hashed
    with _envoy(yaml.safe_dump(config), folder) as proxy:
        proxy.wait_for_port(listen_port)
        yield Front(f"http://{HOST}:{listen_port}", (proxy,))


def without_processor(settings: EnvoySettings) -> dict[str, Any]:
    """kvgate's configuration of Envoy without the external processor."""
    config: dict[str, Any] = yaml.safe_load(to_yaml(bootstrap(settings)))
    resources = config["static_resources"]
    resources["clusters"] = [each for each in resources["clusters"] if each["name"] != "kvgate"]
    manager = _manager(config)
    manager["http_filters"] = manager["http_filters"][-1:]
    return config


def _manager(config: dict[str, Any]) -> dict[str, Any]:
    [chain] = config["static_resources"]["listeners"][0]["filter_chains"]
    manager: dict[str, Any] = chain["filters"][0]["typed_config"]
    return manager


@contextmanager
def _envoy(config: str, folder: Path) -> Iterator[Running]:
    path = folder / "envoy.yaml"
    path.write_text(config, encoding="utf-8")
    with running("envoy", (str(envoy_binary()), *_ENVOY, "-c", str(path)), folder) as proxy:
        yield proxy


def wait_until_served(front: Front) -> None:
    """Return when chats are answered and what a way does only the first time is done."""
    message = {"role": "user", "content": "ready?"}
    body = {"model": MODEL, "max_tokens": 2, "stream": True, "messages": [message]}
    request = urllib.request.Request(  # noqa: S310  # loopback http
        f"{front.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )

    def served() -> bool:
        with urllib.request.urlopen(request, timeout=_READY_S) as answer:  # noqa: S310
            return b"[DONE]" in answer.read()

    for number in range(_WARM_UPS):
        _until(served, f"chat {number + 1} is answered", front.processes[0])


def _ready(url: str) -> int:
    with urllib.request.urlopen(url, timeout=5.0) as answer:  # noqa: S310  # loopback http
        pools = json.load(answer)["pools"]
    return sum(worker["ready"] for worker in pools[MODEL])


def _until(condition: Callable[[], bool], what: str, process: Running) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and process.process.poll() is None:
        try:
            if condition():
                return
        except (OSError, urllib.error.HTTPError):
            pass
        time.sleep(_POLL_S)
    raise process.failure(f"not within {_READY_S:g} s: {what}")


def _python(module: str, **flags: object) -> tuple[str, ...]:
    """Command of one of our modules; a flag for each keyword."""
    name, *words = module.split()
    named = (
        text
        for flag, value in flags.items()
        for text in (f"--{flag.replace('_', '-')}", str(value))
    )
    return (sys.executable, "-m", name, *words, *named)
