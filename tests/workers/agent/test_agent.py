"""The agent against a real gRPC server, real ZMQ sockets and a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extproc.cache.digest import BlockDigest, DigestShape
from extproc.generated.kvgate.v1 import agent_pb2
from extproc.tokens.blocks import Keys, block_keys, root_key
from tests.support.engine import FakeEngine, FakeFleet, FakePublisher, running, until
from tests.workers.agent.reader import Reader
from tests.workers.agent.told import INSTANCE
from workers.agent import main
from workers.agent.agent import Agent
from workers.agent.scheduler_link import Backoff
from workers.agent.settings import Settings, parse_settings
from workers.engine_errors import EngineError
from workers.request_events import Ended, FirstChunk, Hello, Started, encode

SIZE = 4


def stored(number: int, parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": parent,
        "token_ids": [number] * SIZE,
        "block_size": SIZE,
        "medium": "GPU",
        "extra_keys": [None],
        "group_idx": 0,
    }


def keys_of(*numbers: int, namespace: int = 7) -> Keys:
    """Keys of one-block prompts."""
    root = root_key(namespace, SIZE)
    keys = [block_keys(root, [number] * 5, SIZE) for number in numbers]
    return np.concatenate([np.zeros(0, dtype=np.uint64), *keys])


def holds(snapshot: agent_pb2.DigestSnapshot, keys: Keys) -> bool:
    shape = DigestShape(snapshot.capacity, snapshot.error_rate)
    digest = BlockDigest.from_packed(shape, snapshot.bits, snapshot.count, snapshot.checksum)
    return bool(digest.contains_keys(keys).all())


class Rig:
    """An engine, a scheduler and the agent between them."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.publisher = FakePublisher()
        self.fleet = FakeFleet()
        self.agent: Agent | None = None

    def settings(self, *fleets: FakeFleet, replay: bool = True, **more: Any) -> Settings:
        return Settings(
            engine=self.engine.url,
            address=f"127.0.0.1:{self.engine.port}",
            schedulers=tuple(fleet.target for fleet in fleets or (self.fleet,)),
            kv_events=self.publisher.events,
            kv_replay=self.publisher.replay if replay else "",
            max_running=8,
            **more,
        )

    @contextlib.asynccontextmanager
    async def agent_running(self, settings: Settings | None = None) -> AsyncIterator[None]:
        self.leave, at_once = asyncio.Event(), asyncio.Event()
        self.agent = Agent(settings or self.settings(), rng=random.Random(1))
        self.task = task = asyncio.create_task(self.agent.run(self.leave, at_once))
        try:
            yield
        finally:
            self.leave.set()
            at_once.set()
            async with asyncio.timeout(10):
                await task

    async def snapshot(self, count: int, stream: int = -1) -> agent_pb2.DigestSnapshot:
        """The newest snapshot, once it has so many keys."""

        def newest() -> Any:
            found = self.fleet.heard("snapshot", stream)
            return found[-1] if found and found[-1].count == count else None

        return await until(newest)

    def reader(self, tier: int = agent_pb2.TIER_DEVICE) -> Reader:
        """What the scheduler believes, from all it has heard on the newest stream."""
        settings = self.fleet.settings
        capacity, error_rate = settings.digest_capacity, settings.digest_error_rate
        return Reader(capacity, error_rate, SIZE, tier).hear(self.fleet.streams[-1])

    async def keys(self, *numbers: int) -> None:
        """Wait until the scheduler believes in these blocks, and in no others."""
        wanted = keys_of(*numbers)

        def told() -> bool:
            reader = self.reader() if self.fleet.streams else None
            return reader is not None and reader.feed.count == len(wanted) and reader.holds(wanted)

        await until(told)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    async with running(rig.engine, rig.publisher, rig.fleet):
        yield rig


