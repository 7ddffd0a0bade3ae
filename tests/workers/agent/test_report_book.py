from __future__ import annotations

import math
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.cache.digest import HASH_NAME, WIRE_VERSION, BlockDigest, DigestShape
from extproc.generated.kvgate.v1 import agent_pb2
from extproc.policy import ReportPolicy
from extproc.tokens.blocks import Keys, block_keys, root_key
from tests.workers.agent.reader import Reader
from tests.workers.agent.test_engine_state import REFUSED, SILENT, up
from tests.workers.agent.told import Told
from workers.agent.block_ledger import BlockLedger
from workers.agent.counted_digest import CountedDigest
from workers.agent.drain import Drain
from workers.agent.engine_state import EngineState
from workers.agent.kv_events import Cleared, KvEvent, Removed, Stored
from workers.agent.pool_terms import PoolTerms, SettingsError
from workers.agent.report_book import ReportBook
from workers.agent.worker_cache import WorkerCache
from workers.agent.worker_report import WorkerReport

SETTINGS = {
    "pool": "tiny",
    "key_namespace": 7,
    "block_size_tokens": 4,
    "digest_capacity": 2_000,
    "digest_error_rate": 0.01,
    "report_interval_s": 1.0,
    "delta_interval_s": 0.2,
    "snapshot_interval_s": 30.0,
}


def terms_with(**changes: float) -> PoolTerms:
    return PoolTerms.of(agent_pb2.PoolSettings(**{**SETTINGS, **changes}))


class Rig:
    """A book with its engine and ledger, at a time that the test sets."""

    def __init__(self, capacity: int = 2_000) -> None:
        self.engine = EngineState()
        self.engine.observe(up(), 0.0)
        self.ledger = BlockLedger(7, 4, capacity, count(100).__next__)
        self.drain = Drain()
        self.told = Told()
        self.worker = WorkerReport(
            self.engine, WorkerCache(count(1).__next__), self.drain, self.told.watch
        )
        self.book = ReportBook(self.worker)
        self.terms = terms_with(digest_capacity=capacity)
        self._hashes = count(1)

    def settle(self) -> None:
        self.book.settle(self.terms, self.ledger)

    def apply(self, event: KvEvent) -> None:
        self.book.note(self.ledger.apply(event))

    def store(self, blocks: int = 1) -> list[int]:
        hashes = [next(self._hashes) for _ in range(blocks)]
        for number in hashes:
            self.apply(Stored([number], token_ids=[number] * 4, block_size=4))
        return hashes

    def said(self, now_s: float) -> list[str]:
        """Kinds of all messages due now."""
        return [message.WhichOneof("kind") or "" for message in self.messages(now_s)]

    def messages(self, now_s: float) -> list[agent_pb2.AgentMessage]:
        messages = []
        while message := self.book.next_message(now_s):
            messages.append(message)
            assert len(messages) < 10
        assert self.book.due_at_s() > now_s
        return messages

    def digests(self, now_s: float) -> list[str]:
        return [kind for kind in self.said(now_s) if kind != "load"]


def keys_of_hashes(hashes: list[int]) -> Keys:
    """Keys of the one-block prompts that ``Rig.store`` makes."""
    root = root_key(7, 4)
    return np.concatenate([block_keys(root, [number] * 5, 4) for number in hashes])


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.settle()
    return rig


def test_load_comes_before_the_settings_and_then_with_every_look() -> None:
    rig = Rig()
    assert rig.said(10.0) == ["load"]
    assert rig.said(10.99) == []
    for second in (11.0, 12.0, 12.9):
        rig.engine.observe(up(), second)
        (message,) = rig.messages(second + 0.01)
        assert message.load.age_s == pytest.approx(0.01)


def test_load_comes_without_a_look_too_and_not_with_each_of_many() -> None:
    rig = Rig()
    rig.messages(10.0)
    assert rig.said(11.24) == []
    assert rig.said(11.25) == ["load"]
    rig.engine.observe(up(), 11.4)
    assert rig.said(11.4) == []
    assert rig.said(11.75) == ["load"]


