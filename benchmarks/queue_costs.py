"""Cost of a request that waits: into the queue, out of it to run, out of it by leaving.

The whole core is measured (arrival with its look at routing included), with 5,000 requests
waiting, spread over few and many tenants, once held by workers without a free slot and once
by a rule that counts each tenant apart.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, console, print_table, write_json
from extproc.decision.ticket import ServedModel, Ticket
from extproc.fleet.worker import Introduction, LoadReport, WorkerState
from extproc.policy import Policy, parse_policy
from extproc.request.identity import Identity
from extproc.request.profile import Endpoint, RequestProfile
from extproc.scheduler import Scheduler
from extproc.server import build_keyer
from extproc.tokens.keyer import PromptKeys

MODEL = "bench-model"
TARGET_MS = 0.1
TARGET_BYTES = 40_000
_BATCH = 50
_PROMPT_BLOCKS = 60


def main(
    seed: Annotated[int, typer.Option(help="Of keys and ids.")] = 1,
    queued: Annotated[int, typer.Option(min=900, help="Requests waiting.")] = 5_000,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "queue_costs.json",
) -> None:
    """Cost of a queued request."""
    console.print(f"seed {seed}, {queued:,} requests queued, prompts of {_PROMPT_BLOCKS} blocks")
    cases = [
        {"held by": held_by, "tenants": tenants, **measure(seed, queued, tenants, held_by)}
        for held_by in ("workers", "rule")
        for tenants in (1, 100, queued)
    ]
    print_table(
        f"ms of CPU for each request (medians of batches of {_BATCH}; target {TARGET_MS}), bytes",
        ("held by", "tenants", "enqueue", "dispatch", "leave", "bytes", "arrive*", "end and next*"),
        [
            [str(case["held by"]), f"{case['tenants']:,}"]
            + [f"{case[name]:.3f}" for name in ("admit_ms", "next_ms", "leave_ms")]
            + [f"{case['bytes']:,.0f}"]
            + [f"{case[name]:.3f}" for name in ("arrive_ms", "dispatch_ms")]
            for case in cases
        ],
    )
    console.print("* with the look at routing and the booking that come with it")
    write_json(
        output,
        {"machine": machine_facts(), "seed": seed, "queued": queued, "target_ms": TARGET_MS,
         "target_bytes": TARGET_BYTES, "cases": cases},
    )  # fmt: skip


def measure(seed: int, queued: int, tenants: int, held_by: str) -> dict[str, Any]:
    """Fill the queue, let half of it run and the other half leave."""
    scheduler, served = _pool(seed, queued, by_rule=held_by == "rule")
    rng = np.random.default_rng(seed)
    prompts = [
        (PromptKeys(_PROMPT_BLOCKS * 16 + 8, rng.integers(1, 2**63, _PROMPT_BLOCKS, np.uint64)),)
        for _ in range(200)
    ]
    profiles = [
        RequestProfile(
            Endpoint.CHAT,
            model=MODEL,
            max_output_tokens=100,
            identity=Identity(tenant=f"t{number}"),
        )
        for number in range(tenants)
    ]
    holders = 1 if held_by == "workers" else min(tenants, 64)
    running = [scheduler.arrive(served, profiles[n], prompts[n], 0.0) for n in range(holders)]
    waiting: list[Ticket] = []
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]

    def arrive(number: int) -> None:
        at = number % (holders if held_by == "rule" else tenants)
        waiting.append(scheduler.arrive(served, profiles[at], prompts[number % 200], 0.0))

    for number in range(queued - _BATCH * 5):
        arrive(number)
    bytes_each = (tracemalloc.get_traced_memory()[0] - before) / len(waiting)
    tracemalloc.stop()
    arrive_ms = _batches(lambda number: arrive(number), 5)
    admit_ms = _admit_ms(scheduler, waiting)

    def end_one(_: int) -> None:
        woken = scheduler.finish(running.pop(0), 1.0)
        running.extend(ticket for ticket in woken if ticket.decision is not None)

    dispatch_ms = _batches(end_one, 5)
    random.Random(seed).shuffle(waiting)
    gone = [ticket for ticket in waiting if ticket.decision is None]
    leave_ms = _batches(lambda number: scheduler.finish(gone[number], 2.0), 5)
    next_ms = _next_ms(scheduler)
    return {
        "arrive_ms": arrive_ms,
        "admit_ms": admit_ms,
        "next_ms": next_ms,
        "dispatch_ms": dispatch_ms,
        "leave_ms": leave_ms,
        "bytes": bytes_each,
    }


def _profile(tenant: str) -> RequestProfile:
    identity = Identity(tenant=tenant)
    return RequestProfile(Endpoint.CHAT, model=MODEL, max_output_tokens=100, identity=identity)


def _admit_ms(scheduler: Scheduler, waiting: list[Ticket]) -> float:
    """Out of the queue and into it again: admission alone, without routing."""
    admission = scheduler.admission
    demands = [ticket.demand for ticket in waiting[-_BATCH * 5 :] if ticket.demand]

    def again(number: int) -> None:
        admission.withdraw(demands[number], 0.0)
        demands[number].sequence = 0
        admission.admit(demands[number], lambda _: False, 0.0)

    return _batches(again, 5)


def _next_ms(scheduler: Scheduler) -> float:
    """One lease ends and the next in turn gets one: admission alone, without routing."""
    admission = scheduler.admission

    def run_one(_: int) -> None:
        admission.release(next(iter(admission.leases)), 3.0)
        admission.next_waiting(MODEL, lambda _: True, 3.0)

    return _batches(run_one, 5)


def _batches(act: Any, batches: int) -> float:
    """Median CPU ms of one act."""
    times = []
    for batch in range(batches):
        start = time.process_time()
        for number in range(batch * _BATCH, (batch + 1) * _BATCH):
            act(number)
        times.append((time.process_time() - start) / _BATCH * 1e3)
    return median(times)


def _pool(seed: int, queued: int, *, by_rule: bool) -> tuple[Scheduler, ServedModel]:
    rules = [{"name": "each", "per": ["tenant"], "concurrency": 1}] if by_rule else []
    policy: Policy = parse_policy(
        {
            "pools": [
                {
                    "model": MODEL,
                    "admission": {"max_queue": 2 * queued, "max_queue_time_s": 3_600},
                }
            ],
            "admission": {"rules": rules},
        }
    )
    keyers = {pool.model: build_keyer(pool, policy) for pool in policy.pools}
    scheduler = Scheduler(policy, keyers, random.Random(seed), 0.0)
    served = scheduler.models[MODEL]
    for number in range(10):
        slots = 1_000 if by_rule else 1
        hello = Introduction(f"10.0.0.{number + 1}:8000", (MODEL,), slots)
        worker = scheduler.hello(served, hello, 0.0)
        if worker is not None:
            running = 0.0 if by_rule or number == 0 else 1.0
            load = LoadReport(WorkerState.READY, running=running, waiting=0.0)
            scheduler.report(served, worker, load, 0.0)
    return scheduler, served


if __name__ == "__main__":
    typer.run(main)
