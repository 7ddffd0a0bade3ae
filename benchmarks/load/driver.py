"""Sends a plan: open loop at its times, or closed loop with a fixed number in flight.

Open loop means that a request leaves when it is due, whatever became of those before it; how
late the generator itself was is a figure of every run. Several processes share a plan request
by request and start at the same moment.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.load.client import Client, Wire, make_session
from benchmarks.load.sample import Sample
from benchmarks.workloads.plan import Planned
from benchmarks.workloads.prompts import PromptMaker

_START_DELAY_S = 0.05
_PROCESS_START_S = 3.0
"""Further processes need this long to import, load the tokenizer and make their text."""
_AHEAD_S = 0.05
"""Bodies are made this long before they are due."""

OnEnd = Callable[[Sample], None]


class Drive(msgspec.Struct, frozen=True):
    """How a plan is sent. ``in_flight`` set: closed loop, the plan's times do not count."""

    wire: Wire
    model_dir: Path
    seed: int = 0
    in_flight: int | None = None
    processes: int = 1


async def drive(settings: Drive, plan: Sequence[Planned], on_end: OnEnd) -> list[Sample]:
    """Send everything; samples in order of the plan.

    ``on_end`` is called for each sample; with several processes, when a process is done.
    """
    if settings.processes == 1:
        return await _drive_part(settings, plan, range(len(plan)), None, on_end)
    return await _drive_all(settings, plan, on_end)


async def _drive_all(settings: Drive, plan: Sequence[Planned], on_end: OnEnd) -> list[Sample]:
    start = time.monotonic() + _PROCESS_START_S
    count = settings.processes
    spawn = multiprocessing.get_context("spawn")
    loop = asyncio.get_running_loop()
    samples: list[Sample] = []
    with ProcessPoolExecutor(count, mp_context=spawn) as pool:
        parts = [
            loop.run_in_executor(pool, _in_process, settings, list(plan[first::count]),
                                 range(first, len(plan), count), start)
            for first in range(count)
        ]  # fmt: skip
        for part in asyncio.as_completed(parts):
            for sample in msgspec.json.decode(await part, type=list[Sample]):
                samples.append(sample)
                on_end(sample)
    return sorted(samples, key=lambda sample: sample.number)


def _in_process(
    settings: Drive, plan: Sequence[Planned], numbers: Sequence[int], start: float
) -> bytes:
    samples = asyncio.run(_drive_part(settings, plan, numbers, start, lambda _: None))
    return msgspec.json.encode(samples)


async def _drive_part(
    settings: Drive,
    plan: Sequence[Planned],
    numbers: Sequence[int],
    start: float | None,
    on_end: OnEnd,
) -> list[Sample]:
    """``start``: agreed with other processes; None: as soon as all is made."""
    maker = PromptMaker(settings.model_dir, settings.seed)
    gc.collect()
    gc.freeze()  # the plan and the words live as long as the run
    start = start or time.monotonic() + _START_DELAY_S
    try:
        async with make_session(settings.wire) as session:
            client = Client(session, settings.wire, maker, start)
            run = _closed_loop if settings.in_flight else _open_loop
            samples = await run(settings, client, plan, numbers, start, on_end)
    finally:
        gc.unfreeze()
    return sorted(samples, key=lambda sample: sample.number)


async def _open_loop(
    _settings: Drive,
    client: Client,
    plan: Sequence[Planned],
    numbers: Sequence[int],
    start: float,
    on_end: OnEnd,
) -> list[Sample]:
    samples: list[Sample] = []

    async def one(number: int, request: Planned, body: bytes) -> None:
        sample = await client.run(number, request, body, request.at_s)
        samples.append(sample)
        on_end(sample)

    async with asyncio.TaskGroup() as group:
        for number, request in zip(numbers, plan, strict=True):
            due = start + request.at_s
            await asyncio.sleep(max(0.0, due - _AHEAD_S - time.monotonic()))
            body = client.body(request)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(one(number, request, body))
    return samples


async def _closed_loop(
    settings: Drive,
    client: Client,
    plan: Sequence[Planned],
    numbers: Sequence[int],
    start: float,
    on_end: OnEnd,
) -> list[Sample]:
    samples: list[Sample] = []
    requests = iter(zip(numbers, plan, strict=True))

    async def one_after_another() -> None:
        for number, request in requests:
            body = client.body(request)
            sample = await client.run(number, request, body, time.monotonic() - start)
            samples.append(sample)
            on_end(sample)

    await asyncio.sleep(max(0.0, start - time.monotonic()))
    async with asyncio.TaskGroup() as group:
        for _ in range(settings.in_flight or 1):
            group.create_task(one_after_another())
    return samples
