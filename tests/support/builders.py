"""Builders of core objects with defaults: a test states only what differs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from extproc.cache.digest import HASH_NAME, WIRE_VERSION, BlockDigest, DigestShape
from extproc.cache.feed import Delta, Snapshot
from extproc.decision.ticket import ServedModel, Ticket
from extproc.errors import Refusal
from extproc.fleet.pool import Pool
from extproc.fleet.worker import Introduction, LoadReport, Worker, WorkerState
from extproc.policy import Policy, PoolPolicy, ReportPolicy, TokenizationPolicy, parse_policy
from extproc.request.profile import ChatPrompt, Endpoint, Prompt, RequestProfile
from extproc.scheduler import Scheduler
from extproc.tokens.blocks import Keys, block_keys, root_key
from extproc.tokens.keyer import PromptKeyer, PromptKeys
from extproc.tokens.template import ChatTemplate
from extproc.tokens.tokenizer import SegmentTokenizer

MODEL = "sim"
BLOCK = 4
CAPACITY = 500
ERROR_RATE = 0.001

Json = dict[str, Any]


def address(number: int) -> str:
    return f"10.0.0.{number}:8000"


def pool_policy(**changes: Any) -> PoolPolicy:
    """A pool of small blocks and digests; sections are given as plain dicts."""
    defaults: Json = {
        "model": MODEL,
        "block_size_tokens": BLOCK,
        "digest": {"capacity_blocks": CAPACITY, "error_rate": ERROR_RATE},
    }
    return PoolPolicy.model_validate(defaults | changes)


def policy(*pools: PoolPolicy, **changes: Any) -> Policy:
    return parse_policy({"pools": list(pools or (pool_policy(),)), **changes})


def pool(reports: ReportPolicy | None = None, now: float = 0.0, **changes: Any) -> Pool:
    return Pool(pool_policy(**changes), reports or ReportPolicy(), now)


def keyer(
    tokenizer: SegmentTokenizer | None = None,
    template: ChatTemplate | None = None,
    *,
    pool: PoolPolicy | None = None,
    tokenization: TokenizationPolicy | None = None,
    max_prompts: int = 16,
    media_part_tokens: int = 576,
    **changes: Any,
) -> PromptKeyer:
    return PromptKeyer(
        pool or pool_policy(),
        tokenization or TokenizationPolicy(),
        tokenizer,
        template,
        max_prompts=max_prompts,
        media_part_tokens=media_part_tokens,
        **changes,
    )


@cache
def tokenizer_of(model_dir: Path) -> SegmentTokenizer:
    return SegmentTokenizer.load(model_dir)


@cache
def template_of(model_dir: Path) -> ChatTemplate:
    template = ChatTemplate.load(model_dir)
    assert template is not None
    return template


def model_keyer(model_dir: Path, **changes: Any) -> PromptKeyer:
    """A keyer with the simulator's tokenizer and ChatML template."""
    return keyer(tokenizer_of(model_dir), template_of(model_dir), **changes)


def keyed(keyer: PromptKeyer, profile: RequestProfile) -> list[PromptKeys]:
    """The three steps of keying, in one."""
    prepared = keyer.prepare(profile)
    return keyer.finish(prepared, keyer.encode_cold(prepared))


def keyed_one(keyer: PromptKeyer, prompt: Prompt, **changes: Any) -> PromptKeys:
    (keys,) = keyed(keyer, profile(prompt, **changes))
    return keys


def profile(*prompts: Prompt, **changes: Any) -> RequestProfile:
    defaults: Json = {"endpoint": Endpoint.CHAT, "model": MODEL}
    return RequestProfile(prompts=prompts, **(defaults | changes))


def pass_through(*, counted: bool = True, model: str | None = None) -> RequestProfile:
    return RequestProfile(Endpoint.PASS, model=model, counted=counted)


