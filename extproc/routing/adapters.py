"""``AdapterHomes``: which adapters (LoRA) each worker has loaded, as far as routing knows."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from extproc.fleet.pool import Pool
from extproc.fleet.table import Bools

_UNKNOWN_CAPACITY = 4
"""Adapters thought to fit on an engine that does not say how many do."""


class AdapterHomes:
    """The adapters sent to each worker lately, as many as its engine holds at once.

    Engines load an adapter with the first request for it and drop the longest unused.
    """

    def __init__(self) -> None:
        self._by_address: dict[str, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._by_address)

    def note(self, pool: Pool, address: str, adapter: str) -> None:
        """A request for an adapter goes to a worker."""
        if address not in self._by_address:
            self._by_address = {
                known: loaded for known, loaded in self._by_address.items() if known in pool.workers
            }
        loaded = self._by_address.setdefault(address, OrderedDict())
        loaded[adapter] = None
        loaded.move_to_end(adapter)
        report = pool.workers[address].last_report
        capacity = (report.max_adapters if report else 0) or _UNKNOWN_CAPACITY
        while len(loaded) > capacity:
            loaded.popitem(last=False)

    def loaded(self, pool: Pool, adapter: str) -> Bools:
        """Workers that should have an adapter loaded."""
        mask = np.zeros(len(pool.table), dtype=bool)
        for address, loaded in self._by_address.items():
            if adapter in loaded and (column := pool.column_of(address)) >= 0:
                mask[column] = True
        return mask