def test_one_late_look_leaves_no_gap_between_fresh_loads(rig: Rig) -> None:
    """Of looks a second apart one fails and the next takes long, wherever the loads are."""
    stale_after_s = ReportPolicy().stale_after_s
    for phase in range(20):
        base = 100.0 * phase
        fresh_until = math.inf
        rig.messages(base + phase / 20)
        looks = {base + 1.0: up(), base + 2.8: SILENT, base + 3.79: up(), base + 4.8: up()}
        for step in range(500):
            now = base + 1.0 + step / 100
            for at in [at for at in looks if at <= now]:
                rig.engine.observe(looks.pop(at), now)
            for message in rig.messages(now):
                if message.HasField("load"):
                    fresh_until = now - message.load.age_s + stale_after_s
            assert fresh_until > now


def test_load_comes_at_once_when_readiness_changes(rig: Rig) -> None:
    rig.messages(10.0)
    rig.engine.observe(REFUSED, 10.1)
    (message,) = rig.messages(10.1)
    assert not message.load.ready
    assert not message.load.HasField("running")
    rig.engine.observe(up(), 10.2)
    assert rig.messages(10.2)[0].load.ready


def test_a_cache_that_outlives_a_silent_engine_is_told_again(rig: Rig) -> None:
    rig.store(3)
    assert rig.digests(10.0) == ["snapshot"]
    rig.engine.observe(SILENT, 11.0)
    rig.engine.observe(SILENT, 12.0)
    assert rig.messages(12.0)[0].load.state == agent_pb2.WORKER_STATE_DOWN
    rig.engine.observe(up(), 13.0)
    load, snapshot = rig.messages(13.0)
    assert load.load.state == agent_pb2.WORKER_STATE_READY
    assert snapshot.snapshot.count == 3
    rig.engine.observe(up(), 14.0)
    assert rig.digests(14.0) == []


def test_load_carries_numbers_and_their_age(rig: Rig) -> None:
    load = rig.messages(0.5)[0].load
    assert (load.ready, load.running, load.age_s) == (True, 2.0, 0.5)
    assert not load.HasField("waiting")
    assert not load.HasField("kv_blocks")


def test_a_stream_opens_with_a_snapshot_of_everything() -> None:
    rig = Rig()
    rig.store(50)
    rig.settle()
    snapshot = rig.messages(10.0)[1].snapshot
    shape = DigestShape(2_000, 0.01)
    assert snapshot == agent_pb2.DigestSnapshot(
        version=WIRE_VERSION,
        epoch=rig.ledger.epoch,
        sequence=1,
        block_size_tokens=4,
        capacity=2_000,
        error_rate=0.01,
        num_slices=shape.num_slices,
        bits_per_slice=shape.bits_per_slice,
        hash_name=HASH_NAME,
        count=50,
        bits=snapshot.bits,
        checksum=snapshot.checksum,
    )
    digest = BlockDigest.from_packed(shape, snapshot.bits, snapshot.count, snapshot.checksum)
    assert digest.contains_keys(rig.ledger.live_keys()).all()


def test_new_keys_follow_as_deltas_at_most_every_delta_interval(rig: Rig) -> None:
    rig.messages(10.0)
    rig.store(3)
    assert rig.digests(10.1) == []
    delta = rig.messages(10.2)[0].delta
    assert (delta.epoch, delta.sequence) == (rig.ledger.epoch, 2)
    keys = np.frombuffer(delta.added_keys, dtype="<u8")
    assert sorted(keys.tolist()) == sorted(rig.ledger.live_keys().tolist())
    assert rig.digests(10.9) == []


def test_a_quiet_cache_sends_only_the_regular_snapshot(rig: Rig) -> None:
    rig.messages(10.0)
    assert rig.digests(39.9) == []
    assert rig.digests(40.0) == ["snapshot"]


def test_a_resync_is_answered_by_a_snapshot_at_most_once_a_report_interval(rig: Rig) -> None:
    rig.messages(10.0)
    rig.store()
    rig.book.resync()
    assert rig.digests(10.5) == []
    assert rig.digests(11.0) == ["snapshot"]
    assert rig.digests(11.5) == []


def test_a_scheduler_that_refuses_every_snapshot_is_asked_less_and_less_often(rig: Rig) -> None:
    rig.messages(0.0)
    sent_at = []
    for tenth in range(1, 400):
        rig.book.resync()
        if "snapshot" in rig.digests(tenth / 10):
            sent_at.append(tenth / 10)
    assert sent_at == [1.0, 3.0, 7.0, 15.0, 31.0]