async def test_hello_comes_first_with_the_base_model_before_adapters(rig: Rig) -> None:
    rig.engine.models = [{"id": "ad1", "parent": "tiny"}, {"id": "tiny", "parent": None}]
    async with rig.agent_running():
        await until(lambda: rig.fleet.heard("load"))
    first = rig.fleet.streams[0][0].hello
    assert first.address == f"127.0.0.1:{rig.engine.port}"
    assert list(first.models) == ["tiny", "ad1"]
    assert first.max_running == 8
    assert first.agent_version


async def test_the_load_of_the_engine_is_told(rig: Rig) -> None:
    async with rig.agent_running():
        load = (await until(lambda: rig.fleet.heard("load")))[0]
    assert (load.ready, load.running, load.waiting, load.kv_usage) == (True, 2.0, 1.0, 0.25)
    assert load.kv_blocks == 300


async def test_what_was_cached_before_the_agent_started_is_told(rig: Rig) -> None:
    await rig.publisher.publish(stored(1), stored(2))
    async with rig.agent_running():
        await rig.keys(1, 2)


async def test_new_blocks_are_told_as_deltas_with_a_growing_sequence(rig: Rig) -> None:
    async with rig.agent_running():
        await rig.publisher.subscribed()
        await rig.snapshot(0)
        for number in range(1, 4):
            await rig.publisher.publish(stored(number))
            await rig.keys(*range(1, number + 1))
    digests = [m for m in rig.fleet.streams[0] if m.HasField("snapshot") or m.HasField("delta")]
    sequences = [m.snapshot.sequence or m.delta.sequence for m in digests]
    assert sequences == list(range(1, len(digests) + 1))
    assert rig.fleet.heard("delta")


async def test_a_resync_is_answered_by_a_snapshot(rig: Rig) -> None:
    await rig.publisher.publish(stored(1))
    async with rig.agent_running():
        await rig.keys(1)
        told = len(rig.fleet.heard("snapshot"))
        await rig.fleet.tell(resync=agent_pb2.Resync(reason="sequence"))
        await until(lambda: len(rig.fleet.heard("snapshot")) > told)
        assert holds(rig.fleet.heard("snapshot")[-1], keys_of(1))


async def test_a_cleared_cache_is_an_empty_snapshot_of_a_higher_epoch(rig: Rig) -> None:
    await rig.publisher.publish(stored(1))
    async with rig.agent_running():
        await rig.keys(1)
        await rig.publisher.subscribed()
        before = rig.fleet.heard("snapshot")[-1].epoch
        await rig.publisher.publish({"type": "AllBlocksCleared"})
        await until(lambda: rig.fleet.heard("snapshot")[-1].epoch > before)
        assert rig.fleet.heard("snapshot")[-1].count == 0


async def test_event_numbers_that_go_back_empty_the_digest(rig: Rig) -> None:
    await rig.publisher.publish(stored(1))
    await rig.publisher.publish(stored(2))
    async with rig.agent_running():
        await rig.keys(1, 2)
        before = rig.fleet.heard("snapshot")[-1].epoch
        await rig.publisher.stop()
        await rig.publisher.start()
        await rig.publisher.subscribed()
        await rig.publisher.publish(stored(3))
        await until(lambda: rig.fleet.heard("snapshot")[-1].epoch > before)
        await rig.keys(3)


async def test_another_process_start_time_empties_the_digest(rig: Rig) -> None:
    await rig.publisher.publish(stored(1))
    async with rig.agent_running():
        await rig.keys(1)
        before = rig.fleet.heard("snapshot")[-1].epoch
        rig.publisher.events_at.clear()
        rig.engine.started += 60
        await until(lambda: rig.fleet.heard("snapshot")[-1].epoch > before)
        await rig.snapshot(0)


