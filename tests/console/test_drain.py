"""``kvgate drain`` and ``kvgate resume`` against a scripted admin API."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from typer.testing import CliRunner

from extproc.cli import app
from extproc.console import drain as command

NAME = "10.0.0.1:8000"


class FakeScheduler:
    """Answers one look at the fleet after the other; the last one again and again."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.looks: list[dict[str, Any] | None] = []
        self.known = True

    def then(self, state: str, in_flight: int, foreign: int = 0) -> None:
        load = {"in_flight": in_flight, "foreign": foreign}
        self.looks.append({"address": NAME, "state": state, **load})

    async def order(self, request: web.Request) -> web.Response:
        self.orders.append(str(request.rel_url))
        if not self.known:
            return web.json_response({"error": {"message": "no agent"}}, status=404)
        return web.json_response({"told": True}, status=202)

    async def workers(self, _: web.Request) -> web.Response:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return web.json_response({"pools": {"other": [], "sim": [look] if look else []}})


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeScheduler, str]]:
    monkeypatch.setattr(command, "_PACE_S", 0.01)
    monkeypatch.setattr(command, "_LATE_S", 0.1)
    scheduler = FakeScheduler()
    served = web.Application()
    served.router.add_post("/api/v1/workers/{name}/{order}", scheduler.order)
    served.router.add_get("/api/v1/workers", scheduler.workers)
    async with TestServer(served) as server:
        yield scheduler, str(server.make_url(""))


async def drained(url: str, timeout_s: float = 5.0, *, wait: bool = True) -> int:
    return await asyncio.to_thread(command.drain, url, NAME, timeout_s, wait=wait)


async def test_it_waits_until_nothing_runs_and_shows_how_far_it_is(
    fake: tuple[FakeScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, url = fake
    scheduler.then("ready", 3)
    scheduler.then("draining", 2, foreign=1)
    scheduler.then("draining", 0, foreign=1)
    scheduler.then("drained", 0)
    assert await drained(url) == 0
    assert scheduler.orders == [f"/api/v1/workers/{NAME}/drain?deadline_s=5"]
    assert capsys.readouterr().out.splitlines() == [
        f"{NAME}: ready, 3 in flight",
        f"{NAME}: draining, 3 in flight",
        f"{NAME}: draining, 1 in flight",
        f"{NAME}: drained, 0 in flight",
    ]


async def test_a_drain_that_was_cut_is_a_failure(
    fake: tuple[FakeScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, url = fake
    scheduler.then("drained", 2)
    assert await drained(url, timeout_s=0.0) == 1
    assert "time is over, drained with 2 in flight" in capsys.readouterr().err


async def test_a_worker_that_leaves_meanwhile_is_a_failure(
    fake: tuple[FakeScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, url = fake
    scheduler.then("draining", 2)
    scheduler.looks.append(None)
    assert await drained(url) == 1
    assert f"{NAME} has left the pool" in capsys.readouterr().err


async def test_an_unknown_worker_is_a_failure(
    fake: tuple[FakeScheduler, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, url = fake
    scheduler.known = False
    assert await drained(url) == 1
    assert await asyncio.to_thread(command.resume, url, NAME) == 1
    assert capsys.readouterr().err.count(f"{NAME}: no agent") == 2


async def test_without_wait_it_only_tells(fake: tuple[FakeScheduler, str]) -> None:
    scheduler, url = fake
    assert await drained(url, wait=False) == 0
    assert await asyncio.to_thread(command.resume, url, NAME) == 0
    assert scheduler.orders[1] == f"/api/v1/workers/{NAME}/resume"


def test_a_terminal_gets_a_bar_in_place_of_lines() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with command.Shown(console, NAME) as shown:
        shown.update("draining", 4)
        shown.update("draining", 1)
        shown.update("drained", 0)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    (last,) = [line for line in text.splitlines() if line.strip()][-1:]
    assert f"{NAME}: drained, 0 in flight" in last
    assert "4 in flight" not in last


def test_nobody_to_tell_and_no_address() -> None:
    runner = CliRunner()
    for name in ("drain", "resume"):
        silent = runner.invoke(app, [name, NAME, "--server", "http://127.0.0.1:1"])
        assert silent.exit_code == 1
        assert runner.invoke(app, [name, "gpu-1"]).exit_code == 2
