"""``VirtualCluster``: clients, Envoy's retries, the scheduler's core and workers in one clock.

What Envoy and the shell around the core do in wall-clock time is one constant, ``hop_s``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from benchmarks.cluster import MODEL, Cluster
from benchmarks.load.sample import BROKEN, OK, Sample, Try
from benchmarks.simulation.chains import KeyMaker, PlannedChain
from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.flight import Flight, Patience, profile_of
from benchmarks.simulation.script import Trouble
from benchmarks.simulation.worker import VirtualWorker
from benchmarks.workloads.plan import Planned
from extproc.decision.ticket import Ticket
from extproc.errors import Refusal
from extproc.fleet.worker import EngineError, Introduction, Outcome, Worker
from extproc.policy import Policy
from extproc.scheduler import Scheduler
from extproc.server import TICK_S, build_keyer
from extproc.tokens.blocks import reusable_blocks
from extproc.tokens.keyer import PromptKeys
from workers.simulator.config import EngineConfig
from workers.simulator.requests import EngineRequest, Output
from workers.simulator.timing import PRESETS

TRIES = 3
"""Envoy's first try and its retries, all before the first token."""


class VirtualCluster:
    """One simulation; ``run`` goes to the end of the last request.

    Attributes:
        samples: what clients saw, as in a wall-clock run.
        decision_ms: CPU of the core for each arrival.
        end_ms: CPU of the core for each end, the starts of those who waited for it included.
        waiting_most: requests that waited in the scheduler at once.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Cluster,
        hop_s: float,
        script: Sequence[Trouble] = (),
        patience: Patience | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.samples: list[Sample] = []
        self.decision_ms: list[float] = []
        self.end_ms: list[float] = []
        self.waiting_most = 0
        self._policy = policy
        self._settings = settings
        self._hop_s = hop_s
        self._patience = patience or Patience()
        [self._pool] = policy.pools
        rng = random.Random(settings.seed)
        keyers = {MODEL: build_keyer(self._pool, policy)}
        self.scheduler = Scheduler(policy, keyers, rng, self.clock.now)
        self._served = self.scheduler.models[MODEL]
        self._keys = KeyMaker(self._pool.block_size_tokens)
        self._engine = EngineConfig(
            block_size=self._pool.block_size_tokens,
            num_blocks=settings.num_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            timing=PRESETS[settings.timing],
        )
        self.workers: list[VirtualWorker] = []
        self._by_address: dict[str, VirtualWorker] = {}
        self._known: dict[str, Worker] = {}
        self._flights: dict[str, Flight] = {}
        self._waiting: dict[str, Flight] = {}
        self._left = 0
        self._plan: Iterator[tuple[int, Planned]] = iter(())
        self._closed_loop = False
        for _ in range(settings.workers):
            self._add_worker()
        for trouble in script:
            self.clock.at(trouble.at_s, partial(self._make, trouble))

    def run(self, plan: Sequence[Planned], in_flight: int | None = None) -> None:
        """Send a plan and go on until every request has ended.

        ``in_flight`` set: closed loop with so many requests, the plan's times do not count.
        """
        self._left = len(plan)
        self._plan = enumerate(plan)
        self._closed_loop = in_flight is not None
        for _ in range(in_flight or 1):
            self._send_next()
        self.clock.after(TICK_S, self._tick)
        self.clock.run(lambda: not self._left)
        self.samples.sort(key=lambda sample: sample.number)

    # Requests

    def _send_next(self) -> None:
        """An arrival asks for the next, or an end does, so that the clock's list stays short."""
        for number, planned in self._plan:
            due_s = self.clock.now if self._closed_loop else planned.at_s
            self.clock.at(due_s, partial(self._arrive, number, planned))
            return

    def _arrive(self, number: int, planned: Planned) -> None:
        if not self._closed_loop:
            self._send_next()
        keys = self._keys.keys(planned.prompt)
        self._ask(Flight(number, planned, keys, self.clock.now))

    def _ask(self, flight: Flight) -> None:
        flight.sample.sent_s = self.clock.now
        tokens = flight.sample.planned_tokens
        usable = reusable_blocks(tokens, self._pool.block_size_tokens)
        array = np.array(flight.keys[:usable], dtype=np.uint64)
        prompt = PromptKeys(tokens, array, exact=True)
        began = time.process_time()
        try:
            ticket = self.scheduler.arrive(
                self._served, profile_of(flight.number, flight.planned), [prompt], self.clock.now
            )
        except Refusal as refusal:
            self._refuse(flight, refusal)
            return
        finally:
            self.decision_ms.append(1_000 * (time.process_time() - began))
        flight.ticket = ticket
        if ticket.decision is None:
            self._waiting[ticket.id] = flight
            self.waiting_most = max(self.waiting_most, len(self._waiting))
        else:
            self.clock.after(self._hop_s, partial(self._try, flight))

    def _woken(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            flight = self._waiting.pop(ticket.id, None)
            if flight is None:
                continue
            if ticket.refusal is not None:
                self._refuse(flight, ticket.refusal)
            else:
                self.clock.after(self._hop_s, partial(self._try, flight))

    def _try(self, flight: Flight) -> None:
        """Envoy's walk over the decision's endpoints."""
        ticket = flight.ticket
        assert ticket is not None
        assert ticket.decision is not None
        flight.sample.queue_s = ticket.decision.queue_wait_s
        endpoints = ticket.decision.endpoints
        while flight.tries < min(TRIES, len(endpoints)):
            worker = self._by_address[endpoints[flight.tries]]
            flight.tries += 1
            if worker.up:
                flight.worker = worker
                self._flights[ticket.id] = flight
                worker.add(self._request(flight, ticket.id))
                return
        flight.sample.status, flight.sample.code = 503, "no_upstream"
        self._woken(
            self.scheduler.response_started(
                ticket,
                None,
                flight.tries,
                self.clock.now,
                status=503,
                error=EngineError.ENGINE_DEAD,
            )
        )
        self._end(flight)

    def _request(self, flight: Flight, request_id: str) -> EngineRequest:
        prompt, answer = flight.sample.planned_tokens, flight.planned.output_tokens
        chain = PlannedChain(flight.keys, prompt + answer, self._engine.block_size, flight.number)
        return EngineRequest(request_id, chain, prompt, answer)

    def _outputs(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            flight = self._flights[output.request.request_id]
            if flight.sample.ttft_s is None:
                self._first_token(flight, output.request)
            if output.finish_reason is not None:
                self._finished(flight, output.request)

    def _first_token(self, flight: Flight, request: EngineRequest) -> None:
        sample, worker, ticket = flight.sample, flight.worker, flight.ticket
        assert worker is not None
        assert ticket is not None
        sample.status = OK
        sample.ttft_s = self.clock.now - sample.sent_s
        sample.cached_tokens = request.cached_tokens
        sample.worker = worker.address
        self._woken(
            self.scheduler.response_started(ticket, worker.address, flight.tries, self.clock.now)
        )

    def _finished(self, flight: Flight, request: EngineRequest) -> None:
        flight.sample.output_tokens = request.generated
        self._flights.pop(request.request_id)
        self._tell_end(flight, request)
        self._end(flight)

    def _tell_end(self, flight: Flight, request: EngineRequest) -> None:
        """What the engine's middleware says, by way of the agent."""
        sample, worker = flight.sample, flight.worker
        assert worker is not None
        outcome = Outcome(
            request.request_id,
            OK,
            EngineError.NONE,
            duration_s=self.clock.now - sample.sent_s,
            ttft_s=sample.ttft_s,
            prompt_tokens=sample.planned_tokens,
            output_tokens=request.generated,
            cached_tokens=request.cached_tokens,
        )
        known = self._known[worker.address]
        began = time.process_time()
        woken = self.scheduler.outcome(self._served, known, outcome, self.clock.now)
        self.end_ms.append(1_000 * (time.process_time() - began))
        self._woken(woken)

    def _refuse(self, flight: Flight, refusal: Refusal) -> None:
        sample = flight.sample
        sample.status, sample.code = refusal.http_status, refusal.code
        sample.announced_s = refusal.retry_after_s
        if sample.announced_s is not None and self._patience.again(sample):
            after_s = self.clock.now - sample.due_s
            sample.refused.append(Try(sample.status, sample.code, after_s, sample.announced_s))
            sample.status, sample.code = 0, ""
            flight.ticket = None
            self.clock.after(sample.announced_s, partial(self._ask, flight))
        else:
            self._record(flight)

    def _end(self, flight: Flight) -> None:
        self._record(flight)
        if flight.ticket is not None:
            self._woken(self.scheduler.finish(flight.ticket, self.clock.now))

    def _record(self, flight: Flight) -> None:
        flight.sample.e2e_s = self.clock.now - flight.sample.sent_s
        self.samples.append(flight.sample)
        self._left -= 1
        if self._closed_loop:
            self._send_next()

    # Workers and their agents

    def _add_worker(self) -> None:
        number = len(self.workers)
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000"
        worker = VirtualWorker(
            address, self._engine, self._pool, self.clock, self._outputs, self._news
        )
        self.workers.append(worker)
        self._by_address[address] = worker
        self._start(worker)
        interval_s = self._policy.reports.interval_s
        # Agents do not report in step.
        self.clock.after(interval_s * (number % 16) / 16, partial(self._report_on, worker))

    def _start(self, worker: VirtualWorker) -> None:
        worker.start()
        slots = self._settings.max_num_seqs if self._settings.tell_slots else 0
        hello = Introduction(worker.address, (MODEL,), max_running=slots)
        known = self.scheduler.hello(self._served, hello, self.clock.now)
        assert known is not None
        self._known[worker.address] = known
        self.scheduler.snapshot(self._served, known, worker.agent.snapshot(), self.clock.now)
        self._report(worker)

    def _report(self, worker: VirtualWorker) -> None:
        known = self._known[worker.address]
        load = worker.agent.load(worker.state, self._policy.reports.interval_s)
        self._woken(self.scheduler.report(self._served, known, load, self.clock.now))

    def _report_on(self, worker: VirtualWorker) -> None:
        """Report at the policy's pace for ever; the agent outlives its engine."""
        self._report(worker)
        self.clock.after(self._policy.reports.interval_s, partial(self._report_on, worker))

    def _news(self, worker: VirtualWorker) -> None:
        """Cache events came: the next delta takes them along."""
        if not worker.news_due:
            worker.news_due = True
            send = partial(self._send_delta, worker, worker.epoch)
            self.clock.after(self._pool.digest.delta_interval_s, send)

    def _send_delta(self, worker: VirtualWorker, epoch: int) -> None:
        if epoch == worker.epoch and worker.up:
            worker.news_due = False
            known = self._known[worker.address]
            self.scheduler.delta(self._served, known, worker.agent.delta(), self.clock.now)

    def _tick(self) -> None:
        self._woken(self.scheduler.tick(self.clock.now))
        self.clock.after(TICK_S, self._tick)

    # Trouble

    def _make(self, trouble: Trouble) -> None:
        if trouble.action == "add":
            for _ in range(trouble.count):
                self._add_worker()
        elif trouble.action == "roll":
            self._roll(trouble, 0)
        elif trouble.action == "freeze":
            self.workers[trouble.worker].freeze(trouble.seconds)
        else:
            self._kill(self.workers[trouble.worker], trouble.seconds)

    def _kill(self, worker: VirtualWorker, down_s: float) -> None:
        """Its requests go to the next endpoint, or break where a token was out."""
        worker.stop()
        lost = [flight for flight in self._flights.values() if flight.worker is worker]
        for flight in lost:
            assert flight.ticket is not None
            del self._flights[flight.ticket.id]
            if flight.sample.ttft_s is None:
                self._try(flight)
            else:
                flight.sample.code = BROKEN
                self._end(flight)
        self._report(worker)
        self.clock.after(down_s, partial(self._start, worker))

    def _roll(self, trouble: Trouble, number: int) -> None:
        if number == len(self.workers):
            return
        worker = self.workers[number]
        worker.draining = True
        self._report(worker)
        self._when_drained(worker, self.clock.now + trouble.seconds, trouble, number)

    def _when_drained(
        self, worker: VirtualWorker, deadline: float, trouble: Trouble, number: int
    ) -> None:
        if worker.engine.busy and self.clock.now < deadline:
            again = partial(self._when_drained, worker, deadline, trouble, number)
            self.clock.after(TICK_S, again)
            return
        self._kill(worker, trouble.restart_s)
        self.clock.after(trouble.restart_s + TICK_S, partial(self._roll, trouble, number + 1))