async def test_a_dead_engine_is_not_ready_and_comes_back_empty(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvgate.agent")
    await rig.publisher.publish(stored(1))
    async with rig.agent_running():
        await rig.keys(1)
        before = rig.fleet.heard("snapshot")[-1].epoch
        rig.publisher.events_at.clear()
        await rig.engine.stop()
        await until(lambda: not rig.fleet.heard("load")[-1].ready)
        await until(lambda: rig.fleet.heard("snapshot")[-1].epoch > before)
        await rig.snapshot(0)
        await rig.engine.start()
        await until(lambda: rig.fleet.heard("load")[-1].ready)
    lines = [line for line in caplog.messages if line.startswith("engine is")]
    assert lines == [
        "engine is ready, models: tiny",
        "engine is not ready: no answer",
        "engine is ready, models: tiny",
    ]


async def test_a_sleeping_engine_is_not_ready_and_has_an_empty_digest(rig: Rig) -> None:
    await rig.publisher.publish(stored(1))
    async with rig.agent_running():
        await rig.keys(1)
        rig.engine.awake = 0.0
        await until(lambda: not rig.fleet.heard("load")[-1].ready)
        await rig.snapshot(0)


async def test_a_broken_page_keeps_numbers_for_a_while_and_then_drops_them(rig: Rig) -> None:
    async with rig.agent_running():
        await until(lambda: rig.fleet.heard("load"))
        rig.engine.page = "<html>busy</html>"
        load = await until(lambda: [m for m in rig.fleet.heard("load") if m.age_s > 0.1])
        assert load[0].running == 2.0
        await until(lambda: not rig.fleet.heard("load")[-1].HasField("running"))
        assert rig.fleet.heard("load")[-1].ready


async def test_a_broken_stream_is_opened_anew_with_a_snapshot(rig: Rig) -> None:
    await rig.publisher.publish(stored(1))
    async with rig.agent_running():
        await rig.keys(1)
        await rig.fleet.stop()
        await rig.fleet.start()
        await until(lambda: len(rig.fleet.streams) == 2)
        snapshot = await rig.snapshot(1, stream=1)
        assert (snapshot.sequence, holds(snapshot, keys_of(1))) == (1, True)
        assert rig.fleet.streams[1][0].HasField("hello")


async def test_a_scheduler_that_starts_late_gets_the_full_state(rig: Rig) -> None:
    late = FakeFleet()
    await late.start()
    await late.stop()
    await rig.publisher.publish(stored(1))
    async with rig.agent_running(rig.settings(rig.fleet, late)):
        await rig.keys(1)
        async with running(late):
            await until(lambda: late.heard("snapshot"))
            assert holds(late.heard("snapshot")[0], keys_of(1))
            assert late.heard("hello")
            assert late.heard("load")


async def test_an_agent_waits_for_its_engine(rig: Rig) -> None:
    await rig.engine.stop()
    async with rig.agent_running():
        agent = rig.agent
        assert agent is not None
        await until(lambda: agent._engine.answer)
        assert rig.fleet.streams == []
        await rig.engine.start()
        await until(lambda: rig.fleet.heard("load"))


async def test_adapters_that_come_and_go_are_told_in_loads(rig: Rig) -> None:
    async with rig.agent_running():
        await until(lambda: rig.fleet.heard("load"))
        rig.engine.models = [{"id": "tiny"}, {"id": "ad1", "parent": "tiny"}]
        await until(lambda: list(rig.fleet.heard("load")[-1].adapters) == ["ad1"])
        rig.engine.models = [{"id": "tiny"}]
        await until(lambda: not rig.fleet.heard("load")[-1].adapters)
    assert len(rig.fleet.streams) == 1


async def test_another_base_model_is_told_by_a_new_hello(rig: Rig) -> None:
    async with rig.agent_running():
        await until(lambda: rig.fleet.heard("load"))
        rig.engine.models = [{"id": "large"}]
        await until(lambda: len(rig.fleet.streams) == 2 and rig.fleet.heard("snapshot"))
        assert list(rig.fleet.streams[1][0].hello.models) == ["large"]
        assert rig.fleet.ended == [0]


async def test_a_new_namespace_is_filled_by_replay(rig: Rig) -> None:
    await rig.publisher.publish(stored(1))
    async with rig.agent_running():
        await rig.keys(1)
        settings = agent_pb2.PoolSettings()
        settings.CopyFrom(rig.fleet.settings)
        settings.key_namespace = 8
        await rig.fleet.tell(settings=settings)
        await until(
            lambda: (
                any(
                    snapshot.count and holds(snapshot, keys_of(1, namespace=8))
                    for snapshot in rig.fleet.heard("snapshot")
                )
                or any(
                    delta.added_keys == keys_of(1, namespace=8).astype("<u8").tobytes()
                    for delta in rig.fleet.heard("delta")
                )
            )
        )


async def test_unusable_settings_leave_the_load_flowing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.fleet.settings.digest_capacity = 2**40
    async with rig.agent_running():
        await until(lambda: len(rig.fleet.heard("load")) > 1)
        assert rig.fleet.heard("snapshot") == []
    assert "unusable settings" in caplog.text


async def test_a_lost_event_without_replay_empties_the_digest(rig: Rig) -> None:
    async with rig.agent_running(rig.settings(replay=False)):
        await rig.publisher.subscribed()
        await rig.publisher.publish(stored(1))
        await rig.keys(1)
        await rig.publisher.publish(stored(2), heard=False)
        await rig.publisher.publish(stored(3))
        await rig.keys(3)


async def test_a_slow_scheduler_makes_nothing_pile_up(rig: Rig) -> None:
    rig.fleet.settings.digest_capacity = 20_000
    async with rig.agent_running():
        await rig.publisher.subscribed()
        await rig.snapshot(0)
        rig.fleet.reading.clear()
        agent = rig.agent
        assert agent is not None
        for first in range(0, 15_000, 1_000):
            await rig.publisher.publish(*map(stored, range(first + 1, first + 1_001)))
        books = agent._cache._listeners
        await until(lambda: all(len(ledger) == 15_000 for ledger in books.values()))
        assert all(book.pending_keys <= 4_000 for book in books)  # type: ignore[attr-defined]
        rig.fleet.reading.set()
        await rig.keys(*range(1, 15_001))


async def test_it_stops_with_its_streams_closed_in_order(rig: Rig) -> None:
    async with rig.agent_running():
        await until(lambda: rig.fleet.heard("snapshot"))
    assert rig.fleet.ended == [0]


async def test_nothing_of_the_prompt_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvgate.agent")
    async with rig.agent_running():
        await rig.publisher.subscribed()
        event = {**stored(1), "token_ids": [31415926] * 4, "extra_keys": [["SECRET-CANARY"]]}
        await rig.publisher.publish(event, {**event, "block_size": "SECRET-CANARY"})
        await rig.publisher.publish(event, {**event, "extra_keys": [["SECRET-CANARY", "b"]]})
        await rig.publisher.publish({**event, "block_hashes": [2], "block_size": 8})
        await until(lambda: "block_size" in caplog.text)
    assert "SECRET-CANARY" not in caplog.text
    assert "31415926" not in caplog.text


STARTING = agent_pb2.WORKER_STATE_STARTING
READY = agent_pb2.WORKER_STATE_READY
DRAINING = agent_pb2.WORKER_STATE_DRAINING
DRAINED = agent_pb2.WORKER_STATE_DRAINED
ASLEEP = agent_pb2.WORKER_STATE_ASLEEP
FROZEN = agent_pb2.WORKER_STATE_FROZEN
DOWN = agent_pb2.WORKER_STATE_DOWN


def states(rig: Rig) -> list[int]:
    """States in the order they were told, repeats left out."""
    told = [load.state for load in rig.fleet.heard("load")]
    return [state for at, state in enumerate(told) if at == 0 or told[at - 1] != state]


async def state(rig: Rig, wanted: int) -> None:
    """Wait until the newest load says so."""
    await until(lambda: rig.fleet.heard("load") and rig.fleet.heard("load")[-1].state == wanted)


async def test_a_drain_by_command_ends_with_the_last_request_and_can_be_undone(rig: Rig) -> None:
    async with rig.agent_running():
        await state(rig, READY)
        await rig.fleet.tell(drain=agent_pb2.Drain(deadline_s=60.0))
        await state(rig, DRAINING)
        assert not rig.fleet.heard("load")[-1].ready
        rig.engine.be_idle()
        await state(rig, DRAINED)
        assert not rig.task.done()
        await rig.fleet.tell(resume=agent_pb2.Resume())
        await state(rig, READY)
    assert states(rig)[:4] == [READY, DRAINING, DRAINED, READY]


async def test_a_drain_is_over_at_its_deadline(rig: Rig) -> None:
    async with rig.agent_running():
        await state(rig, READY)
        await rig.fleet.tell(drain=agent_pb2.Drain(deadline_s=0.0))
        await state(rig, DRAINED)


async def test_an_order_to_leave_is_followed_once_nothing_runs(rig: Rig) -> None:
    async with rig.agent_running():
        await state(rig, READY)
        rig.leave.set()
        await state(rig, DRAINING)
        assert not rig.task.done()
        rig.engine.be_idle()
        await until(rig.task.done)
    assert states(rig) == [READY, DRAINING, DRAINED]
    assert rig.fleet.ended == [0]


async def test_an_agent_whose_engine_is_gone_leaves_without_waiting(rig: Rig) -> None:
    async with rig.agent_running():
        await state(rig, READY)
        await rig.engine.stop()
        await state(rig, DOWN)
        rig.leave.set()
        await until(rig.task.done)


async def test_a_frozen_engine_is_told_and_recovers_as_soon_as_it_moves(rig: Rig) -> None:
    async with rig.agent_running(rig.settings(frozen_after_s=0.2)):
        await state(rig, READY)
        rig.engine.works = False
        await state(rig, FROZEN)
        rig.engine.works = True
        await state(rig, READY)


async def test_an_engine_that_only_takes_connections_is_down(rig: Rig) -> None:
    """As with SIGSTOP on the server's process."""
    async with rig.agent_running():
        await state(rig, READY)
        rig.engine.silent = {"/health", "/v1/models", "/metrics"}
        await state(rig, DOWN)
        rig.engine.silent = set()
        await state(rig, READY)
    assert rig.fleet.heard("hello") == [rig.fleet.streams[0][0].hello]


@pytest.mark.parametrize("fault", ["404", "renamed", "garbage", "slow"])
async def test_no_fault_of_the_metrics_page_takes_a_worker_out(rig: Rig, fault: str) -> None:
    async with rig.agent_running():
        await until(lambda: any(load.HasField("running") for load in rig.fleet.heard("load")))
        told = len(rig.fleet.heard("load"))
        match fault:
            case "404":
                rig.engine.metrics_status = 404
            case "renamed":
                rig.engine.page = "vllm:requests_under_way 3\n"
            case "garbage":
                rig.engine.page = "\x00\x01<html>"
            case "slow":
                rig.engine.silent = {"/metrics"}
        await until(lambda: not rig.fleet.heard("load")[-1].HasField("running"))
        assert {load.state for load in rig.fleet.heard("load")[told:]} == {READY}


async def test_a_sick_health_page_takes_it_out(rig: Rig) -> None:
    rig.engine.health = 503
    async with rig.agent_running():
        await state(rig, STARTING)
        rig.engine.health = 200
        await state(rig, READY)
        rig.engine.health = 503
        await state(rig, DOWN)


async def test_a_refused_health_check_is_soon_asked_again_and_only_the_second_counts(
    rig: Rig,
) -> None:
    rig.fleet.settings.report_interval_s = 5.0
    async with rig.agent_running():
        await state(rig, READY)
        rig.engine.refused_health_checks, asked = 1, rig.engine.health_checks
        await rig.fleet.tell(settings=rig.fleet.settings)  # looks at once
        await until(lambda: rig.engine.health_checks >= asked + 2, timeout_s=2)
        assert set(states(rig)) == {READY}
        rig.engine.refused_health_checks = 2
        await rig.fleet.tell(settings=rig.fleet.settings)
        async with asyncio.timeout(2):
            await state(rig, DOWN)


async def test_hello_says_what_the_engine_is_and_whether_digests_come(rig: Rig) -> None:
    async with rig.agent_running():
        hello = (await until(lambda: rig.fleet.heard("hello")))[0]
    assert (hello.engine, hello.kv_events) == ("vllm 0.32.0", True)


async def test_hello_says_what_its_operator_says(rig: Rig) -> None:
    async with rig.agent_running(rig.settings(labels={"zone": "a", "role": "decode"})):
        hello = (await until(lambda: rig.fleet.heard("hello")))[0]
    assert dict(hello.labels) == {"zone": "a", "role": "decode"}


async def test_prefixes_that_enough_others_hold_are_told_as_hot_no_more(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvgate.agent")
    async with rig.agent_running():
        await until(lambda: rig.fleet.heard("snapshot"))
        hot = int(keys_of(1)[0])
        await rig.publisher.publish(stored(1), *(stored(n, 1) for n in range(10, 13)))
        told = await until(lambda: rig.fleet.heard("hot"))
        assert list(told[0].keys) == [hot]
        await rig.fleet.tell(advice=agent_pb2.ReplicaAdvice(surplus_keys=[hot]))
        await until(lambda: "1 hot prefixes need not be kept" in caplog.text)
        await rig.publisher.publish(*(stored(n, 1) for n in range(20, 23)))
        await rig.publisher.publish(stored(2), *(stored(n, 2) for n in range(30, 33)))
        await until(lambda: any(int(keys_of(2)[0]) in hot.keys for hot in rig.fleet.heard("hot")))
        assert [list(each.keys).count(hot) for each in rig.fleet.heard("hot")].count(1) == 1


async def test_signals_of_the_last_interval_are_told(rig: Rig) -> None:
    async with rig.agent_running():
        told = await until(
            lambda: [
                load.signals
                for load in rig.fleet.heard("load")
                if load.signals.generation_tokens_per_s > 0
            ]
        )
    assert not told[0].HasField("ttft_s")
    assert not told[0].HasField("busy_ratio")


async def test_requests_of_the_middleware_are_told(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    async with rig.agent_running(rig.settings(socket=str(path))):
        await state(rig, READY)
        engine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.closing(engine):
            engine.connect(str(path))
            for event in (
                Hello(INSTANCE, 7, True, 0, 0),
                Hello(INSTANCE, 7, False, 0, 0),
                Started(INSTANCE, 1, "lease-1", "chat", 1.0),
                Started(INSTANCE, 2, "lease-2", "chat", 1.0),
                FirstChunk(INSTANCE, 1, 0.25),
            ):
                engine.send(encode(event))
            leases = {"lease-1", "lease-2"}
            await until(lambda: set(rig.fleet.heard("load")[-1].in_flight_leases) == leases)
            assert rig.fleet.heard("load")[-1].leases_known
            error = EngineError.STREAM_ERROR
            ended = Ended(INSTANCE, 1, "lease-1", 200, error, 2.5, 0.25, 90, None, 64, True)
            engine.send(encode(ended))
            finished = (await until(lambda: rig.fleet.heard("finished")))[0]
            await until(lambda: list(rig.fleet.heard("load")[-1].in_flight_leases) == ["lease-2"])
    assert list(finished.outcomes) == [
        agent_pb2.Outcome(
            lease="lease-1",
            status=200,
            error=agent_pb2.ENGINE_ERROR_STREAM,
            ttft_s=0.25,
            duration_s=2.5,
            prompt_tokens=90,
            cached_tokens=64,
        )
    ]


async def test_a_drain_waits_for_the_middlewares_requests(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    rig.engine.be_idle()
    async with rig.agent_running(rig.settings(socket=str(path))):
        await state(rig, READY)
        engine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.closing(engine):
            engine.connect(str(path))
            engine.send(encode(Hello(INSTANCE, 7, False, 0, 0)))
            engine.send(encode(Started(INSTANCE, 1, None, "chat", 1.0)))
            await until(lambda: rig.fleet.heard("load")[-1].leases_known)
            rig.leave.set()
            await state(rig, DRAINING)
            await asyncio.sleep(1.0)
            assert not rig.task.done()
            error = EngineError.NONE
            ended = Ended(INSTANCE, 1, None, 200, error, 2.5, None, None, None, None, False)
            engine.send(encode(ended))
            await until(rig.task.done)
    assert states(rig)[-1] == DRAINED


def adjacent_ports() -> int:
    """A free port whose next one is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


async def test_a_second_rank_has_events_of_its_own(rig: Rig) -> None:
    first, second = FakePublisher(), FakePublisher()
    events, replay = adjacent_ports(), adjacent_ports()
    first.ports, second.ports = [events, replay], [events + 1, replay + 1]
    rig.publisher = first
    settings = rig.settings(data_parallel_size=2)
    async with running(first, second), rig.agent_running(settings):
        await first.subscribed()
        await second.subscribed()
        await first.publish(stored(1), stored(2))
        # The same hash on another rank is another block.
        await second.publish({**stored(3), "block_hashes": [1]}, rank=1)
        await rig.keys(1, 2, 3)
        await second.publish({"type": "BlockRemoved", "block_hashes": [1]}, rank=1)
        await rig.keys(1, 2)
        await first.publish({"type": "AllBlocksCleared"})
        await second.publish(stored(4), rank=1)
        await rig.keys(4)


async def test_blocks_in_host_memory_are_a_digest_of_their_own(rig: Rig) -> None:
    async with rig.agent_running():
        await rig.publisher.subscribed()
        await rig.publisher.publish(stored(1), {**stored(1), "medium": "CPU"})
        await rig.publisher.publish({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"})
        await rig.keys()
        host = await until(lambda: rig.reader(agent_pb2.TIER_HOST))
        await until(lambda: rig.reader(agent_pb2.TIER_HOST).holds(keys_of(1)))
        assert host.tier == agent_pb2.TIER_HOST


async def test_what_is_left_out_or_lost_is_counted_in_the_load(rig: Rig) -> None:
    async with rig.agent_running(rig.settings(replay=False)):
        await rig.publisher.subscribed()
        await rig.publisher.publish(stored(1))
        await rig.keys(1)
        await rig.publisher.publish(stored(2), heard=False)
        await rig.publisher.publish(stored(3), {"type": "BlockDreamt"})
        await rig.publisher.publish(stored(5, parent=4), {**stored(6), "extra_keys": [["a", "b"]]})
        left = {"unknown_parent": 1, "extra_keys": 1, "unreadable": 1}
        load = await until(
            lambda: [load for load in rig.fleet.heard("load") if dict(load.left_out) == left]
        )
    assert load[0].lost_events == 1


async def test_a_prefix_with_many_continuations_is_told_as_hot(rig: Rig) -> None:
    async with rig.agent_running():
        await rig.publisher.subscribed()
        await rig.publisher.publish(stored(1))
        await rig.keys(1)
        await rig.publisher.publish(*(stored(number, parent=1) for number in range(2, 6)))
        hot = (await until(lambda: rig.fleet.heard("hot")))[0]
    assert (list(hot.keys), list(hot.counts)) == (keys_of(1).tolist(), [4])


@contextlib.asynccontextmanager
async def process_of(rig: Rig, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The agent as a process, once it has told a snapshot."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "workers.agent", "--engine", rig.engine.url, "--log-format", "json", *flags),
        *("--scheduler", rig.fleet.target, "--kv-events", rig.publisher.events),
        env={**os.environ, "PYTHONWARNINGS": "error"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(lambda: rig.fleet.heard("snapshot"), timeout_s=20)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_sigterm_drains_and_ends_the_process_with_status_0(rig: Rig) -> None:
    rig.engine.be_idle()
    async with process_of(rig) as process:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            _, log = await process.communicate()
    assert process.returncode == 0
    assert rig.fleet.ended == [0]
    assert states(rig) == [READY, DRAINING, DRAINED]
    assert b'"event": "agent of 127.0.0.1' in log
    assert b"Traceback" not in log


async def test_a_second_sigterm_does_not_wait_for_requests(rig: Rig) -> None:
    async with process_of(rig) as process:
        process.send_signal(signal.SIGTERM)
        await state(rig, DRAINING)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await process.communicate()
    assert process.returncode == 0
    assert rig.fleet.ended == [0]


async def test_a_drain_time_of_0_does_not_wait_either(rig: Rig) -> None:
    async with process_of(rig, "--drain-s", "0") as process:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            _, log = await process.communicate()
    assert process.returncode == 0
    assert b"before the last request" in log


def test_a_socket_that_cannot_be_made_ends_it_with_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no" / "such" / "folder"
    flags = ["--engine", "http://127.0.0.1:1", "--scheduler", "127.0.0.1:1", "--socket", str(path)]
    assert main(flags) == 3
    assert str(path) in capsys.readouterr().err


def test_backoff_grows_from_a_fifth_of_a_second_to_3_with_jitter() -> None:
    backoff = Backoff(random.Random(1))
    pauses = [backoff.next_s() for _ in range(200)]
    assert 0.2 <= pauses[0] <= pauses[1] + 0.2
    assert all(0.2 <= pause <= 3.0 for pause in pauses)
    assert len({round(pause, 6) for pause in pauses[10:]}) > 100
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.2)


def test_flags_give_settings() -> None:
    flags = "--engine http://10.0.0.5:8001 --scheduler a:9003 --scheduler b:9003 --max-running 64"
    settings, log_format = parse_settings(flags.split())
    assert (settings.address, settings.schedulers) == ("10.0.0.5:8001", ("a:9003", "b:9003"))
    assert (settings.max_running, settings.kv_events, log_format) == (64, "", "text")
    labelled, _ = parse_settings([*flags.split(), "--label", "zone=a=b", "--label", "role=both"])
    assert labelled.labels == {"zone": "a=b", "role": "both"}


def test_each_rank_has_the_next_port() -> None:
    flags = (
        "--engine http://10.0.0.5:8001 --scheduler a:1 --gpus 0,3 --data-parallel-size 2 "
        "--kv-events tcp://10.0.0.5:5557"
    )
    settings, _ = parse_settings(flags.split())
    assert settings.event_endpoints() == [
        ("tcp://10.0.0.5:5557", ""),
        ("tcp://10.0.0.5:5558", ""),
    ]
    assert settings.gpus == (0, 3)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--engine http://localhost:8001 --scheduler a:1", "--address"),
        ("--engine 10.0.0.5:8001 --scheduler a:1", "--engine"),
        ("--engine http://10.0.0.5:8001", "--scheduler"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --kv-events 5557", "tcp://"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --kv-replay tcp://a:1", "--kv-events"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --max-running -1", "--max-running"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --frozen-after-s 0", "--frozen-after-s"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --drain-s nan", "--drain-s"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --gpus 0,x", "--gpus"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --data-parallel-size 0", "size"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --label zone", "is not name=value"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --label role=writer", "role=writer"),
        (
            "--engine http://10.0.0.5:8001 --scheduler a:1 --kv-events ipc:///tmp/x "
            "--data-parallel-size 2",
            "has no port",
        ),
    ],
)
def test_a_wrong_flag_is_named(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(flags.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
