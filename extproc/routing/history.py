"""Where conversations and sessions went last, in tables that drop the longest unused."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from extproc.tokens.blocks import Keys

_LOOKED_BACK_BLOCKS = 256
"""How far before the end of the cached part a conversation's last prompt may end."""
_JUDGED_USES = 10
OSCILLATING = 0.1
"""Share of a conversation's requests that changed its worker, from which it oscillates."""


class Placement(msgspec.Struct, frozen=True):
    """A conversation's last worker, and how often it changed over how many requests."""

    key: int
    address: str
    placed_at: float
    uses: int = 0
    switches: int = 0

    @property
    def oscillates(self) -> bool:
        """Whether it changes its worker more often than a tenth of the time."""
        return self.uses >= _JUDGED_USES and self.switches > OSCILLATING * self.uses


class Conversations:
    """Placements by the last full block key of each prompt.

    The next turn's prompt runs through that block, so it finds its own conversation and
    neither another one nor a shared system prompt.

    Attributes:
        repeats, switches: requests that continued a known conversation, and those of them
            that went to another worker; totals.
        oscillating: conversations in the table that change too often.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._placements: OrderedDict[int, Placement] = OrderedDict()
        self.repeats = 0
        self.switches = 0
        self.oscillating = 0

    def __len__(self) -> int:
        return len(self._placements)

    def find(self, cached_keys: Keys) -> Placement | None:
        """The placement of the prompt that this one continues or repeats.

        Args:
            cached_keys: of the prefix that some worker has; that prompt ends within them.
        """
        latest_first = reversed(cached_keys[-_LOOKED_BACK_BLOCKS:].tolist())
        key = next(filter(self._placements.__contains__, latest_first), None)
        if key is None:
            return None
        self._placements.move_to_end(key)
        return self._placements[key]

    def place(self, keys: Keys, before: Placement | None, address: str, now: float) -> None:
        """A prompt goes to a worker, continuing ``before`` if that is known."""
        key = int(keys[-1])
        uses = switches = 0
        if before is not None:
            moved = address != before.address
            self.repeats += 1
            self.switches += moved
            uses, switches = before.uses + 1, before.switches + moved
            self._drop(before.key)
        self._drop(key)
        if len(self._placements) >= self._max_entries:
            self._drop(next(iter(self._placements)))
        placement = Placement(key, address, now, uses, switches)
        self._placements[key] = placement
        self.oscillating += placement.oscillates

    def _drop(self, key: int) -> None:
        old = self._placements.pop(key, None)
        self.oscillating -= old is not None and old.oscillates


class Sessions:
    """Last worker by session, given as a hash of its id."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._addresses: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def find(self, session: int) -> str | None:
        """Address of the session's last worker."""
        return self._addresses.get(session)

    def place(self, session: int, address: str) -> None:
        """A request of the session goes to a worker."""
        self._addresses[session] = address
        self._addresses.move_to_end(session)
        if len(self._addresses) > self._max_entries:
            self._addresses.popitem(last=False)
