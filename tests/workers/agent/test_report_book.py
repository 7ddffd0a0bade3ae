from __future__ import annotations

import math
from itertools import count

import numpy as np
import pytest

from extproc.cache.digest import HASH_NAME, WIRE_VERSION, BlockDigest, DigestShape
from extproc.generated.kvgate.v1 import agent_pb2
from tests.workers.agent.test_engine_state import REFUSED, up
from workers.block_ledger import BlockLedger
from workers.engine_state import EngineState
from workers.kv_events import Cleared, KvEvent, Removed, Stored
from workers.pool_terms import PoolTerms, SettingsError
from workers.report_book import ReportBook

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
        self.book = ReportBook(self.engine)
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


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.settle()
    return rig


def test_load_comes_before_the_settings_and_then_every_interval() -> None:
    rig = Rig()
    assert rig.said(10.0) == ["load"]
    assert rig.said(10.9) == []
    assert rig.said(11.0) == ["load"]


def test_load_comes_at_once_when_readiness_changes(rig: Rig) -> None:
    rig.messages(10.0)
    rig.engine.observe(REFUSED, 10.1)
    (message,) = rig.messages(10.1)
    assert not message.load.ready
    assert not message.load.HasField("running")
    rig.engine.observe(up(), 10.2)
    assert rig.messages(10.2)[0].load.ready


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


def test_many_removals_make_a_snapshot_due(rig: Rig) -> None:
    hashes = rig.store(100)
    rig.messages(10.0)
    for number in hashes[:64]:
        rig.apply(Removed([number]))
    assert rig.digests(12.0) == []
    rig.apply(Removed([hashes[64]]))
    (snapshot,) = [m.snapshot for m in rig.messages(12.1) if m.HasField("snapshot")]
    assert snapshot.count == 35


def test_a_tenth_of_a_large_cache_may_be_stale(rig: Rig) -> None:
    hashes = rig.store(1_000)
    rig.messages(10.0)
    for number in hashes[:90]:
        rig.apply(Removed([number]))
    assert rig.digests(12.0) == []
    for number in hashes[90:100]:
        rig.apply(Removed([number]))
    assert rig.digests(12.5) == ["snapshot"]


def test_churn_makes_at_most_one_snapshot_in_5_delta_intervals(rig: Rig) -> None:
    hashes = rig.store(200)
    rig.messages(10.0)
    for number in hashes[:100]:
        rig.apply(Removed([number]))
    assert rig.digests(10.9) == []
    assert rig.digests(11.0) == ["snapshot"]


def test_deltas_go_on_while_a_churn_snapshot_waits(rig: Rig) -> None:
    hashes = rig.store(200)
    rig.messages(10.0)
    for number in hashes[:100]:
        rig.apply(Removed([number]))
    rig.store()
    assert rig.digests(10.3) == ["delta"]


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
    rig.messages(10.0)
    rig.store(5)
    assert len(rig.ledger) == 100
    assert rig.digests(10.5) == []
    assert rig.digests(11.0) == ["snapshot"]


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
