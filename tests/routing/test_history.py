from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.history import Conversations, Sessions
from tests.support.builders import keys_of, text_blocks

CHAT = keys_of(text_blocks(1, 40))
OTHER = keys_of(text_blocks(2, 40))


def turn(table: Conversations, blocks: int, address: str, now: float = 0.0) -> None:
    """The chat's prompt, grown to so many blocks, goes to a worker."""
    table.place(CHAT[:blocks], table.find(CHAT[:blocks]), address, now)


def test_the_next_turn_finds_the_turn_before_and_no_other_chat_does() -> None:
    table = Conversations(100)
    turn(table, 10, "a", now=3.0)
    found = table.find(CHAT[:15])
    assert found is not None
    assert (found.address, found.placed_at) == ("a", 3.0)
    assert table.find(OTHER) is None
    assert table.find(CHAT[:9]) is None
    assert table.find(CHAT[:0]) is None


def test_a_shared_beginning_is_no_conversation() -> None:
    table = Conversations(100)
    turn(table, 10, "a")
    turn(table, 20, "b")
    assert table.find(CHAT[:10]) is None
    assert len(table) == 1


def test_a_prompt_that_ended_too_far_back_is_not_found() -> None:
    keys = keys_of(text_blocks(3, 300))
    table = Conversations(100)
    table.place(keys[:10], None, "a", 0.0)
    assert table.find(keys[:265]) is not None
    assert table.find(keys) is None


def test_switches_are_counted_over_repeats() -> None:
    table = Conversations(100)
    for number, address in enumerate("aabba"):
        turn(table, 10 + number, address)
    assert (table.repeats, table.switches) == (4, 2)


@pytest.mark.parametrize(("switches", "oscillates"), [(0, 0), (1, 0), (2, 1)])
def test_over_a_tenth_of_switches_is_oscillation(switches: int, oscillates: int) -> None:
    table = Conversations(100)
    addresses = ["b"] * switches + ["c"] * (11 - switches)
    if switches == 2:
        addresses = ["a", "b", *["c"] * 9]
    if switches == 1:
        addresses = ["a", *["c"] * 10]
    for number, address in enumerate(addresses):
        turn(table, 10 + number, address)
    assert table.switches == switches
    assert table.oscillating == oscillates
    for number in range(11, 30):
        turn(table, 10 + number, "c")
    assert table.oscillating == 0


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from("ab"), st.booleans()), max_size=60
    ),
    size=st.integers(1, 5),
)
def test_the_table_is_bounded_and_its_count_of_oscillating_is_right(
    steps: list[tuple[int, str, bool]], size: int
) -> None:
    """MM1."""
    table = Conversations(size)
    for blocks, address, other in steps:
        keys = (OTHER if other else CHAT)[:blocks]
        table.place(keys, table.find(keys), address, 0.0)
        assert len(table) <= size
        entries = table._placements.values()
        assert table.oscillating == sum(entry.oscillates for entry in entries)


def test_sessions_remember_their_last_worker_and_forget_the_longest_unused() -> None:
    """MM1."""
    sessions = Sessions(2)
    for session, address in ((1, "a"), (2, "b"), (1, "c"), (3, "d")):
        sessions.place(session, address)
    assert [sessions.find(name) for name in (1, 2, 3)] == ["c", None, "d"]
    assert len(sessions) == 2
