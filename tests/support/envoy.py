"""The real Envoy for tests: on free loopback ports, with one thread, always stopped."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from extproc.envoy_config import EnvoySettings, envoy_binary, write

OPTIONS = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning")
START_DEADLINE_S = 15.0


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on just now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def envoy_settings(*, workers: tuple[str, ...], **changes: Any) -> EnvoySettings:
    """Settings on free ports; processor_port is free too unless it is given."""
    names = ("listen_port", "admin_port", "processor_port")
    ports = dict(zip(names, free_ports(3), strict=True))
    return EnvoySettings(workers=workers, **{**ports, **changes})


@dataclass(frozen=True)
class RunningEnvoy:
    settings: EnvoySettings
    process: asyncio.subprocess.Process
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.settings.listen_host}:{self.settings.listen_port}"

    @property
    def admin_url(self) -> str:
        return f"http://{self.settings.admin_host}:{self.settings.admin_port}"

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches the regular expression."""
        found: dict[str, int] = {}
        async with httpx.AsyncClient(base_url=self.admin_url) as client:
            for kind in ("Counters", "Gauges"):
                answer = await client.get(f"/stats?type={kind}&filter={pattern}")
                pairs = (line.split(": ") for line in answer.text.splitlines())
                found.update((name, int(value)) for name, value in pairs)
        return found


@asynccontextmanager
async def running_envoy(
    settings: EnvoySettings, filters: Sequence[Mapping[str, Any]] = ()
) -> AsyncIterator[RunningEnvoy]:
    """Start Envoy, wait until it listens, stop it afterwards.

    ``filters`` are HTTP filters to put before those of the generated configuration.

    Raises:
        AssertionError: it did not come up; the message holds its log.
    """
    with tempfile.TemporaryDirectory(prefix="kvgate-envoy-") as folder:
        config, log = Path(folder, "envoy.yaml"), Path(folder, "envoy.log")
        write(settings, config)
        _add_filters(config, filters)
        process = await asyncio.create_subprocess_exec(
            envoy_binary(), *OPTIONS, "--log-path", log, "-c", config
        )
        envoy = RunningEnvoy(settings, process, log)
        try:
            await _until_listening(envoy)
            yield envoy
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def _add_filters(path: Path, filters: Sequence[Mapping[str, Any]]) -> None:
    config = yaml.safe_load(path.read_text())
    (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    manager["http_filters"] = [*filters, *manager["http_filters"]]
    path.write_text(yaml.safe_dump(config))


async def _until_listening(envoy: RunningEnvoy) -> None:
    deadline = asyncio.get_running_loop().time() + START_DEADLINE_S
    while not await _accepts(envoy.settings.listen_host, envoy.settings.listen_port):
        late = asyncio.get_running_loop().time() > deadline
        assert envoy.process.returncode is None, _said(envoy)
        assert not late, f"Envoy does not listen: {_said(envoy)}"
        await asyncio.sleep(0.02)


async def _accepts(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def _said(envoy: RunningEnvoy) -> str:
    return envoy.log.read_text() if envoy.log.exists() else "(no log)"
