from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from extproc.cache.digest import BlockDigest, DigestShape
from extproc.cache.index import PrefixIndex
from extproc.tokens.blocks import Keys
from tests.support.builders import digest_of, keys_of, no_keys, shape, text_blocks

OVERLAY = 64


def index(columns: int = 0, max_overlay_keys: int = OVERLAY) -> PrefixIndex:
    made = PrefixIndex(shape(), max_overlay_keys)
    for number in range(columns):
        assert made.add_column() == number
    return made


def text(seed: int, blocks: int = 6) -> Keys:
    return keys_of(text_blocks(seed, blocks))


def held(index: PrefixIndex, keys: Keys, column: int = 0) -> int:
    return int(index.longest_runs(keys)[column])


def put(index: PrefixIndex, column: int, *keys: Keys) -> None:
    index.replace(column, digest_of(np.concatenate([no_keys(), *keys])).packed())


class TestRuns:
    """CI3: only an unbroken run from block 0 counts, for each worker apart."""

    def test_a_worker_is_credited_with_what_it_holds_of_the_prefix(self) -> None:
        both = index(3)
        put(both, 0, text(1)[:2])
        put(both, 1, text(1))
        assert both.longest_runs(text(1))[:3].tolist() == [2, 6, 0]

    def test_text_in_another_place_is_another_text(self) -> None:
        """A holds X, B holds Y: Y+X is B's, X+Y is A's, Z+X is nobody's."""
        both = index(2)
        x, y, z = (text_blocks(seed, 6) for seed in (1, 2, 3))
        put(both, 0, keys_of(x))
        put(both, 1, keys_of(y))
        assert both.longest_runs(keys_of(y + x))[:2].tolist() == [0, 6]
        assert both.longest_runs(keys_of(x + y))[:2].tolist() == [6, 0]
        assert both.longest_runs(keys_of(z + x))[:2].tolist() == [0, 0]

    def test_a_hit_after_a_miss_gives_nothing(self) -> None:
        one = index(1)
        put(one, 0, text(1)[:2], text(1)[3:])
        assert held(one, text(1)) == 2
        put(one, 0, text(1)[1:])
        assert held(one, text(1)) == 0

    @given(
        prompt=st.lists(st.integers(0, 2), min_size=0, max_size=150),
        cached=st.lists(st.lists(st.integers(0, 2), max_size=150), max_size=5),
    )
    def test_a_match_depends_on_the_longest_cached_prefix_alone(
        self, prompt: list[int], cached: list[list[int]]
    ) -> None:
        """Whatever else the worker holds; prompts longer than one chunk of 64 included."""
        one = index(1)
        texts = [[block for block in blocks for _ in range(4)] for blocks in cached]
        known = np.unique(np.concatenate([no_keys(), *map(keys_of, texts)]))[:500]
        put(one, 0, known)
        prefix = 0
        for key in keys_of([block for block in prompt for _ in range(4)]).tolist():
            if key not in set(known.tolist()):
                break
            prefix += 1
        run = held(one, keys_of([block for block in prompt for _ in range(4)]))
        assert prefix <= run <= prefix + 1  # a false positive can lengthen it by little

    @pytest.mark.parametrize("blocks", [0, 1, 63, 64, 65, 128, 129, 300])
    def test_prompts_of_any_length_match_in_whole(self, blocks: int) -> None:
        one = index(2)
        put(one, 0, text(1, 300))
        assert one.longest_runs(text(1, blocks))[:2].tolist() == [blocks, 0]


