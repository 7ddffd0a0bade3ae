"""The whole system as real processes: Envoy, scheduler, engines with agents."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from extproc import envoy_config
from tests.support.envoy import free_ports

MODEL = "sim-8b"
SLOTS = 8
"""Sequences a worker runs at once, as in kvgate up: small enough that tests fill it."""
START_LIMIT_S = 30.0


def eventually(condition: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.02)


def fetch(url: str) -> tuple[int, str]:
    """Status and text of a GET; status 0 when nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310  # loopback http
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


@dataclass
class Worker:
    """One engine and its agent."""

    port: int
    kv_events_port: int
    kv_replay_port: int
    engine: subprocess.Popen[bytes] | None = None
    agent: subprocess.Popen[bytes] | None = None
    tap_port: int | None = None
    """Where the agent hears KV events in place of the engine's own port."""
    socket: Path | None = None
    """Where the engine's middleware tells the agent of requests; None without middleware."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def signal_engine(self, number: signal.Signals) -> None:
        """Signal the engine and the processes it started."""
        assert self.engine is not None
        _signal_group(self.engine, number)


class Engines(Protocol):
    """How engines of one kind are started."""

    start_limit_s: float
    has_middleware: bool

    def command(self, worker: Worker) -> list[str]: ...

    def environment(self, worker: Worker) -> dict[str, str]: ...


@dataclass(frozen=True)
class SimulatedEngines:
    model_dir: Path
    flags: tuple[str, ...] = ()
    start_limit_s: float = START_LIMIT_S
    has_middleware: bool = True

    def command(self, worker: Worker) -> list[str]:
        flags = _flags(
            model_dir=self.model_dir,
            model_name=MODEL,
            port=worker.port,
            kv_events_port=worker.kv_events_port,
            kv_replay_port=worker.kv_replay_port,
            max_num_seqs=SLOTS,
        )
        if worker.socket is not None:
            flags += _flags(socket=worker.socket)
        return [sys.executable, "-m", "workers.simulator", *flags, *self.flags]

    def environment(self, _worker: Worker) -> dict[str, str]:
        return dict(os.environ)


@dataclass
class System:
    """Handles on everything that runs; ``stop`` always stops all of it."""

    folder: Path
    model_dir: Path
    policy: dict[str, Any]
    simulator_flags: tuple[str, ...]
    body_mode: envoy_config.BodyMode = "full_duplex"
    workers: list[Worker] = field(default_factory=list)
    engines: Engines | None = None
    """None: simulated ones."""
    new_worker: Callable[[], Worker] = lambda: Worker(*free_ports(3))
    agent_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.engines = self.engines or SimulatedEngines(self.model_dir, self.simulator_flags)
        ports = free_ports(5)
        self.envoy_port, self.envoy_admin_port = ports[0], ports[1]
        self.extproc_port, self.control_port, self.admin_port = ports[2:]
        self.scheduler: subprocess.Popen[bytes] | None = None
        self.envoy: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.envoy_port}"

    def start(self, workers: int) -> None:
        assert self.engines is not None
        for number in range(workers):
            worker = self.new_worker()
            if self.engines.has_middleware:
                worker.socket = self.folder / f"{number}.sock"
            self.workers.append(worker)
        for number in range(workers):
            self.start_engine(number)
            self.start_agent(number)
        self.start_scheduler()
        self.start_envoy()
        self.wait_ready()

    def start_engine(self, number: int) -> None:
        worker = self.workers[number]
        assert self.engines is not None
        command, environment = self.engines.command(worker), self.engines.environment(worker)
        worker.engine = self._run(f"engine-{number}", command, environment)

    def start_agent(self, number: int) -> None:
        worker = self.workers[number]
        flags = _flags(
            engine=f"http://{worker.address}",
            kv_events=f"tcp://127.0.0.1:{worker.tap_port or worker.kv_events_port}",
            kv_replay=f"tcp://127.0.0.1:{worker.kv_replay_port}",
            scheduler=f"127.0.0.1:{self.control_port}",
            max_running=SLOTS,
            drain_s=0,
        )
        if worker.socket is not None:
            flags += _flags(socket=worker.socket)
        command = [sys.executable, "-m", "workers.agent", *flags, *self.agent_flags]
        worker.agent = self._run(f"agent-{number}", command)

    def start_scheduler(self) -> None:
        path = self.folder / "policy.yaml"
        path.write_text(yaml.safe_dump(self.policy))
        flags = _flags(
            policy=path,
            extproc_port=self.extproc_port,
            control_port=self.control_port,
            admin_port=self.admin_port,
        )
        command = [sys.executable, "-m", "extproc.cli", "serve", "--access-log", *flags]
        self.scheduler = self._run("scheduler", command)

    def start_envoy(self) -> None:
        settings = replace(
            envoy_config.default_settings(self.body_mode),
            listen_port=self.envoy_port,
            admin_port=self.envoy_admin_port,
            processor_port=self.extproc_port,
            workers=tuple(worker.address for worker in self.workers),
        )
        path = self.folder / "envoy.yaml"
        envoy_config.write(settings, path)
        binary = str(envoy_config.envoy_binary())
        options = ["-l", "warning", "--concurrency", "1", "--use-dynamic-base-id"]
        self.envoy = self._run("envoy", [binary, "-c", str(path), *options])

    def wait_ready(self) -> None:
        count = len(self.workers)
        assert self.engines is not None
        limit_s = self.engines.start_limit_s
        eventually(lambda: len(self.ready_workers()) == count, "all workers are ready", limit_s)
        eventually(lambda: fetch(f"{self.url}/v1/models")[0] == 200, "Envoy serves /v1/models")

    def ready_workers(self) -> list[str]:
        return [worker["address"] for worker in self.fleet() if worker["ready"]]

    def fleet(self) -> list[dict[str, Any]]:
        status, text = fetch(f"http://127.0.0.1:{self.admin_port}/api/v1/workers")
        return json.loads(text)["pools"][MODEL] if status == 200 else []

    def metric(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """Sum of a metric's samples that carry these labels."""
        return sum(self.samples(name, labels))

    def samples(self, name: str, labels: Mapping[str, str] | None = None) -> list[float]:
        """A metric's samples that carry these labels."""
        _, text = fetch(f"http://127.0.0.1:{self.admin_port}/metrics")
        wanted = [f'{key}="{value}"' for key, value in (labels or {}).items()]
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return [float(value) for told, value in found if all(item in told for item in wanted)]

    def engine_metric(self, number: int, name: str) -> float:
        _, text = fetch(f"http://{self.workers[number].address}/metrics")
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def wait_idle(self) -> None:
        """Nothing runs, waits or is booked, here and in the engines."""
        for name in (
            "kvgate_running_requests",
            "kvgate_queued_requests",
            "kvgate_worker_in_flight_requests",
            "kvgate_worker_pending_prefill_tokens",
        ):
            eventually(partial(self._is_zero, name), f"{name} is 0", 10)
        alive = [n for n, w in enumerate(self.workers) if w.engine and w.engine.poll() is None]
        for number in alive:
            eventually(partial(self._engine_idle, number), f"engine {number} is idle", 10)

    def _is_zero(self, name: str) -> bool:
        return self.metric(name) == 0

    def _engine_idle(self, number: int) -> bool:
        return self.engine_metric(number, "vllm:num_requests_running") == 0

    def logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))

    def stop(self) -> None:
        processes = [self.envoy, self.scheduler]
        for worker in self.workers:
            processes += [worker.agent, worker.engine]
        alive = [process for process in processes if process is not None]
        for process in alive:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + 5
        for process in alive:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)
                process.wait()
        for process in alive:
            _signal_group(process, signal.SIGKILL)  # what an engine has left behind

    def _run(
        self, name: str, command: list[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _flags(**values: object) -> list[str]:
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in values.items()]
    return [item for pair in pairs for item in pair]


def policy_for(model_dir: Path, **pool: Any) -> dict[str, Any]:
    """A policy of one pool; keyword arguments are fields of it."""
    return {
        "pools": [{"model": MODEL, "tokenizer": str(model_dir), **pool}],
        "reports": {"ready_timeout_s": 30},
    }


@contextmanager
def running_system(
    folder: Path,
    model_dir: Path,
    *,
    workers: int = 3,
    policy: dict[str, Any] | None = None,
    simulator_flags: tuple[str, ...] = (),
    body_mode: envoy_config.BodyMode = "full_duplex",
    engines: Engines | None = None,
    **options: Any,
) -> Iterator[System]:
    """Everything up and ready, and down again whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    system = System(
        folder,
        model_dir,
        policy or policy_for(model_dir),
        simulator_flags,
        body_mode,
        engines=engines,
        **options,
    )
    try:
        system.start(workers)
        yield system
    except BaseException:
        print(system.logs()[-8000:])
        raise
    finally:
        system.stop()