def test_a_delta_in_between_makes_resyncs_quick_again(rig: Rig) -> None:
    rig.messages(0.0)
    for second in (10.0, 20.0, 30.0):
        rig.book.resync()
        assert rig.digests(second) == ["snapshot"]
        rig.store()
        assert rig.digests(second + 0.5) == ["delta"]
        rig.book.resync()
        assert rig.digests(second + 1.0) == ["snapshot"]
        rig.store()
        assert rig.digests(second + 1.5) == ["delta"]


def test_keys_that_left_are_told_with_the_next_delta(rig: Rig) -> None:
    hashes = rig.store(100)
    messages = rig.messages(10.0)
    for number in hashes[:60]:
        rig.apply(Removed([number]))
    kept = rig.ledger.live_keys()
    assert rig.digests(10.1) == []
    messages += rig.messages(10.2)
    delta = messages[-1].delta
    assert (len(kept), delta.removed_keys, delta.added_keys) == (40, 60, b"")
    reader = Reader(2_000).hear(messages)
    assert (reader.holds(kept), reader.feed.count) == (True, 40)
    # 60 keys are gone but for false positives.
    assert reader.held(keys_of_hashes(hashes)) < 45


def test_a_key_that_comes_and_goes_between_two_messages_is_not_told(rig: Rig) -> None:
    (kept,) = rig.store(1)
    rig.messages(10.0)
    rig.apply(Removed(rig.store(1)))
    rig.apply(Removed([kept]))
    rig.apply(Stored([kept], token_ids=[kept] * 4, block_size=4))
    assert rig.digests(10.5) == []


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(["store", "remove", "tell", "resync"])),
        max_size=80,
    )
)
def test_a_reader_never_misses_a_live_key(steps: list[tuple[int, str]]) -> None:
    rig = Rig(capacity=8)
    rig.settle()
    reader = Reader(8)
    now_s = 10.0
    for number, step in [*steps, (1, "tell")]:
        if step == "store":
            rig.apply(Stored([number], token_ids=[number] * 4, block_size=4))
        elif step == "remove":
            rig.apply(Removed([number]))
        elif step == "resync":
            rig.book.resync()
        else:
            now_s += 40.0
            reader.hear(rig.messages(now_s))
            assert reader.holds(rig.ledger.live_keys())
            assert reader.feed.count == len(rig.ledger)
    digest = CountedDigest(DigestShape(8, 0.01), rig.ledger.live_keys())
    assert bytes(reader.index._columns[0].digest_bits) == digest.packed()


def test_a_host_tier_is_told_only_once_it_holds_something(rig: Rig) -> None:
    messages = rig.messages(10.0)
    (known,) = rig.store(1)
    rig.apply(Stored([known], medium="CPU"))
    messages += rig.messages(11.0)
    host = [m.snapshot for m in messages if m.snapshot.tier == agent_pb2.TIER_HOST]
    assert [(snapshot.count, snapshot.sequence) for snapshot in host] == [(1, 1)]
    rig.apply(Removed([known], "CPU"))
    messages += rig.messages(12.0)
    assert (messages[-1].delta.tier, messages[-1].delta.sequence) == (agent_pb2.TIER_HOST, 2)
    readers = [Reader(2_000, tier=tier).hear(messages) for tier in (0, 1)]
    assert [reader.feed.count for reader in readers] == [1, 0]


def test_hot_prefixes_are_told_once_an_interval_and_only_if_there_are_any(rig: Rig) -> None:
    first, second = rig.store(2)
    rig.messages(10.0)
    for number in range(1_000, 1_003):
        rig.apply(Stored([number], first, [number] * 4, 4))
    rig.apply(Stored([2_000], second, [9] * 4, 4))
    (hot,) = [m.hot for m in rig.messages(10.5) if m.HasField("hot")]
    assert (list(hot.keys), list(hot.counts)) == (keys_of_hashes([first]).tolist(), [3])
    for number in range(3_000, 3_002):
        rig.apply(Stored([number], first, [number] * 4, 4))
    assert "hot" not in rig.digests(11.2)
    assert "hot" in rig.digests(11.5)
    assert "hot" not in rig.digests(13.0)


def test_finished_requests_are_told_together_after_20_ms(rig: Rig) -> None:
    rig.messages(10.0)
    rig.book.finished(agent_pb2.Outcome(lease="a"), 10.1)
    assert rig.digests(10.11) == []
    rig.book.finished(agent_pb2.Outcome(lease="b"), 10.115)
    (message,) = rig.messages(10.121)
    assert [outcome.lease for outcome in message.finished.outcomes] == ["a", "b"]