class TestLongPrompts:
    """Chunks of a lookup grow, and the last few columns are followed in their own bits."""

    LONG = 2_600

    def large(self) -> PrefixIndex:
        return PrefixIndex(DigestShape(4 * self.LONG, 0.001), 8 * self.LONG)

    def longest(self, lengths: list[int]) -> list[int]:
        prompt = text(7, self.LONG)
        some = self.large()
        for length in lengths:
            number = some.add_column()
            digest = BlockDigest(some.shape.capacity, some.shape.error_rate)
            digest.add_keys(prompt[:length])
            some.replace(number, digest.packed())
        return some.longest_runs(prompt)[: len(lengths)].tolist()

    @pytest.mark.parametrize("length", [*range(1_000, 1_018), *range(2_590, 2_601)])
    def test_a_run_ends_at_its_block_wherever_that_is(self, length: int) -> None:
        [found] = self.longest([length])
        assert length <= found <= length + 1

    @pytest.mark.parametrize("start", [200, 512, 1_003, 2_588])
    def test_a_gap_of_eight_blocks_ends_a_run(self, start: int) -> None:
        """As caches have that drop what is out of a window."""
        prompt, some = text(7, self.LONG), self.large()
        number = some.add_column()
        some.add_keys(number, np.delete(prompt, slice(start, start + 8)))
        assert start <= some.longest_runs(prompt)[number] <= start + 1

    @pytest.mark.parametrize(
        "lengths",
        [
            [2_600, 2_600],
            [2_600, 1_100, 0, 63, 64, 65],
            [10, 70, 200, 300, 400, 500, 600, 700, 2_599],
            [2_600] * 9,
            [1_400] * 6 + [1_500] * 6,
            [64] * 5,
        ],
    )
    def test_every_worker_gets_its_own_run(self, lengths: list[int]) -> None:
        for found, length in zip(self.longest(lengths), lengths, strict=True):
            # A false positive lengthens a run now and then, by little.
            assert length <= found <= length + 2

    def test_credit_given_again_after_an_overflow_covers_the_whole_prefix(self) -> None:
        some = PrefixIndex(DigestShape(4_096, 0.001), 400)
        number = some.add_column()
        some.overlay(number, text(1, 150))
        some.overlay(number, text(1, 180))
        assert some.overlay_keys(number) == 180, "only what is new is added"
        some.overlay(number, text(2, 40))
        assert some.overlay_keys(number) == 220, "the generation is full: a new one began"
        some.overlay(number, text(1, 190))
        some.age_overlay(number)
        assert held(some, text(1, 190)) >= 190, "the new generation has all of the prefix"


class TestColumns:
    @pytest.mark.parametrize("columns", [8, 9, 17, 33, 65, 200])
    def test_the_matrix_grows_and_keeps_what_it_holds(self, columns: int) -> None:
        """Widths of 1, 2, 4, 8 and more bytes: every word size that a row can have."""
        grown = index()
        for number in range(columns):
            assert grown.add_column() == number
            grown.overlay(number, text(number, 2))
        assert grown.width >= columns
        for number in range(columns):
            runs = grown.longest_runs(text(number, 2))
            assert np.flatnonzero(runs == 2).tolist() == [number]

    def test_a_removed_column_is_given_out_again_empty(self) -> None:
        """MM1: workers that come and go leave nothing behind."""
        reused = index(3)
        empty = reused.nbytes
        for _ in range(50):
            put(reused, 1, text(1))
            reused.overlay(1, text(2))
            reused.remove_column(1)
            assert reused.nbytes < empty
            assert reused.add_column() == 1
            assert (held(reused, text(1), 1), held(reused, text(2), 1)) == (0, 0)
        assert (reused.width, reused.nbytes) == (8, empty)

    def test_memory_is_the_matrix_and_two_filters_a_column(self) -> None:
        bare, three = index(), index(3)
        assert bare.nbytes == shape().num_bits
        assert three.nbytes - bare.nbytes == 3 * 2 * shape().num_bytes

    def test_columns_do_not_touch_each_other(self) -> None:
        both = index(2)
        for column in (0, 1):
            put(both, column, text(1))
        both.clear(0)
        assert both.longest_runs(text(1))[:2].tolist() == [0, 6]

    def test_fill_is_that_of_the_digest_without_the_overlay(self) -> None:
        one = index(1)
        digest = digest_of(text(1))
        put(one, 0, text(1))
        one.overlay(0, text(2))
        assert one.digest_fill(0) == pytest.approx(digest.fill)
        assert digest.fill > 0


