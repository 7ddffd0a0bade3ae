"""The ways through Envoy that the overhead benchmark compares, as real processes."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chats import MODEL
from benchmarks.cluster import without_processor
from benchmarks.rig import HOST, Running, free_ports, running
from extproc.envoy_config import EnvoySettings, envoy_binary, write
from workers.simulator.model import make_model_dir

ALONE, BARE, KVGATE = "Envoy alone", "bare processor", "kvgate"
ARMS = (ALONE, BARE, KVGATE)

Buckets = dict[float, float]
"""Observations up to each bound (seconds) of a histogram."""


@dataclass(frozen=True)
class Scheduler:
    """A running ``kvgate serve`` and its ports."""

    process: Running
    extproc_port: int
    control_port: int
    admin_port: int

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        return sum(value for _, value in self._samples(name))

    def decisions(self) -> Buckets:
        """The histogram of decision times, of all models."""
        buckets: Buckets = {}
        for labels, value in self._samples("kvgate_decision_seconds_bucket"):
            bound_s = float(labels["le"])
            buckets[bound_s] = buckets.get(bound_s, 0.0) + value
        return buckets

    def resident_bytes(self) -> int:
        """Memory that it holds."""
        status = Path("/proc", str(self.process.process.pid), "status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024

    def _samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        with urllib.request.urlopen(f"http://{HOST}:{self.admin_port}/metrics") as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        for family in families:
            for sample in family.samples:
                if sample.name == name:
                    yield sample.labels, sample.value


@dataclass(frozen=True)
class Arm:
    """A way through Envoy: its port, whose CPU counts, and kvgate itself where it is kvgate."""

    name: str
    port: int
    envoy: Running
    processor: Running | None
    scheduler: Scheduler | None = None


def quantile_s(before: Buckets, after: Buckets, share: float) -> float:
    """Quantile of what a histogram observed in between, as Prometheus estimates it.

    Linear within a bucket; NaN without observations, the last finite bound beyond it.
    """
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    if not total:
        return float("nan")
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in counts.items():
        if count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


@contextmanager
def arm(name: str, workers: Sequence[str], folder: Path, core: int | None) -> Iterator[Arm]:
    """One arm, up and waiting; processor and Envoy on one core if given."""
    with ExitStack() as stack:
        scheduler = processor = None
        port = free_ports(1)[0]
        if name == BARE:
            command = module("bare_processor", str(port), workers[0])
            processor = stack.enter_context(running("bare", command, folder, core))
            processor.wait_for_port(port)
        elif name == KVGATE:
            scheduler = stack.enter_context(kvgate({"workers": list(workers)}, folder, core))
            processor, port = scheduler.process, scheduler.extproc_port
        listen_port, envoy = stack.enter_context(
            envoy_in_front(workers, None if processor is None else port, folder, core)
        )
        yield Arm(name, listen_port, envoy, processor, scheduler)


@contextmanager
def kvgate(pool: dict[str, Any], folder: Path, core: int | None) -> Iterator[Scheduler]:
    """``kvgate serve`` with one pool; ``pool`` is what its policy says beside the model."""
    ports = free_ports(3)
    tokenizer = str(make_model_dir(folder / "model"))
    policy = folder / f"policy-{ports[0]}.yaml"
    policy.write_text(yaml.safe_dump({"pools": [{"model": MODEL, "tokenizer": tokenizer, **pool}]}))
    named = zip(("extproc", "control", "admin"), ports, strict=True)
    flags = [flag for kind, number in named for flag in (f"--{kind}-port", str(number))]
    command = (sys.executable, "-m", "extproc.cli", "serve", "--policy", str(policy), *flags)
    with running(f"kvgate-{ports[0]}", command, folder, core) as process:
        for port in ports:
            process.wait_for_port(port)
        yield Scheduler(process, *ports)


@contextmanager
def envoy_in_front(
    workers: Sequence[str], processor_port: int | None, folder: Path, core: int | None
) -> Iterator[tuple[int, Running]]:
    """Envoy with a processor or, without a port, alone; the port that it listens on."""
    listen_port, admin_port = free_ports(2)
    settings = EnvoySettings(
        workers=tuple(workers),
        listen_port=listen_port,
        admin_port=admin_port,
        processor_port=processor_port or free_ports(1)[0],
    )
    config = folder / f"envoy-{listen_port}.yaml"
    if processor_port is None:
        config.write_text(yaml.safe_dump(without_processor(settings)))
    else:
        write(settings, config)
    options = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning")
    command = (str(envoy_binary()), *options, "-c", str(config))
    with running(f"envoy-{listen_port}", command, folder, core) as proxy:
        proxy.wait_for_port(listen_port)
        yield listen_port, proxy


def module(name: str, *arguments: str) -> tuple[str, ...]:
    """Command that runs a module of this package."""
    return (sys.executable, "-m", f"benchmarks.{name}", *arguments)
