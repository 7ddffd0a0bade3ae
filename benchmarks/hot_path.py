"""Where the time of a decision goes: each step on its own, in process, without a network.

    python -m benchmarks.hot_path

The real classes run a request from the bytes that Envoy sends to the bytes that it gets, with
warm caches and a new turn of the chat each time. Steps inside the core are timed by wrapping
its own methods. Every other round is timed as a whole, to check the sum. Last, a match of 128
blocks against plain pybloom-live filters.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pybloom_live import BloomFilter
from rich.progress import track

from benchmarks.chats import Chat, text
from benchmarks.dialogue import Dialogue, make_dialogue
from benchmarks.fleet import DIGEST_KEYS, Fleet, Held, make_fleet, make_policy
from benchmarks.machine import machine_facts
from benchmarks.report import RESULTS, console, median, percentile, print_table, write_json
from extproc.replies import ProcessingRequest
from extproc.request.reader import read_request
from extproc.server import build_keyer
from extproc.stream import Arrived, RequestStream, ResponseStarted
from extproc.tokens.blocks import Keys
from extproc.tokens.keyer import PromptKeyer
from workers.simulator.model import make_model_dir

MATCH_BLOCKS = 128
MATCH_TARGET_MS = 0.2
_NAIVE_SAMPLE = 4
"""Filters that the naive match really asks; the rest is extrapolated."""


@dataclass(frozen=True)
class Conversations:
    """What is asked: ``chats`` of ``size_bytes``, each new turn adding ``turn_bytes``.

    ``kind`` is that of the load generator's workload; ``system_bytes`` of text are shared.
    """

    name: str
    size_bytes: int
    turn_bytes: int
    chats: int
    kind: str = "chat"
    system_bytes: int = 4_096
    target_ms: float | None = None


CONVERSATIONS = (
    Conversations("8 KB chat", 8_192, 1_024, chats=16, kind="chat"),
    Conversations("400 KB growing chat", 400_000, 2_048, chats=4, kind="long", target_ms=6.0),
    Conversations("200-token request", 800, 800, chats=16, kind="small", system_bytes=16),
)

STEPS = (
    "parse protobuf",
    "stream machine",
    "decode body, profile",
    "prepare: template, split, lookups",
    "tokenise cold text",
    "finish: keys",
    "index lookup",
    "admission",
    "routing",
    "core around them",
    "book and credit",
    "build answers",
    "serialise answers",
    "response headers",
    "end of request",
)


_GROUPS = {
    "prepare: template, split, lookups": "tokenise",
    "tokenise cold text": "tokenise",
    "finish: keys": "keys",
    "index lookup": "lookup",
    "admission": "admission",
    "routing": "routing",
}


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    seed: int = 1
    rounds: int = 200
    workers: tuple[int, ...] = (10, 128, 1_024)
    conversations: tuple[Conversations, ...] = CONVERSATIONS
    digest_keys: int = DIGEST_KEYS
    output: Path = RESULTS / "hot_path.json"


class Stopwatch:
    """Milliseconds of each step of one decision."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        """Charge the time since the last lap to a step."""
        now = time.perf_counter()
        self.ms[step] += 1_000 * (now - self._last)
        self._last = time.perf_counter()

    @contextmanager
    def inside(self, owner: object, methods: dict[str, str], outer: str) -> Iterator[None]:
        """Charge calls of ``owner``'s methods to steps of their own.

        Args:
            methods: step by method name.
            outer: the step that goes on around them.
        """
        for name, step in methods.items():
            setattr(owner, name, self._wrapped(getattr(owner, name), step, outer))
        try:
            yield
        finally:
            for name in methods:
                delattr(owner, name)

    def _wrapped(
        self, method: Callable[..., object], step: str, outer: str
    ) -> Callable[..., object]:
        def timed(*arguments: object, **named: object) -> object:
            self.lap(outer)
            result = method(*arguments, **named)
            self.lap(step)
            return result

        return timed


@dataclass
class Samples:
    """Milliseconds of every round: by step, and of decisions timed as a whole."""

    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    whole: list[float] = field(default_factory=list)

    def add(self, watch: Stopwatch) -> None:
        """Keep one decision's steps."""
        for step in STEPS:
            self.steps[step].append(watch.ms[step])

    @property
    def sum_ms(self) -> float:
        """Sum of the steps' medians."""
        return sum(median(self.steps[step]) for step in STEPS)


