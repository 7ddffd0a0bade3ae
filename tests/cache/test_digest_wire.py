"""A digest means the same in every process (case BL1)."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from extproc.cache.digest import BlockDigest, DigestShape
from extproc.errors import DigestError
from extproc.generated.kvgate.v1 import agent_pb2
from extproc.tokens.blocks import Keys
from workers.agent.block_ledger import BlockLedger
from workers.agent.digest_pace import snapshot_of
from workers.agent.kv_events import Stored

# Makes 95,865 bits: the padding of the last byte is on the wire too.
CAPACITY = 10_001
KEYS = 10_000
GOLDEN_BITS = "2bc011c020604032205c800c00"
GOLDEN_CHECKSUM = 18399148932091605168

WRITER = """
import sys
from itertools import count
from tests.cache.test_digest_wire import full_ledger
from workers.agent.digest_pace import snapshot_of
sys.stdout.buffer.write(snapshot_of(full_ledger(), 0.01, 1).SerializeToString())
"""
READER = """
import sys
from extproc.cache.digest import BlockDigest, DigestShape
from extproc.generated.kvgate.v1 import agent_pb2
from tests.cache.test_digest_wire import full_ledger
message = agent_pb2.DigestSnapshot.FromString(sys.stdin.buffer.read())
shape = DigestShape(message.capacity, message.error_rate)
digest = BlockDigest.from_packed(shape, message.bits, message.count, message.checksum)
found = digest.contains_keys(full_ledger().live_keys())
print(len(found), int((~found).sum()))
"""


def full_ledger() -> BlockLedger:
    ledger = BlockLedger(7, 4, CAPACITY, lambda: 1)
    ledger.apply(Stored(list(range(KEYS)), token_ids=list(range(4 * KEYS)), block_size=4))
    return ledger


def snapshot() -> agent_pb2.DigestSnapshot:
    return snapshot_of(full_ledger(), 0.01, 1)


def read(message: agent_pb2.DigestSnapshot) -> BlockDigest:
    shape = DigestShape(message.capacity, message.error_rate)
    return BlockDigest.from_packed(shape, message.bits, message.count, message.checksum)


def run(program: str, hash_seed: str, given: bytes = b"") -> bytes:
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, input=given, env=environment, stdout=-1, check=True).stdout


def test_a_digest_written_in_one_process_has_no_misses_in_another() -> None:
    written = run(WRITER, "1")
    assert run(READER, "2", written).split() == [b"10000", b"0"]


def test_the_bytes_are_the_same_whatever_the_processes_hash_seed() -> None:
    assert run(WRITER, "1") == run(WRITER, "2") == snapshot().SerializeToString()


def test_the_golden_vector_holds() -> None:
    """Positions, byte order and padding of wire version 1: a change needs a new version."""
    digest = BlockDigest(10, 0.01)
    keys: Keys = np.array([0, 1, 0x0123456789ABCDEF, 2**64 - 1], dtype=np.uint64)
    digest.add_keys(keys)
    assert (digest.shape.num_slices, digest.shape.bits_per_slice) == (7, 14)
    assert digest.packed().hex() == GOLDEN_BITS
    assert digest.checksum() == GOLDEN_CHECKSUM


def test_bit_counts_that_are_no_multiple_of_8_or_32_come_back() -> None:
    message = snapshot()
    num_bits = message.num_slices * message.bits_per_slice
    assert num_bits % 8
    assert num_bits % 32
    assert read(message).packed() == message.bits


def test_a_truncated_digest_is_refused() -> None:
    message = snapshot()
    message.bits = message.bits[:-1]
    with pytest.raises(DigestError, match="bytes"):
        read(message)


def test_a_flipped_bit_is_refused() -> None:
    message = snapshot()
    message.bits = bytes([message.bits[0] ^ 1]) + message.bits[1:]
    with pytest.raises(DigestError, match="checksum"):
        read(message)


def test_bits_in_the_padding_are_refused() -> None:
    message = snapshot()
    message.bits = message.bits[:-1] + b"\xff"
    message.checksum = xxh3_64_intdigest(message.bits)
    with pytest.raises(DigestError, match="past its end"):
        read(message)


@pytest.mark.parametrize("capacity", [0, 2**24 + 1, 2**40])
def test_an_absurd_capacity_is_refused_before_anything_is_allocated(capacity: int) -> None:
    message = snapshot()
    message.capacity = capacity
    with pytest.raises(DigestError, match="capacity"):
        read(message)


def test_more_keys_than_the_capacity_are_refused() -> None:
    message = snapshot()
    message.count = CAPACITY + 1
    with pytest.raises(DigestError, match="keys"):
        read(message)
