from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.load.client import Wire
from benchmarks.load.driver import Drive, drive
from benchmarks.load.sample import Sample
from benchmarks.workloads.plan import Planned, Segment
from tests.benchmarks.load.server import EVENT, Script, serving


def plan(count: int, every_s: float) -> list[Planned]:
    return [Planned(n * every_s, (Segment(n, 60),), 4) for n in range(count)]


async def test_open_loop_sends_on_time_whatever_is_answered(model_dir: Path) -> None:
    slow = [Script(pieces=(EVENT,) * 5, pause_s=0.2) for _ in range(10)]
    ended: list[int] = []
    async with serving(*slow) as server:
        settings = Drive(Wire(server.url, "m"), model_dir)
        samples = await drive(settings, plan(10, 0.05), lambda s: ended.append(s.number))
    assert [sample.number for sample in samples] == list(range(10))
    assert sorted(ended) == list(range(10))
    # All are on their way before the first has ended: the schedule does not wait for answers.
    assert server.most_at_once == 10
    for sample in samples:
        assert sample.sent_s == pytest.approx(sample.due_s + sample.lag_s, abs=0.05)
        assert sample.lag_s >= 0


async def test_closed_loop_keeps_a_number_in_flight(model_dir: Path) -> None:
    scripts = [Script(pause_s=0.01) for _ in range(12)]
    async with serving(*scripts) as server:
        settings = Drive(Wire(server.url, "m"), model_dir, in_flight=3)
        samples = await drive(settings, plan(12, 100.0), lambda _: None)
    assert len(samples) == 12
    assert server.most_at_once == 3


async def test_processes_share_a_plan(model_dir: Path) -> None:
    seen: list[Sample] = []
    async with serving() as server:
        settings = Drive(Wire(server.url, "m"), model_dir, processes=2)
        async with asyncio.timeout(60):
            samples = await drive(settings, plan(9, 0.02), seen.append)
    assert [sample.number for sample in samples] == list(range(9))
    assert all(sample.served for sample in samples)
    assert len(seen) == len(server.bodies) == 9
