"""``kvgate up`` around its children: ports, files, messages, exit codes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from extproc import up as module
from extproc.policy import load_policy
from extproc.supervisor import Check, Program, Stage, Times
from extproc.up import UpSettings, check_ports, up, wanted_ports
from tests.support.envoy import free_ports
from workers.simulator.model import make_model_dir

SLEEP = "import time; print('hello', flush=True); time.sleep(60)"


@pytest.fixture
def settings(tmp_path: Path) -> UpSettings:
    ports = free_ports(8)
    return UpSettings(
        workers=1,
        envoy_port=ports[0],
        envoy_admin_port=ports[1],
        extproc_port=ports[2],
        control_port=ports[3],
        admin_port=ports[4],
        worker_port=ports[5],
        kv_events_port=ports[6],
        kv_replay_port=ports[7],
        state_dir=tmp_path / "state",
        times=Times(start_s=10, grace_s=1, restart_s=0.1),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def with_model(settings: UpSettings, model: Path) -> UpSettings:
    """The state directory already has the model, which takes seconds to make."""
    shutil.copytree(model, settings.state_dir / "model")
    return settings


def fake_stages(monkeypatch: pytest.MonkeyPatch, code: str, *checks: Check) -> None:
    program = Program("worker-1", (sys.executable, "-c", code))
    monkeypatch.setattr(module, "_stages", lambda *_: [Stage((program,), checks)])


class TestPorts:
    @pytest.mark.parametrize(
        ("field", "flag"),
        [
            ("envoy_port", "--envoy-port"),
            ("extproc_port", "--extproc-port"),
            ("admin_port", "--admin-port"),
            ("kv_replay_port", "--kv-replay-port"),
        ],
    )
    def test_a_taken_port_ends_with_2_and_names_its_flag(
        self, settings: UpSettings, capfd: pytest.CaptureFixture[str], field: str, flag: str
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", getattr(settings, field)))
            taken.listen()
            assert up(settings) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"port {getattr(settings, field)} is taken" in line
        assert flag in line
        assert not settings.state_dir.exists()

    def test_a_port_of_two_owners_is_refused(self, settings: UpSettings) -> None:
        twice = replace(settings, admin_port=settings.control_port)
        with pytest.raises(module.UpError, match="is also for the scheduler's agent port"):
            check_ports(wanted_ports(twice))

    def test_a_number_that_is_no_port_is_refused(self, settings: UpSettings) -> None:
        with pytest.raises(module.UpError, match="port 65536 does not exist; worker-1's KV events"):
            check_ports(wanted_ports(replace(settings, kv_events_port=65_536)))


class TestSettings:
    def test_no_worker_ends_with_2(
        self, settings: UpSettings, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert up(replace(settings, workers=0)) == 2
        assert "--workers 0" in capfd.readouterr().err

    def test_a_policy_without_the_model_ends_with_2(
        self, settings: UpSettings, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        policy = tmp_path / "mine.yaml"
        policy.write_text("pools: [{model: other}]")
        assert up(replace(settings, policy=policy)) == 2
        assert "no model 'sim-8b' (it has other)" in capfd.readouterr().err

    def test_a_state_directory_that_cannot_be_made_ends_with_2(
        self, settings: UpSettings, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        assert up(replace(settings, state_dir=tmp_path / "file" / "state")) == 2
        assert "Not a directory" in capfd.readouterr().err

    def test_a_state_directory_too_long_for_a_socket_ends_with_2(
        self, settings: UpSettings, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert up(replace(settings, state_dir=tmp_path / ("d" * 100))) == 2
        assert "is too long a path for a socket; --state-dir" in capfd.readouterr().err


class TestRun:
    def test_a_child_that_dies_at_start_ends_with_1_and_its_last_lines(
        self,
        with_model: UpSettings,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        code = "print('cannot find [the model]'); raise SystemExit(7)"
        fake_stages(monkeypatch, code, Check("never", "tcp://127.0.0.1:1"))
        assert up(with_model) == 1
        said = capfd.readouterr()
        assert "worker-1 ended with status 7 during start\n  cannot find [the model]" in said.err
        assert "kvgate is ready" not in said.out
        assert "cannot find" in (with_model.state_dir / "logs" / "worker-1.log").read_text()

    def test_ready_is_announced_and_sigterm_ends_with_0(
        self,
        with_model: UpSettings,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        fake_stages(monkeypatch, SLEEP)
        welcome = module._welcome

        def welcome_and_stop(settings: UpSettings) -> str:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return welcome(settings)

        monkeypatch.setattr(module, "_welcome", welcome_and_stop)
        assert up(with_model) == 0
        said = capfd.readouterr()
        assert f"kvgate is ready: http://127.0.0.1:{with_model.envoy_port}\n" in said.out
        assert "worker-1   hello" in said.err
        assert "Traceback" not in said.err

    def test_policy_and_envoy_follow_the_settings(
        self, with_model: UpSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake_stages(monkeypatch, "raise SystemExit", Check("never", "tcp://127.0.0.1:1"))
        assert up(with_model) == 1
        policy = load_policy(with_model.state_dir / "policy.yaml")
        assert policy.pools[0].tokenizer == with_model.state_dir / "model"
        assert (with_model.state_dir / "model" / "tokenizer.json").is_file()
        envoy = yaml.safe_load((with_model.state_dir / "envoy.yaml").read_text())
        ports = re.findall(r"'port_value': (\d+)", str(envoy))
        assert list(map(int, ports)) == [
            with_model.envoy_port,
            with_model.extproc_port,
            with_model.worker_port,
            with_model.envoy_admin_port,
        ]


class TestVllm:
    """The real engine in place of the simulator; starting it belongs to make test-vllm."""

    def test_it_must_be_installed(
        self, settings: UpSettings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        missing = replace(settings, engine="vllm", vllm_python=settings.state_dir / "python")
        assert up(missing) == 2
        assert "run make vllm" in capsys.readouterr().err

    def test_engine_agent_and_policy_fit_each_other(self, settings: UpSettings) -> None:
        settings = replace(settings, engine="vllm", vllm_python=Path(sys.executable))
        console = Console(quiet=True)
        stages = module._prepare(settings, console)
        programs = {program.name: program.command for stage in stages for program in stage.programs}
        worker, agent = programs["worker-1"], programs["agent-1"]
        socket_path = agent[agent.index("--socket") + 1]
        assert f"KVGATE_SOCKET={socket_path}" in worker
        assert worker[worker.index("--port") + 1] == str(settings.worker_port)
        (pool,) = load_policy(settings.state_dir / "policy.yaml").pools
        assert pool.block_size_tokens == int(worker[worker.index("--block-size") + 1])
        assert str(pool.tokenizer) == worker[worker.index("--model") + 1]
        assert pool.adapters


def test_the_curl_lines_are_what_a_shell_understands() -> None:
    """The shell runs them with ``curl`` replaced by printing the body."""
    lines = module._welcome(UpSettings()).splitlines()
    curls = [line for line in lines if "chat/completions" in line]
    assert len(curls) == 2
    bodies: list[Any] = []
    for line in curls:
        printed = subprocess.run(
            ["/bin/bash", "-c", f'curl() {{ printf "%s" "${{@: -1}}"; }}; {line}'],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        bodies.append(yaml.safe_load(printed))
        assert shlex.split(line)[1] == "-si"
    first, second = (body["messages"] for body in bodies)
    assert first[0] == second[0]
    assert "999,1000" in first[0]["content"]
    assert first[1] != second[1]
