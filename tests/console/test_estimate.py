"""``kvgate estimate`` against a served API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from extproc.api import SchedulerService
from extproc.cli import app
from extproc.console.estimate import estimate, request_of, shown
from extproc.generated.kvgate.v1 import scheduler_pb2 as pb
from tests.support.builders import MODEL, Fleet, address
from tests.support.scheduler_api import Clock, desk_of

BODY = json.dumps(
    {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
).encode()


class Served:
    """A scheduler with two workers of one slot each, and its control port's address."""

    def __init__(self) -> None:
        self.fleet = Fleet(workers=2, slots=1, admission={"max_queue": 1})
        self.desk = desk_of(self.fleet.scheduler, Clock())
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers((SchedulerService(self.desk).handler(),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def shows(
        self, capsys: pytest.CaptureFixture[str], body: bytes = BODY, **options: bool
    ) -> tuple[int, str]:
        request = request_of("/v1/chat/completions", ["x-kvgate-lane: batch"], body)
        as_json = options.get("as_json", False)
        status = await asyncio.to_thread(
            estimate, self.address, request, as_json=as_json, timeout_s=5.0
        )
        return status, capsys.readouterr().out


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    await made.server.start()
    yield made
    await made.server.stop(0)
    made.desk.cold_text.close()


async def test_the_verdict_and_every_cost_are_shown(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    ticket = served.fleet.arrive()
    assert ticket.decision is not None
    status, text = await served.shows(capsys)
    assert status == 0
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines() if line.strip()}
    assert "allow" in lines["verdict"]
    assert "batch, anonymous" in lines["pool, lane, tenant"]
    for term in ("uncached", "pending prefill", "running"):
        assert term in text
    rows = [line for line in text.splitlines() if "10.0.0." in line]
    busy = ticket.decision.endpoints[0]
    assert [busy in row for row in rows] == [False, True], "full workers come last"
    assert "yes" in rows[0]
    assert "full" in rows[1]


@pytest.mark.parametrize("prefiller", ["", address(9)])
def test_who_would_prefill_for_the_first_worker_is_named(prefiller: str) -> None:
    console = Console(width=160)
    with console.capture() as written:
        console.print(shown(pb.Estimate(verdict="allow", prefiller=prefiller)))
    assert ("prefilled by" in written.get()) is bool(prefiller)
    assert prefiller in written.get()


async def test_waiting_is_no_failure_and_refusal_is_one(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        served.fleet.arrive()
    status, text = await served.shows(capsys)
    assert status == 0
    assert "wait" in text
    assert f"capacity:{MODEL}" in text
    served.fleet.arrive()
    status, text = await served.shows(capsys)
    assert status == 1
    assert "queue_full" in text
    assert "come back in" in text


async def test_json_has_numbers_and_nulls(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = await served.shows(capsys, as_json=True)
    said = json.loads(text)["estimate"]
    assert status == 0
    assert said["retry_after_s"] is None
    assert isinstance(said["prompt_tokens"], int)
    assert {worker["address"] for worker in said["workers"]} == {address(0), address(1)}
    cost = said["workers"][0]["cost"]
    assert cost == pytest.approx(sum(said["workers"][0]["terms"].values()))


async def test_a_request_that_cannot_be_admitted_is_said_so(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = await served.shows(capsys, body=b'{"model": "nobody", "messages": []}')
    assert (status, text) == (
        1, "refused: model_not_found (404): The requested model does not exist.\n",
    )  # fmt: skip


async def test_the_command_reads_a_file_or_standard_input(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_bytes(BODY)

    def invoke(*arguments: str) -> int:
        command = ["estimate", *arguments, "--server", served.address, "--json"]
        result = CliRunner().invoke(app, command, input=BODY)
        assert json.loads(result.stdout)["estimate"]["verdict"] == "allow"
        return result.exit_code

    assert await asyncio.to_thread(invoke, str(file)) == 0
    assert await asyncio.to_thread(invoke) == 0


def test_nobody_to_ask_and_bad_arguments_end_with_2(tmp_path: Path) -> None:
    silent = ["--server", "127.0.0.1:1", "--timeout-s", "1"]
    runner = CliRunner()
    assert runner.invoke(app, ["estimate", *silent], input=BODY).exit_code == 2
    assert runner.invoke(app, ["estimate", str(tmp_path / "none")]).exit_code == 2
    bad = runner.invoke(app, ["estimate", "--header", "no colon"], input=BODY)
    assert bad.exit_code == 2
    assert "is not name:value" in bad.stderr