class TestDigests:
    def test_a_new_digest_takes_the_place_of_the_old(self) -> None:
        """CI1: replaced, never merged."""
        one = index(1)
        put(one, 0, text(1))
        put(one, 0, text(2))
        assert (held(one, text(1)), held(one, text(2))) == (0, 6)

    def test_deltas_add(self) -> None:
        one = index(1)
        put(one, 0, text(1)[:2])
        one.add_keys(0, text(1)[2:])
        assert held(one, text(1)) == 6

    def test_cleared_bits_take_their_keys_away_unless_the_overlay_holds_them(self) -> None:
        one = index(1)
        put(one, 0, text(1), text(2), text(3))
        one.overlay(0, text(2))
        gone = np.concatenate([text(1), text(2)])
        kept = set(one.shape.positions(text(3)).reshape(-1).tolist())
        bits = set(one.shape.positions(gone).reshape(-1).tolist()) - kept
        one.clear_bits(0, np.array(sorted(bits), dtype=np.int64))
        assert [held(one, text(seed)) for seed in (1, 2, 3)] == [0, 6, 6]
        one.age_overlay(0)
        one.age_overlay(0)
        assert [held(one, text(seed)) for seed in (1, 2, 3)] == [0, 0, 6]

    def test_clearing_forgets_digest_and_overlay(self) -> None:
        one = index(1)
        put(one, 0, text(1))
        one.overlay(0, text(2))
        one.clear(0)
        assert (held(one, text(1)), held(one, text(2)), one.overlay_keys(0)) == (0, 0, 0)
        put(one, 0)
        assert held(one, text(2)) == 0


