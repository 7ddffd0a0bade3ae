"""The engine core: continuous batching as vLLM v1 schedules it, without a clock.

A step first serves the running list in order, then admits from the waiting queue, within
one token budget; long prompts are computed in chunks. When blocks run out, the request that
started running last gives its blocks back, waits at the front of the queue and is computed
again. Time comes in as arguments, so a server and a virtual-time simulation use the same
code. A step costs O(running), not O(tokens).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from workers.simulator.blocks import BlockManager
from workers.simulator.config import EngineConfig
from workers.simulator.requests import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksStored,
    CacheEvent,
    EngineRequest,
    EngineStats,
    Output,
    Phase,
)


@dataclass(slots=True)
class Step:
    """A step in flight: begun at ``started_s``, over after ``duration_s``."""

    started_s: float
    duration_s: float
    scheduled: list[tuple[EngineRequest, int]]
    events: list[CacheEvent]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What is known at ``ended_s``; nothing of it before."""

    duration_s: float
    ended_s: float
    outputs: list[Output]
    events: list[CacheEvent]


class Engine:
    """One engine; ``add`` and ``abort`` may come at any time, also during a step."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks)
        self.running: list[EngineRequest] = []
        self.waiting: deque[EngineRequest] = deque()
        self.stats = EngineStats()
        self._requests: dict[str, EngineRequest] = {}
        self._events: list[CacheEvent] = []

    def __repr__(self) -> str:
        return f"<Engine running={len(self.running)} waiting={len(self.waiting)} {self.blocks!r}>"

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._requests)

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a request.

        Raises:
            ValueError: the id is in use, or prompt and answer exceed ``max_model_len``.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        if request.prompt_tokens + request.answer_tokens > self.config.max_model_len:
            raise ValueError(f"request {request.request_id} exceeds max_model_len")
        request.arrived_s = now
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is and free its blocks; False if it is not here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request, Phase.FINISHED)
        self.stats.aborted += 1
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; refused while any is held. Announced by the next step."""
        cleared = self.blocks.clear()
        if cleared and self.config.record_events:
            self._events.append(AllBlocksCleared())
        return cleared

    def step(self, now: float) -> StepResult | None:
        """One whole step in virtual time; None when idle."""
        step = self.begin(now)
        return self.complete(step) if step else None

    def begin(self, now: float) -> Step | None:
        """Schedule a step; None when there is nothing to do."""
        if not self._requests:
            return None
        scheduled: list[tuple[EngineRequest, int]] = []
        budget = self.config.max_num_batched_tokens
        budget, preempted = self._serve_running(scheduled, budget)
        if not preempted:
            budget = self._admit_waiting(scheduled, budget, now)
        decoding = sum(tokens == 1 and request.generated > 0 for request, tokens in scheduled)
        tokens = self.config.max_num_batched_tokens - budget
        self.stats.steps += 1
        self.stats.step_tokens += tokens
        events, self._events = self._events, []
        duration = self.config.timing.step_s(decoding, tokens - decoding)
        return Step(now, duration, scheduled, events)

    def complete(self, step: Step) -> StepResult:
        """Apply a step at its end; requests aborted meanwhile have no output."""
        outputs: list[Output] = []
        for request, tokens in step.scheduled:
            if request.phase is not Phase.RUNNING:
                continue
            request.computed += tokens
            if request.computed == request.prompt_tokens + request.generated:
                outputs.append(self._sample(request))
        if any(output.finish_reason for output in outputs):
            self.running = [r for r in self.running if r.phase is Phase.RUNNING]
        ended = step.started_s + step.duration_s
        return StepResult(step.duration_s, ended, outputs, step.events)

    def _serve_running(
        self, scheduled: list[tuple[EngineRequest, int]], budget: int
    ) -> tuple[int, bool]:
        preempted = False
        position = 0
        size = self.config.block_size
        while position < len(self.running) and budget:
            request = self.running[position]
            tokens = request.prompt_tokens + request.generated - request.computed
            if tokens > budget:
                tokens = budget
            target = request.computed + tokens
            # Most decode steps neither need a block nor fill one: skip the call.
            if target > len(request.blocks) * size or target // size > request.stored_blocks:
                while not self._extend(request, target):
                    preempted = True
                    if self._preempt_last() is request:
                        return budget, preempted
            scheduled.append((request, tokens))
            budget -= tokens
            position += 1
        return budget, preempted

    def _admit_waiting(
        self, scheduled: list[tuple[EngineRequest, int]], budget: int, now: float
    ) -> int:
        while self.waiting and budget and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            total = request.prompt_tokens + request.generated
            # The last token is always computed: its logits are the next token.
            usable = (total - 1) // self.config.block_size
            hits = self.blocks.lookup(request.chain.block_hashes(0, usable))
            cached = len(hits) * self.config.block_size
            tokens = min(total - cached, budget)
            if not self._extend(request, cached + tokens, hits):
                break
            self.waiting.popleft()
            self.running.append(request)
            self._count_admission(request, cached, now)
            request.computed = cached
            request.phase = Phase.RUNNING
            scheduled.append((request, tokens))
            budget -= tokens
        return budget

    def _count_admission(self, request: EngineRequest, cached: int, now: float) -> None:
        if request.phase is Phase.PREEMPTED:
            # vLLM counts a preemption only when the request resumes.
            self.stats.preemptions += 1
            return
        request.scheduled_s = now
        request.cached_tokens = cached
        self.stats.prefix_queries += request.prompt_tokens
        self.stats.prefix_hits += cached

    def _extend(self, request: EngineRequest, tokens: int, hits: list[int] | None = None) -> bool:
        """Blocks for ``tokens`` tokens in all; full ones are findable at once, as in vLLM."""
        size = self.config.block_size
        held = len(request.blocks) + len(hits or ())
        missing = -(-tokens // size) - held
        if missing > 0 or hits:
            allocation = self.blocks.allocate(max(missing, 0), hits or ())
            if allocation is None:
                return False
            if self.config.record_events:
                self._events += map(BlockRemoved, allocation.evicted)
            request.stored_blocks += len(hits or ())
            request.blocks += hits or ()
            request.blocks += allocation.blocks
        if tokens // size > request.stored_blocks:
            self._store(request, tokens // size)
        return True

    def _store(self, request: EngineRequest, full: int) -> None:
        first, chain = request.stored_blocks, request.chain
        hashes = chain.block_hashes(first, full)
        self.blocks.store(request.blocks[first:full], hashes)
        request.stored_blocks = full
        if self.config.record_events:
            self._events.append(
                BlocksStored(
                    hashes,
                    chain.parent_hash(first),
                    chain.block_bytes(first, full),
                    chain.block_size,
                    first,
                    chain.origin,
                )
            )

    def _preempt_last(self) -> EngineRequest:
        victim = self.running.pop()
        self._release(victim, Phase.PREEMPTED)
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _sample(self, request: EngineRequest) -> Output:
        if not request.generated:
            self.stats.prompt_tokens += request.prompt_tokens
            self.stats.cached_prompt_tokens += request.cached_tokens
        tokens = 1 if request.answer_tokens else 0
        request.generated += tokens
        self.stats.generation_tokens += tokens
        if request.generated < request.answer_tokens:
            return Output(request, tokens)
        del self._requests[request.request_id]
        self._release(request, Phase.FINISHED)
        return Output(request, tokens, "length" if request.answer_tokens else "stop")

    def _release(self, request: EngineRequest, phase: Phase) -> None:
        self.blocks.release(request.blocks)
        request.blocks.clear()
        request.stored_blocks = 0
        request.computed = 0
        request.phase = phase
