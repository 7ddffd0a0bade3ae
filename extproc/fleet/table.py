"""``WorkerTable``: what routing needs of every worker, as arrays over columns.

A decision reads whole arrays, so that its cost hardly grows with the fleet; events write
single elements. Column numbers are the prefix index's own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NEVER = -np.inf
ALWAYS = np.inf


class WorkerTable:
    """Arrays of shape (columns,), grown together.

    Attributes:
        present: the column belongs to a worker.
        ready: its last report said it can serve.
        fresh_until: seconds until which its last report is to be believed.
        suspect_until: seconds until which it is a last resort.
        in_flight: requests that this scheduler has on it.
        foreign: requests on it that came another way, from its reports.
        pending_prefill_tokens: uncached tokens sent to it, first token not yet seen.
        slots: requests it may have at once.
        digest_until: seconds until which its digest may be used; always for workers
            that sent none, whose overlay is all there is.
    """

    def __init__(self) -> None:
        self.present: Bools = np.zeros(0, dtype=bool)
        self.ready: Bools = np.zeros(0, dtype=bool)
        self.fresh_until: Floats = np.zeros(0)
        self.suspect_until: Floats = np.zeros(0)
        self.digest_until: Floats = np.zeros(0)
        self.in_flight: Ints = np.zeros(0, dtype=np.int64)
        self.foreign: Ints = np.zeros(0, dtype=np.int64)
        self.pending_prefill_tokens: Ints = np.zeros(0, dtype=np.int64)
        self.slots: Ints = np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.present)

    def resize(self, width: int) -> None:
        """Grow every array to ``width`` columns; never shrinks."""
        for name, array in vars(self).items():
            if len(array) < width:
                grown = np.zeros(width, dtype=array.dtype)
                grown[: len(array)] = array
                setattr(self, name, grown)

    def reset(self, column: int) -> None:
        """Forget a column's former worker."""
        for name, array in vars(self).items():
            array[column] = NEVER if name.endswith("_until") else 0

    def running(self) -> Ints:
        """Requests on each worker, ours and others'."""
        return self.in_flight + self.foreign

    def usable(self) -> Bools:
        """Workers that are there and ready, full or not."""
        return self.present & self.ready

    def has_slot(self) -> Bools:
        """Usable workers with room for one request more."""
        return self.usable() & (self.running() < self.slots)

    def last_resort(self, now: float) -> Bools:
        """Workers to use only when no better one is left: silent or suspect."""
        return (self.fresh_until <= now) | (self.suspect_until > now)