class TestOverlay:
    def test_credit_appears_at_once(self) -> None:
        one = index(1)
        one.overlay(0, text(1))
        assert held(one, text(1)) == 6
        assert one.overlay_keys(0) == 6

    def test_it_survives_a_snapshot(self) -> None:
        one = index(1)
        one.overlay(0, text(1))
        put(one, 0, text(2))
        assert (held(one, text(1)), held(one, text(2))) == (6, 6)

    def test_it_ends_after_two_ageings(self) -> None:
        one = index(1)
        one.overlay(0, text(1))
        one.age_overlay(0)
        assert held(one, text(1)) == 6
        one.age_overlay(0)
        assert (held(one, text(1)), one.overlay_keys(0)) == (0, 0)

    def test_credit_given_again_lives_on(self) -> None:
        one = index(1)
        one.overlay(0, text(1))
        one.age_overlay(0)
        one.overlay(0, text(1))
        one.age_overlay(0)
        assert held(one, text(1)) == 6

    @pytest.mark.parametrize("by_delta", [True, False])
    def test_ageing_never_takes_the_digests_own_keys(self, by_delta: bool) -> None:
        one = index(1)
        one.overlay(0, text(1))
        if by_delta:
            one.add_keys(0, text(1))
        else:
            put(one, 0, text(1))
        for _ in range(3):
            one.age_overlay(0)
        assert held(one, text(1)) == 6

    @pytest.mark.parametrize("blocks", [1, 6, 10, 50, 250])
    @pytest.mark.parametrize("max_overlay_keys", [20, 1_000])
    def test_credit_is_the_same_whether_or_not_the_prompt_was_just_looked_up(
        self, blocks: int, max_overlay_keys: int
    ) -> None:
        """Longer than a lookup's first chunk, and over the overlay's bound, included."""
        seen, unseen = (PrefixIndex(DigestShape(4_096, 0.001), max_overlay_keys) for _ in range(2))
        prompt = text(1, blocks)
        for each in (seen, unseen):
            each.add_column()
            each.overlay(0, text(1, 3))
        seen.longest_runs(prompt)
        for each in (seen, unseen):
            each.overlay(0, prompt)
        assert held(seen, prompt) == held(unseen, prompt) >= min(blocks, max_overlay_keys // 2)
        assert seen.digest_fill(0) == unseen.digest_fill(0) == 0

    def test_its_own_bits_count_as_memory_once_a_digest_came(self) -> None:
        one = index(1)
        one.overlay(0, text(1))
        before = one.nbytes
        put(one, 0, text(2))
        assert one.nbytes == before + one.shape.num_bytes

    def test_no_keys_are_no_credit(self) -> None:
        one = index(1)
        one.overlay(0, no_keys())
        assert one.overlay_keys(0) == 0

    def test_it_is_bounded_and_the_older_half_leaves_first(self) -> None:
        one = index(1, max_overlay_keys=20)
        for seed in range(10):
            one.overlay(0, text(seed, 6))
            assert one.overlay_keys(0) <= 20
        assert held(one, text(9)) == 6
        assert held(one, text(0)) == 0

    def test_of_a_prompt_over_the_bound_the_beginning_is_kept(self) -> None:
        one = index(1, max_overlay_keys=20)
        one.overlay(0, text(1, 50))
        assert held(one, text(1, 50)) == 10


class OverlayMachine(RuleBasedStateMachine):
    """Any order of routing, ageing, snapshots and deltas against a model of sets."""

    @initialize()
    def start(self) -> None:
        self.index = index(2, max_overlay_keys=10_000)
        self.digest: set[int] = set()
        self.current: set[int] = set()
        self.older: set[int] = set()

    @rule(seed=st.integers(0, 5), blocks=st.integers(0, 5))
    def route(self, seed: int, blocks: int) -> None:
        self.index.overlay(0, text(seed, blocks))
        self.current |= set(text(seed, blocks).tolist())

    @rule()
    def age(self) -> None:
        self.index.age_overlay(0)
        self.older, self.current = self.current, set()

    @rule(seeds=st.sets(st.integers(0, 5)))
    def snapshot(self, seeds: set[int]) -> None:
        keys = [text(seed, 5) for seed in sorted(seeds)]
        put(self.index, 0, *keys)
        self.digest = {key for each in keys for key in each.tolist()}

    @rule(seed=st.integers(0, 5))
    def delta(self, seed: int) -> None:
        self.index.add_keys(0, text(seed, 5))
        self.digest |= set(text(seed, 5).tolist())

    @rule(seed=st.integers(0, 5), blocks=st.integers(0, 5))
    def remove(self, seed: int, blocks: int) -> None:
        gone = self.digest & set(text(seed, 5)[blocks:].tolist())
        self.digest -= gone
        bits = self.bits(gone) - self.bits(self.digest)
        self.index.clear_bits(0, np.array(sorted(bits), dtype=np.int64))

    def bits(self, keys: set[int]) -> set[int]:
        chosen = np.array(sorted(keys), dtype=np.uint64)
        return set(self.index.shape.positions(chosen).reshape(-1).tolist())

    @rule()
    def clear(self) -> None:
        self.index.clear(0)
        self.digest, self.current, self.older = set(), set(), set()

    @invariant()
    def runs_are_those_of_the_model(self) -> None:
        live = self.digest | self.current | self.older
        for seed in range(6):
            keys = text(seed, 5)
            expected = next((n for n, key in enumerate(keys.tolist()) if key not in live), 5)
            assert self.index.longest_runs(keys)[:2].tolist() == [expected, 0]

    @invariant()
    def the_matrix_is_the_columns_live_bits(self) -> None:
        column = np.unpackbits(self.index._columns[0].live_bits, bitorder="little")
        matrix = self.index._matrix[:, 0] & 1
        assert np.array_equal(column[: len(matrix)], matrix)


TestOverlayInAnyOrder = OverlayMachine.TestCase
TestOverlayInAnyOrder.settings = settings(max_examples=30, stateful_step_count=20)
