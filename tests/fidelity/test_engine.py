"""Cache, events, metrics, limits and aborts: what the engine does behind the API."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest

from tests.fidelity.conftest import Book
from tests.fidelity.shapes import shape
from tests.fidelity.subject import ADAPTER, BLOCKS, MAX_QUEUED, Json, Subject
from tests.support.system import MODEL, SLOTS
from tests.support.vllm import BLOCK_TOKENS
from workers.simulator.model import VOCAB_SIZE
from workers.vllm_model import ADAPTERS

COMPLETIONS = "/v1/completions"


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


class TestCache:
    async def test_salts_keep_caches_apart(self, subject: Subject, book: Book) -> None:
        prompt = ids(100, seed=1)
        salts = (None, "a", "a", "b", None)
        cached = [await subject.cached(prompt, cache_salt=salt) for salt in salts]
        book.compare("cached with salts", dict(zip(map(str, range(5)), cached, strict=True)))

    async def test_adapters_have_caches_of_their_own(self, subject: Subject, book: Book) -> None:
        prompt = ids(100, seed=2)
        models = (MODEL, ADAPTER, ADAPTER, ADAPTERS[1], MODEL)
        book.compare(
            "cached with adapters", [await subject.cached(prompt, model=name) for name in models]
        )

    @pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 96, 100])
    async def test_the_last_token_is_never_cached(
        self, subject: Subject, book: Book, tokens: int
    ) -> None:
        prompt = ids(tokens, seed=100 + tokens)
        cached = [await subject.cached(prompt) for _ in range(2)]
        book.compare(f"cached of {tokens} tokens", cached)

    async def test_a_longer_prompt_hits_the_shorter(self, subject: Subject, book: Book) -> None:
        prompt = ids(200, seed=3)
        cached = [await subject.cached(prompt[:size]) for size in (70, 130, 200, 130)]
        other = await subject.cached([*prompt[:64], *ids(64, seed=4)])
        book.compare("cached of a growing prompt", [*cached, other])

    async def test_answers_are_cached_too(self, subject: Subject, book: Book) -> None:
        prompt = ids(50, seed=5)
        options = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        answer = await subject.complete(prompt, **options)
        answered = answer["choices"][0]["token_ids"]
        assert len(answered) == 40
        again = await subject.cached([*prompt, *answered, *ids(20, seed=6)])
        book.compare("cached of an answer", again)

    async def test_counters_count_tokens_asked_for_and_found(
        self, subject: Subject, book: Book
    ) -> None:
        names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
                 "prompt_tokens_cached_total", "generation_tokens_total")  # fmt: skip
        before = [await subject.metric(name) for name in names]
        for _ in range(3):
            await subject.complete(ids(100, seed=7), max_tokens=4, ignore_eos=True)
        after = [await subject.metric(name) for name in names]
        grown = [new - old for new, old in zip(after, before, strict=True)]
        book.compare("counters", dict(zip(names, grown, strict=True)))

    async def test_a_reset_cache_is_empty(self, subject: Subject, book: Book) -> None:
        await subject.idle()
        prompt = ids(100, seed=8)
        assert await subject.cached(prompt) == 0
        assert await subject.cached(prompt) > 0
        reset = await subject.post("/reset_prefix_cache", {})
        book.compare("reset", [reset.status_code, await subject.cached(prompt)])

    async def test_the_oldest_blocks_give_way(self, subject: Subject, book: Book) -> None:
        first = ids(320, seed=9)
        await subject.cached(first)
        for seed in range(20, 20 + BLOCKS // 50):
            await subject.cached(ids(50 * BLOCK_TOKENS, seed=seed))
        book.compare("cached after an overflow", await subject.cached(first))


class TestEvents:
    @pytest.fixture(autouse=True)
    async def _empty_cache(self, subject: Subject) -> None:
        """Nothing has to give way, and the reset has been told."""
        await subject.idle()
        await subject.post("/reset_prefix_cache", {})
        await subject.complete(ids(40, seed=29))

    async def events(self, subject: Subject, *requests: Json, at_least: int = 1) -> list[Any]:
        start = await subject.next_number()
        for request in requests:
            await subject.complete(**request)
        return await subject.batches_since(start, at_least)

    async def test_a_batch_and_its_event_have_their_fields(
        self, subject: Subject, book: Book
    ) -> None:
        prompt = ids(100, seed=30)
        ((time, (event,), rank),) = await self.events(subject, {"prompt": prompt})
        assert time > 1e9
        assert event["token_ids"] == prompt[:96]
        book.compare("stored event", [shape(event), rank])
        known = ("type", "parent_block_hash", "block_size", "lora_id", "medium", "lora_name",
                 "extra_keys", "group_idx", "kv_cache_spec_kind")  # fmt: skip
        facts = {name: event.get(name) for name in known}
        book.compare("stored event's values", facts)
        assert len(event["block_hashes"]) == 3

    async def test_a_longer_prompt_continues_the_chain(self, subject: Subject, book: Book) -> None:
        prompt = ids(200, seed=31)
        batches = await self.events(
            subject, {"prompt": prompt[:100]}, {"prompt": prompt}, at_least=2
        )
        (first,), (second,) = (batch[1] for batch in batches)
        assert second["parent_block_hash"] == first["block_hashes"][-1]
        assert second["token_ids"] == prompt[96:192]
        book.compare("continued chain", [len(first["block_hashes"]), len(second["block_hashes"])])

    async def test_what_is_cached_is_not_told_again(self, subject: Subject, book: Book) -> None:
        prompt = ids(100, seed=32)
        marker = {"prompt": ids(40, seed=33)}
        batches = await self.events(
            subject, {"prompt": prompt}, {"prompt": prompt}, marker, at_least=2
        )
        told = [[event["type"], len(event["block_hashes"])] for _, es, _ in batches for event in es]
        book.compare("events of a repeated prompt", told)

    async def test_the_last_block_of_a_full_prompt_is_told_each_time(
        self, subject: Subject, book: Book
    ) -> None:
        request = {"prompt": ids(96, seed=34)}
        batches = await self.events(subject, request, request, request, at_least=3)
        stored = [event for _, events, _ in batches for event in events]
        book.compare("events of a prompt of full blocks", [len(e["block_hashes"]) for e in stored])
        assert len({e["block_hashes"][-1] for e in stored}) == 1

    async def test_salts_and_adapters_are_in_the_extra_keys(
        self, subject: Subject, book: Book
    ) -> None:
        prompt = ids(70, seed=35)
        batches = await self.events(
            subject,
            {"prompt": prompt, "cache_salt": "pepper"},
            {"prompt": prompt, "model": ADAPTER},
            {"prompt": prompt, "model": ADAPTER, "cache_salt": "pepper"},
            at_least=3,
        )
        facts = [
            {name: event[name] for name in ("extra_keys", "lora_id", "lora_name")}
            for _, events, _ in batches
            for event in events
        ]
        book.compare("extra keys", facts)

    async def test_an_answer_is_told_block_by_block(self, subject: Subject, book: Book) -> None:
        request = {"prompt": ids(40, seed=36), "max_tokens": 100, "ignore_eos": True}
        batches = await self.events(subject, request, at_least=4)
        facts = [[len(event["block_hashes"]) for event in events] for _, events, _ in batches]
        book.compare("events of an answer", facts)

    async def test_a_long_prompt_is_told_by_chunks(self, subject: Subject, book: Book) -> None:
        batches = await self.events(subject, {"prompt": ids(5_000, seed=37)}, at_least=3)
        stored = [
            [len(event["block_hashes"]) for event in events if event["type"] == "BlockStored"]
            for _, events, _ in batches
        ]
        book.compare("events of a long prompt", stored)

    async def test_blocks_that_give_way_are_told_one_by_one(
        self, subject: Subject, book: Book
    ) -> None:
        requests = [{"prompt": ids(60 * BLOCK_TOKENS, seed=40 + n)} for n in range(7)]
        batches = await self.events(subject, *requests, at_least=7)
        removed = [e for _, es, _ in batches for e in es if e["type"] == "BlockRemoved"]
        assert removed
        book.compare("removed event", shape(removed[0]))
        assert {len(event["block_hashes"]) for event in removed} == {1}
        mixed = [[e["type"] for e in events] for _, events, _ in batches][-1]
        book.compare("order of a batch", sorted(set(mixed), key=mixed.index))

    async def test_a_reset_is_told_with_the_next_step(self, subject: Subject, book: Book) -> None:
        await subject.idle()
        await subject.complete(ids(40, seed=50))
        start = await subject.next_number()
        await subject.post("/reset_prefix_cache", {})
        await asyncio.sleep(0.3)
        assert await subject.next_number() == start
        await subject.complete(ids(40, seed=51))
        batches = await subject.batches_since(start)
        book.compare("events of a reset", [[e["type"] for e in events] for _, events, _ in batches])
        book.compare("cleared event", shape(batches[0][1][0]))

    async def test_a_session_is_named_in_its_events(self, subject: Subject, book: Book) -> None:
        start = await subject.next_number()
        body = {"model": MODEL, "prompt": ids(40, seed=52), "max_tokens": 1}
        await subject.post(COMPLETIONS, body, headers={"X-Session-ID": "s1"})
        ((_, (event,), _),) = await subject.batches_since(start)
        book.compare("session", event.get("session_id"))

    async def test_a_replay_ends_with_its_mark(self, subject: Subject, book: Book) -> None:
        number = await subject.next_number()
        *batches, end = await subject.replay(number - 2)
        numbers = [int.from_bytes(frame[2], "big") - number for frame in batches]
        beyond = await subject.replay(number + 1_000)
        facts = [numbers, [len(f) for f in batches], [f.hex() for f in end], len(beyond)]
        book.compare("replay", facts)


ROUTED_BY = re.compile(r"^# TYPE (vllm:\S+) (\w+)$", re.MULTILINE)


class TestMetrics:
    async def test_families_have_their_types_and_labels(self, subject: Subject, book: Book) -> None:
        await subject.complete(ids(40, seed=60), model=ADAPTER, max_tokens=3)
        page = await subject.metrics_page()
        families = {}
        for name, kind in ROUTED_BY.findall(page):
            sample = re.search(rf"^{name}(?:_bucket|_sum)?\{{(.*?)\}} ", page, re.MULTILINE)
            labels = sorted(re.findall(r"(\w+)=\"", sample[1])) if sample else []
            families[name] = [kind, labels]
        for name in FAMILIES:
            book.compare(f"metric {name}", families.get(f"vllm:{name}"))

    async def test_running_and_waiting_are_counted(self, subject: Subject, book: Book) -> None:
        await subject.idle()
        tasks = [asyncio.create_task(long_answer(subject, seed=n)) for n in range(SLOTS + 1)]
        await subject.until("num_requests_running", SLOTS)
        await subject.until("num_requests_waiting", 1)
        facts = {
            "running": await subject.metric("num_requests_running"),
            "waiting": await subject.metric("num_requests_waiting"),
            "by capacity": await subject.metric("num_requests_waiting_by_reason", "capacity"),
            "load": (await subject.get("/load")).json(),
            "cache in use": await subject.metric("kv_cache_usage_perc") > 0,
        }
        await cancel(tasks)
        await subject.idle()
        facts["cache in use later"] = await subject.metric("kv_cache_usage_perc")
        book.compare("gauges", facts)

    async def test_the_cache_config_tells_its_size(self, subject: Subject, book: Book) -> None:
        page = await subject.metrics_page()
        line = next(x for x in page.splitlines() if x.startswith("vllm:cache_config_info{"))
        labels = dict(re.findall(r"(\w+)=\"(.*?)\"", line))
        names = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "engine",
                 "kv_cache_size_tokens")  # fmt: skip
        book.compare("cache config", {name: labels.get(name) for name in names})

    async def test_histograms_count_requests_and_tokens(self, subject: Subject, book: Book) -> None:
        names = tuple(f"{name}_seconds_count" for name in (
            "time_to_first_token", "inter_token_latency", "e2e_request_latency",
            "request_queue_time",
        ))  # fmt: skip
        before = [await subject.metric(name) for name in names]
        ended = await subject.metric("request_success_total", 'finished_reason="length"')
        for _ in range(2):
            await subject.complete(ids(40, seed=61), max_tokens=5, ignore_eos=True)
        after = [await subject.metric(name) for name in names]
        grown: Json = dict(
            zip(names, (b - a for a, b in zip(before, after, strict=True)), strict=True)
        )
        grown["length"] = await subject.metric("request_success_total", "length") - ended
        book.compare("histograms", grown)


FAMILIES = (
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
    "engine_sleep_state", "kv_cache_usage_perc", "num_preemptions_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total",
    "prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total",
    "request_success_total", "admission_rejections_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
    "lora_requests_info",
)  # fmt: skip


async def long_answer(subject: Subject, seed: int, **fields: Any) -> int:
    body = {"model": MODEL, "prompt": ids(20, seed=1_000 + seed), "max_tokens": 7_000}
    answer = await subject.post(COMPLETIONS, {**body, "ignore_eos": True, **fields})
    return answer.status_code


async def filled_queue(subject: Subject) -> list[asyncio.Task[int]]:
    """As many long requests as the engine takes; those refused while it forgets others again."""
    tasks: list[asyncio.Task[int]] = []
    async with asyncio.timeout(30):
        while await subject.metric("num_requests_waiting") != MAX_QUEUED - SLOTS:
            tasks = [task for task in tasks if not task.done()]
            for _ in range(MAX_QUEUED - len(tasks)):
                tasks.append(asyncio.create_task(long_answer(subject, seed=len(tasks))))
            await asyncio.sleep(0.02)
    return tasks


async def cancel(tasks: list[asyncio.Task[int]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TestLimits:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_full_queue_refuses_at_once(
        self, subject: Subject, book: Book, stream: bool
    ) -> None:
        await subject.idle()
        name = "admission_rejections_total"
        tasks = await filled_queue(subject)
        refused_before = await subject.metric(name, "max_num_queued_reqs")
        body = {"model": MODEL, "prompt": "x", "stream": stream}
        answer = await subject.post(COMPLETIONS, body)
        health = (await subject.get("/health")).status_code
        await cancel(tasks)
        await subject.idle()
        error = answer.json()["error"]
        facts: Json = {
            "status": answer.status_code,
            "error": {k: error[k] for k in ("type", "param", "code")},
            "shape": shape(answer.json()),
            "retry-after": "retry-after" in answer.headers,
            "counted": await subject.metric(name, "max_num_queued_reqs") - refused_before,
            "health": health,
        }
        book.compare(f"full queue, {'streamed' if stream else 'whole'}", facts)


class TestAbort:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_client_that_leaves_is_taken_out(
        self, subject: Subject, book: Book, stream: bool
    ) -> None:
        await subject.idle()
        aborts = await subject.metric("request_success_total", 'finished_reason="abort"')
        tasks = [asyncio.create_task(long_answer(subject, seed=1, stream=stream))]
        await subject.until("num_requests_running", 1)
        await cancel(tasks)
        await subject.until("num_requests_running", 0, limit_s=5)
        facts = {
            "load": (await subject.get("/load")).json(),
            "aborts": await subject.metric("request_success_total", 'finished_reason="abort"')
            - aborts,
        }
        book.compare(f"abort, {'streamed' if stream else 'whole'}", facts)
