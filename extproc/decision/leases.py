"""``LeaseWatch``: leases whose end nobody told, found by what workers say and do not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from extproc.decision.ticket import Freed, Ticket
from extproc.policy import LeasePolicy

Ended = list[tuple[Ticket, Freed]]


class LeaseWatch:
    """Leases by the worker that has them.

    Attributes:
        freed: leases given back by reason, and pool.
        unknown: requests that workers list and no lease here covers, at their last report.
    """

    def __init__(self, policy: LeasePolicy) -> None:
        self.policy = policy
        self.freed: Counter[tuple[str, Freed]] = Counter()
        self.unknown: dict[str, int] = {}
        self._held: dict[str, dict[str, Ticket]] = {}
        self._renewable: dict[str, Ticket] = {}
        self._handed_over: set[str] = set()

    def placed(self, ticket: Ticket) -> None:
        """Its request was sent to a worker."""
        if ticket.lease is not None and ticket.booking is not None:
            self._held.setdefault(ticket.booking.worker.address, {})[ticket.id] = ticket
            ticket.listed = False
            ticket.absent = 0
            if ticket.prefill is not None:
                self._handed_over.add(ticket.id)
            if ticket.renewable:
                self._renewable[ticket.id] = ticket

    def forget(self, ticket: Ticket) -> None:
        """The lease ends, or moves."""
        self._renewable.pop(ticket.id, None)
        self._handed_over.discard(ticket.id)
        if ticket.booking is not None:
            held = self._held.get(ticket.booking.worker.address)
            if held is not None:
                held.pop(ticket.id, None)
                if not held:
                    del self._held[ticket.booking.worker.address]

    def count(self, ticket: Ticket, why: Freed) -> None:
        """A lease was given back."""
        self.freed[ticket.served.name, why] += 1

    def listed(self, address: str, leases: frozenset[str], now: float) -> Ended:
        """A worker's complete list of what it runs: which of its leases have ended.

        A request that was never listed may be on its way; one that was, and is missing from
        several lists in a row, is over, whether or not its end was told.
        """
        held = self._held.get(address, {})
        # A worker that prefills for another lists that one's request.
        self.unknown[address] = len(leases - held.keys() - self._handed_over)
        ended: Ended = []
        for ticket in held.values():
            if ticket.id in leases:
                ticket.listed = True
                ticket.absent = 0
                ticket.renewed_at = now
            elif ticket.listed:
                ticket.absent += 1
                if ticket.absent >= self.policy.absent_reports:
                    ended.append((ticket, Freed.ABSENT))
            elif ticket.lease and now - ticket.lease.granted_at > self.policy.unseen_s:
                ended.append((ticket, Freed.UNSEEN))
        return ended

    def of(self, address: str) -> Iterable[Ticket]:
        """Requests that a worker has."""
        return self._held.get(address, {}).values()

    def worker_lost(self, address: str) -> Ended:
        """A worker left the pool with all that it had."""
        self.unknown.pop(address, None)
        return [(ticket, Freed.WORKER_LOST) for ticket in self.of(address)]

    def silent(self, now: float) -> Ended:
        """Leases of API callers that gave no sign of life for too long.

        A worker's list is such a sign, so a long generation on a worker that lists its
        requests needs no renewal.
        """
        ttl_s = self.policy.api_ttl_s
        return [
            (ticket, Freed.SILENT)
            for ticket in self._renewable.values()
            if now - ticket.renewed_at > ttl_s
        ]

    def mismatch(self, addresses: Iterable[str]) -> int:
        """Leases that workers should list and do not, and requests listed without a lease."""
        missing = 0
        for address in addresses:
            if address in self.unknown:
                missing += self.unknown[address]
                missing += sum(1 for ticket in self.of(address) if ticket.absent)
        return missing