def chat(*texts: str, **changes: Any) -> ChatPrompt:
    """A chat whose user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return ChatPrompt(messages, **changes)


def keys_of(token_ids: Sequence[int], salt: str = "") -> Keys:
    """Keys of all full blocks of these tokens."""
    return block_keys(root_key(7, BLOCK, "", salt), [*token_ids, 0], BLOCK)


def prompt_keys(token_ids: Sequence[int], salt: str = "") -> PromptKeys:
    """A keyed prompt: the tokens and one more, which no cache can serve."""
    return PromptKeys(len(token_ids) + 1, keys_of(token_ids, salt), exact=True)


def text_blocks(seed: int, blocks: int) -> list[int]:
    """Token ids of a text of so many blocks, another for every seed."""
    return random.Random(seed).choices(range(10_000), k=blocks * BLOCK)


def no_keys() -> Keys:
    return np.empty(0, dtype=np.uint64)


def digest_of(keys: Keys, size: DigestShape | None = None) -> BlockDigest:
    size = size or shape()
    digest = BlockDigest(size.capacity, size.error_rate)
    digest.add_keys(keys)
    return digest


def snapshot(keys: Keys | None = None, size: DigestShape | None = None, **changes: Any) -> Snapshot:
    """A snapshot that fits :func:`pool_policy`; ``bits`` given alone gets its checksum."""
    digest = digest_of(no_keys() if keys is None else keys, size)
    made = digest.shape
    fields: Json = {
        "version": WIRE_VERSION,
        "epoch": 1,
        "sequence": 1,
        "block_size_tokens": BLOCK,
        "capacity": made.capacity,
        "error_rate": made.error_rate,
        "num_slices": made.num_slices,
        "bits_per_slice": made.bits_per_slice,
        "hash_name": HASH_NAME,
        "count": digest.count,
        "bits": digest.packed(),
        **changes,
    }
    return Snapshot(**{"checksum": xxh3_64_intdigest(fields["bits"]), **fields})


def delta(keys: Keys, epoch: int = 1, sequence: int = 2) -> Delta:
    return Delta(epoch, sequence, keys.astype("<u8").tobytes())


def shape() -> DigestShape:
    return DigestShape(CAPACITY, ERROR_RATE)


def ready(**changes: Any) -> LoadReport:
    return LoadReport(**{"state": WorkerState.READY, "running": 0.0, "waiting": 0.0, **changes})


def hello(number: int, **changes: Any) -> Introduction:
    return Introduction(**{"address": address(number), "models": (MODEL,), **changes})


def join(
    pool: Pool,
    number: int,
    *,
    now: float = 0.0,
    slots: int = 0,
    sends_digests: bool = True,
    **report: Any,
) -> Worker:
    """A worker whose agent said hello and reported."""
    worker = pool.hello(hello(number, max_running=slots, sends_digests=sends_digests), now)
    assert worker is not None
    pool.report(worker, ready(**report), now)
    return worker


class Fleet:
    """A scheduler of one pool, and the workers that joined it."""

    def __init__(self, *, workers: int = 0, slots: int = 0, seed: int = 1, **pool: Any) -> None:
        self.scheduler = scheduler(pool_policy(**pool), seed=seed)
        self.served: ServedModel = self.scheduler.models[MODEL]
        self.pool = self.served.pool
        self.admission = self.scheduler.admission
        self.workers = [join(self.pool, number, slots=slots) for number in range(workers)]

    def arrive(
        self, *prompts: PromptKeys, now: float = 0.0, profile: RequestProfile | None = None
    ) -> Ticket:
        return self.scheduler.arrive(self.served, profile or _CHAT, prompts, now)

    def picked(self, *prompts: PromptKeys, now: float = 0.0) -> str:
        """Address of the worker that gets a request which ends at once."""
        ticket = self.arrive(*prompts, now=now)
        assert ticket.decision is not None
        self.scheduler.finish(ticket, now)
        return ticket.decision.endpoints[0]

    def held(self, worker: Worker) -> tuple[int, int]:
        """Requests in flight and pending prefill tokens of a worker."""
        table = self.pool.table
        column = worker.column
        return int(table.in_flight[column]), int(table.pending_prefill_tokens[column])

    def idle(self) -> bool:
        """Nothing runs, waits or is booked."""
        table = self.pool.table
        counts = (self.admission.running, self.admission.waiting)
        return (
            not any(counts)
            and not table.in_flight.any()
            and not (table.pending_prefill_tokens.any())
        )


_CHAT = RequestProfile(Endpoint.CHAT, model=MODEL)


def scheduler(
    *pools: PoolPolicy,
    seed: int = 1,
    keyers: Mapping[str, PromptKeyer] | None = None,
    **changes: Any,
) -> Scheduler:
    whole = policy(*pools, **changes)
    made = keyers or {each.model: keyer(pool=each) for each in whole.pools}
    return Scheduler(whole, made, random.Random(seed), now=0.0)


def refusal_of(kind: type[Refusal], **changes: Any) -> Refusal:
    return kind("No.", **changes)