def run(settings: Settings) -> dict[str, Any]:
    """Measure everything, print it, write the JSON and return what it holds."""
    console.print(f"seed {settings.seed}, {settings.rounds} rounds")
    cases = []
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder:
        policy = make_policy(make_model_dir(Path(folder, "model")))
        for asked in settings.conversations:
            keyer = build_keyer(policy.pools[0], policy)
            chats = _chats(asked, settings.seed)
            prefixes = [_keys(keyer, chat.body()) for chat in chats]
            for workers in settings.workers:
                rng = random.Random(f"{settings.seed} {workers}")
                held = [Held(keys, 3) for keys in prefixes]
                held.append(Held(_common(prefixes), max(3, workers // 4)))
                fleet = make_fleet(policy, workers, held, rng, keyer, settings.digest_keys)
                samples = _measure(fleet, chats, settings.rounds, f"{asked.name}, {workers}")
                cases.append(_case(asked, workers, len(chats[0].body()), samples))
        _print_cases(settings, cases)
        matches = [_match(settings, workers) for workers in settings.workers]
    _print_matches(matches)
    result = {
        "machine": machine_facts(),
        "seed": settings.seed,
        "rounds": settings.rounds,
        "digest_keys": settings.digest_keys,
        "decisions": cases,
        "match_128_blocks": matches,
    }
    write_json(settings.output, result)
    return result


def steps_by_kind(seed: int, workers: int, rounds: int = 50) -> dict[str, dict[str, float]]:
    """Milliseconds of each step by the workload's kind, and its group of steps; medians.

    Groups: ``tokenise``, ``keys``, ``lookup``, ``admission``, ``routing`` and ``rest`` (reading
    the request, the core around the others, building answers, the end).
    """
    by_kind = {}
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder:
        policy = make_policy(make_model_dir(Path(folder, "model")))
        for asked in CONVERSATIONS:
            chats = _chats(asked, seed)
            keyer = build_keyer(policy.pools[0], policy)
            held = [Held(_keys(keyer, chat.body()), 3) for chat in chats]
            fleet = make_fleet(policy, workers, held, random.Random(seed), keyer)
            samples = _measure(fleet, chats, rounds, asked.name)
            groups: dict[str, float] = defaultdict(float)
            for step in STEPS:
                groups[_GROUPS.get(step, "rest")] += median(samples.steps[step])
            by_kind[asked.kind] = dict(groups)
    return by_kind


# Decisions


def _chats(asked: Conversations, seed: int) -> list[Chat]:
    """Chats one turn short of their size, with one system prompt."""
    system = text(random.Random(seed), asked.system_bytes)
    chats = []
    for number in range(asked.chats):
        chat = Chat(random.Random(f"{seed} {number}"), system, asked.turn_bytes)
        chat.grow_to(asked.size_bytes - asked.turn_bytes)
        chats.append(chat)
    return chats


def _keys(keyer: PromptKeyer, body: bytes) -> Keys:
    """Block keys of a chat; the keyer's caches are warm with it afterwards."""
    headers = {":path": "/v1/chat/completions"}
    profile = read_request(headers, body, make_policy(Path()).requests)
    prepared = keyer.prepare(profile)
    return keyer.finish(prepared, keyer.encode_cold(prepared))[0].keys


def _common(prefixes: list[Keys]) -> Keys:
    """The keys that all chats start with."""
    shortest = min(map(len, prefixes))
    stacked = np.stack([keys[:shortest] for keys in prefixes])
    differs = np.flatnonzero((stacked != stacked[0]).any(axis=0))
    return prefixes[0][: int(differs[0]) if len(differs) else shortest]


def _measure(fleet: Fleet, chats: list[Chat], rounds: int, name: str) -> Samples:
    """Decide new turns of the chats; every other decision is timed as a whole."""
    samples = Samples()
    rng = random.Random(name)
    for number in track(range(2 * rounds), name, console=console, transient=True):
        chat = chats[number // 2 % len(chats)].branch(rng)
        dialogue = make_dialogue(chat.next_turn())
        if number % 2:
            began = time.perf_counter()
            _decide(fleet, dialogue)
            samples.whole.append(1_000 * (time.perf_counter() - began))
        else:
            samples.add(_decide_by_step(fleet, dialogue))
    return samples


def _decide(fleet: Fleet, dialogue: Dialogue) -> list[bytes]:
    """One request from Envoy's bytes to Envoy's bytes, and to its end."""
    policy, scheduler, now = fleet.policy, fleet.scheduler, fleet.now
    stream = RequestStream(policy.requests.max_body_bytes)
    step = [stream.receive(ProcessingRequest.FromString(data)) for data in dialogue.request][-1]
    assert isinstance(step.event, Arrived)
    profile = read_request(step.event.headers, step.event.body, policy.requests)
    served = scheduler.model_for(profile)
    prepared = served.keyer.prepare(profile)
    prompts = served.keyer.finish(prepared, served.keyer.encode_short(prepared))
    ticket = scheduler.arrive(served, profile, prompts, now)
    assert ticket.decision is not None
    sent = [answer.SerializeToString() for answer in stream.answer(ticket.decision)]
    started = stream.receive(ProcessingRequest.FromString(dialogue.response)).event
    assert isinstance(started, ResponseStarted)
    scheduler.response_started(ticket, started.served_by, started.attempts, now)
    sent += [answer.SerializeToString() for answer in stream.answer_response([])]
    scheduler.finish(ticket, now)
    return sent


def _decide_by_step(fleet: Fleet, dialogue: Dialogue) -> Stopwatch:
    """The same with a stopwatch."""
    policy, scheduler, now = fleet.policy, fleet.scheduler, fleet.now
    watch = Stopwatch()
    messages = [ProcessingRequest.FromString(data) for data in dialogue.request]
    watch.lap("parse protobuf")
    stream = RequestStream(policy.requests.max_body_bytes)
    step = [stream.receive(message) for message in messages][-1]
    assert isinstance(step.event, Arrived)
    watch.lap("stream machine")
    profile = read_request(step.event.headers, step.event.body, policy.requests)
    watch.lap("decode body, profile")
    served = scheduler.model_for(profile)
    prepared = served.keyer.prepare(profile)
    watch.lap("prepare: template, split, lookups")
    encoded = served.keyer.encode_short(prepared)
    watch.lap("tokenise cold text")
    prompts = served.keyer.finish(prepared, encoded)
    watch.lap("finish: keys")
    outer, pool = "core around them", served.pool
    booking = {"book": "book and credit", "credit": "book and credit"}
    with (
        watch.inside(pool.index, {"longest_runs": "index lookup"}, "routing"),
        watch.inside(served.router, {"route": "routing"}, outer),
        watch.inside(scheduler.admission, {"admit": "admission"}, outer),
        watch.inside(pool, booking, outer),
    ):
        ticket = scheduler.arrive(served, profile, prompts, now)
        watch.lap(outer)
    assert ticket.decision is not None
    watch.lap(outer)
    answers = stream.answer(ticket.decision)
    watch.lap("build answers")
    sent = [answer.SerializeToString() for answer in answers]
    watch.lap("serialise answers")
    started = stream.receive(ProcessingRequest.FromString(dialogue.response)).event
    assert isinstance(started, ResponseStarted)
    scheduler.response_started(ticket, started.served_by, started.attempts, now)
    sent += [answer.SerializeToString() for answer in stream.answer_response([])]
    watch.lap("response headers")
    scheduler.finish(ticket, now)
    watch.lap("end of request")
    return watch


def _case(asked: Conversations, workers: int, size: int, samples: Samples) -> dict[str, Any]:
    whole = median(samples.whole)
    return {
        "conversation": asked.name,
        "workers": workers,
        "body_bytes": size,
        "steps_ms": {
            step: {"median": median(each), "p99": percentile(each, 0.99)}
            for step, each in samples.steps.items()
        },
        "sum_of_medians_ms": samples.sum_ms,
        "whole_ms": {"median": whole, "p99": percentile(samples.whole, 0.99)},
        "sum_off_percent": 100 * (samples.sum_ms / whole - 1),
        "target_ms": asked.target_ms,
    }


# A match of 128 blocks


def _match(settings: Settings, workers: int) -> dict[str, Any]:
    """All workers hold all blocks, the most that a match can cost; one time each."""
    rng = random.Random(f"{settings.seed} match")
    random_keys = np.random.default_rng(settings.seed)
    keys = random_keys.integers(0, 2**64, size=MATCH_BLOCKS, dtype=np.uint64)
    fleet = _tokenless_fleet(workers, keys, rng, settings.digest_keys)
    index = fleet.served.pool.index
    times = []
    for _ in range(settings.rounds):
        began = time.perf_counter()
        runs = index.longest_runs(keys)
        times.append(1_000 * (time.perf_counter() - began))
    assert int((runs == MATCH_BLOCKS).sum()) == workers
    naive = _naive_match_ms(keys, rng, settings.digest_keys) * workers
    return {
        "workers": workers,
        "index_ms": {"median": median(times), "p99": percentile(times, 0.99)},
        "naive_ms_extrapolated": naive,
        "ratio": naive / median(times),
        "target_ms": MATCH_TARGET_MS,
    }


def _tokenless_fleet(workers: int, keys: Keys, rng: random.Random, digest_keys: int) -> Fleet:
    policy = make_policy(Path())
    pool = policy.pools[0].model_copy(update={"tokenizer": None})
    policy = policy.model_copy(update={"pools": (pool,)})
    return make_fleet(policy, workers, [Held(keys, workers)], rng, digest_keys=digest_keys)


def _naive_match_ms(keys: Keys, rng: random.Random, digest_keys: int) -> float:
    """Milliseconds a worker: ``key in filter`` until the first miss, on plain filters."""
    numbers = keys.tolist()
    filters = []
    for _ in range(_NAIVE_SAMPLE):
        plain = BloomFilter(65_536, 0.01)
        for key in [*numbers, *(rng.getrandbits(64) for _ in range(digest_keys))]:
            plain.add(key, skip_check=True)
        filters.append(plain)
    began = time.perf_counter()
    for plain in filters:
        assert all(key in plain for key in numbers)
    return 1_000 * (time.perf_counter() - began) / len(filters)


# Reporting


def _print_cases(settings: Settings, cases: list[dict[str, Any]]) -> None:
    for asked in settings.conversations:
        ours = [case for case in cases if case["conversation"] == asked.name]
        rows = [(step, *(_pair(case["steps_ms"][step]) for case in ours)) for step in STEPS]
        rows.append(("sum of medians", *(f"{case['sum_of_medians_ms']:.3f}" for case in ours)))
        rows.append(("whole decision", *(_pair(case["whole_ms"]) for case in ours)))
        rows.append(("sum is off by", *(f"{case['sum_off_percent']:+.1f}%" for case in ours)))
        goal = f", target {asked.target_ms:g} ms" if asked.target_ms is not None else ""
        title = f"{asked.name}: median / p99 ms of a decision{goal}"
        columns = ("", *(f"{case['workers']:,} workers" for case in ours))
        print_table(title, columns, rows)


def _print_matches(matches: list[dict[str, Any]]) -> None:
    rows = [
        (
            f"{match['workers']:,}",
            _pair(match["index_ms"]),
            f"{match['target_ms']:g}",
            f"{match['naive_ms_extrapolated']:.2f}",
            f"{match['ratio']:,.0f}",
        )
        for match in matches
    ]
    title = (
        f"{MATCH_BLOCKS} blocks that every worker holds; naive: pybloom-live `key in filter`, "
        f"worker by worker, extrapolated from {_NAIVE_SAMPLE}"
    )
    columns = ("workers", "index median / p99 ms", "target", "naive ms", "times faster")
    print_table(title, columns, rows)


def _pair(figures: dict[str, float]) -> str:
    return f"{figures['median']:.3f} / {figures['p99']:.3f}"


def main(
    seed: Annotated[int, typer.Option(help="Of every text, key and tie-break.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Decisions of each kind.")] = 200,
    workers: Annotated[list[int] | None, typer.Option(min=1, help="Repeat for each.")] = None,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "hot_path.json",
) -> None:
    """Time of each step of a decision."""
    sizes = tuple(workers) if workers else (10, 128, 1_024)
    run(Settings(seed=seed, rounds=rounds, workers=sizes, output=output))


if __name__ == "__main__":
    typer.run(main)
