"""The agent against a real gRPC server, real ZMQ sockets and a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from extproc.cache.digest import BlockDigest, DigestShape
from extproc.generated.kvgate.v1 import agent_pb2
from extproc.tokens.blocks import Keys, block_keys, root_key
from tests.support.engine import FakeEngine, FakeFleet, FakePublisher, running, until
from workers.agent import Agent
from workers.agent_settings import Settings, parse_settings
from workers.scheduler_link import Backoff

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
    return np.concatenate([block_keys(root, [number] * 5, SIZE) for number in numbers])


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

    def settings(self, *fleets: FakeFleet, replay: bool = True) -> Settings:
        return Settings(
            engine=self.engine.url,
            address=f"127.0.0.1:{self.engine.port}",
            schedulers=tuple(fleet.target for fleet in fleets or (self.fleet,)),
            kv_events=self.publisher.events,
            kv_replay=self.publisher.replay if replay else "",
            max_running=8,
        )

    @contextlib.asynccontextmanager
    async def agent_running(self, settings: Settings | None = None) -> AsyncIterator[None]:
        stop = asyncio.Event()
        self.agent = Agent(settings or self.settings(), rng=random.Random(1))
        task = asyncio.create_task(self.agent.run(stop))
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(10):
                await task

    async def snapshot(self, count: int, stream: int = -1) -> agent_pb2.DigestSnapshot:
        """The newest snapshot, once it has so many keys."""

        def newest() -> Any:
            found = self.fleet.heard("snapshot", stream)
            return found[-1] if found and found[-1].count == count else None

        return await until(newest)

    async def keys(self, *numbers: int) -> None:
        """Wait until snapshot and deltas of the newest stream hold these keys."""
        wanted = keys_of(*numbers)

        def told() -> bool:
            snapshots = self.fleet.heard("snapshot")
            if not snapshots:
                return False
            added = {
                key
                for delta in self.fleet.heard("delta")
                if delta.epoch == snapshots[-1].epoch
                for key in np.frombuffer(delta.added_keys, dtype="<u8").tolist()
            }
            rest = [key for key in wanted.tolist() if key not in added]
            return not rest or holds(snapshots[-1], np.array(rest, dtype=np.uint64))

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
            await rig.keys(number)
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
        assert not holds(rig.fleet.heard("snapshot")[-1], keys_of(1, 2))


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
    states = [line for line in caplog.messages if line.startswith("engine is")]
    assert states == [
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


async def test_a_new_adapter_is_told_by_a_new_hello(rig: Rig) -> None:
    async with rig.agent_running():
        await until(lambda: rig.fleet.heard("load"))
        rig.engine.models = [{"id": "tiny"}, {"id": "ad1", "parent": "tiny"}]
        await until(lambda: len(rig.fleet.streams) == 2 and rig.fleet.heard("snapshot"))
        assert list(rig.fleet.streams[1][0].hello.models) == ["tiny", "ad1"]
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
        assert not holds(rig.fleet.heard("snapshot")[-1], keys_of(1))


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
        await rig.publisher.publish({**event, "block_size": 8})
        await until(lambda: "block_size" in caplog.text)
    assert "SECRET-CANARY" not in caplog.text
    assert "31415926" not in caplog.text


async def test_sigterm_ends_the_process_with_status_0(rig: Rig) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "workers.agent", "--engine", rig.engine.url, "--log-format", "json"),
        *("--scheduler", rig.fleet.target, "--kv-events", rig.publisher.events),
        env={**os.environ, "PYTHONWARNINGS": "error"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(lambda: rig.fleet.heard("snapshot"), timeout_s=20)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            _, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert rig.fleet.ended == [0]
    assert b'"event": "agent of 127.0.0.1' in log
    assert b"Traceback" not in log


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


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--engine http://localhost:8001 --scheduler a:1", "--address"),
        ("--engine 10.0.0.5:8001 --scheduler a:1", "--engine"),
        ("--engine http://10.0.0.5:8001", "--scheduler"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --kv-events 5557", "tcp://"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --kv-replay tcp://a:1", "--kv-events"),
        ("--engine http://10.0.0.5:8001 --scheduler a:1 --max-running -1", "--max-running"),
    ],
)
def test_a_wrong_flag_is_named(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(flags.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