def test_a_slow_scheduler_keeps_the_newest_4096_finished_requests(rig: Rig) -> None:
    rig.messages(10.0)
    for number in range(5_000):
        rig.book.finished(agent_pb2.Outcome(lease=str(number)), 10.1)
    outcomes = rig.messages(10.2)[0].finished.outcomes
    assert (len(outcomes), outcomes[-1].lease) == (4_096, "4999")


def test_the_last_words_are_finished_requests_and_the_state_if_it_is_not_told(rig: Rig) -> None:
    rig.messages(10.0)
    assert rig.book.last_words(10.1) == []
    rig.book.finished(agent_pb2.Outcome(lease="a"), 10.1)
    rig.drain.begin(0.0, 10.1, for_good=True)
    rig.drain.observe(3.0, 10.1)
    words = rig.book.last_words(10.1)
    assert [word.WhichOneof("kind") for word in words] == ["finished", "load"]
    assert words[1].load.state == agent_pb2.WORKER_STATE_DRAINED


def test_leases_are_told_while_the_middleware_is_believed(rig: Rig) -> None:
    assert not rig.messages(10.0)[0].load.leases_known
    rig.told.hello()
    rig.told.start(1, "lease-1")
    load = rig.messages(12.0)[0].load
    assert (load.leases_known, list(load.in_flight_leases)) == (True, ["lease-1"])
    rig.told.hello(in_flight=2)
    load = rig.messages(14.0)[0].load
    assert (load.leases_known, list(load.in_flight_leases)) == (False, [])


def test_a_cleared_cache_is_told_as_an_empty_snapshot_of_a_higher_epoch(rig: Rig) -> None:
    rig.store(10)
    before = rig.messages(10.0)[1].snapshot
    rig.apply(Cleared())
    assert rig.digests(10.1) == []
    after = rig.messages(10.2)[0].snapshot
    assert (after.count, any(after.bits)) == (0, False)
    assert after.epoch > before.epoch
    assert after.sequence == before.sequence + 1


def test_no_delta_of_a_new_epoch_comes_before_its_snapshot(rig: Rig) -> None:
    rig.store(10)
    rig.messages(10.0)
    rig.store()
    rig.apply(Cleared())
    rig.store()
    assert rig.digests(10.2) == ["snapshot"]


def test_another_block_size_is_told_by_an_empty_snapshot(rig: Rig) -> None:
    rig.store(10)
    rig.messages(10.0)
    rig.apply(Stored([999], token_ids=[1] * 8, block_size=8))
    snapshot = rig.messages(10.2)[0].snapshot
    assert (snapshot.count, snapshot.block_size_tokens) == (0, 8)


def test_keys_that_outgrow_a_snapshot_become_one(rig: Rig) -> None:
    rig.messages(10.0)
    rig.store(1_500)
    assert rig.book.pending_keys == 0
    assert rig.digests(10.5) == []
    snapshot = rig.messages(11.0)[-1].snapshot
    assert snapshot.count == 1_500


def test_deltas_never_take_a_reader_past_its_capacity() -> None:
    rig = Rig(capacity=100)
    rig.store(100)
    rig.settle()
    messages = rig.messages(10.0)
    rig.store(5)
    assert len(rig.ledger) == 100
    messages += rig.messages(10.5)
    assert messages[-1].delta.removed_keys == 5
    assert Reader(100).hear(messages).holds(rig.ledger.live_keys())


def test_the_sequence_goes_on_when_settings_change(rig: Rig) -> None:
    rig.messages(10.0)
    rig.settle()
    assert rig.messages(10.1)[0].snapshot.sequence == 2


def test_notes_and_resyncs_before_the_settings_do_nothing() -> None:
    rig = Rig()
    rig.store()
    rig.book.resync()
    assert (rig.said(10.0), rig.book.pending_keys) == (["load"], 0)


@pytest.mark.parametrize(
    "change",
    [
        {"digest_capacity": 0},
        {"digest_capacity": 2**40},
        {"digest_error_rate": 0.0},
        {"digest_error_rate": math.nan},
        {"block_size_tokens": 0},
        {"block_size_tokens": 2**20},
        {"report_interval_s": 0.0},
        {"delta_interval_s": math.nan},
        {"snapshot_interval_s": math.inf},
    ],
)
def test_unusable_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        terms_with(**change)
