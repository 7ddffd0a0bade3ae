"""Several tenants with lanes: a few make most of the load, each is bursty on its own."""

from __future__ import annotations

import random

import msgspec

from benchmarks.workloads.plan import Planned, Segment
from benchmarks.workloads.shapes import Count, Positive, Share, Spread, Zipf, arrivals

ONLINE, BATCH = "online", "batch"


class Tenants(
    msgspec.Struct, frozen=True, tag="tenants", tag_field="kind", forbid_unknown_fields=True
):
    """Tenants as ServeGen's clients of deepseek-r1.

    The exponent gives the largest of 73 tenants 29% of the requests and the ten largest 71% (29%
    and 68% there); ``cv`` is its rate-weighted 2.3. A tenant's typical prompt has the median of
    there (508 tokens) and a shorter tail than there (p90 4,671), so that the mean over requests
    stays near its 1,596. Each tenant has a system prompt of its own.
    """

    rate_per_s: Positive = 20.0
    duration_s: Positive = 45.0
    seed: int = 1
    tenants: Count = 73
    exponent: Positive = 1.2
    cv: Positive = 2.3
    batch_share: Share = 0.3
    """Of the tenants; their requests go to the batch lane."""
    system_tokens: Count = 300
    prompt_tokens: Spread = Spread(508, 2_000, 4_000)
    """A tenant's typical question; a single one is up to twice as long."""
    answer_tokens: Spread = Spread(100, 300, 800)

    def requests(self) -> list[Planned]:
        """All requests, in order of time."""
        popularity = Zipf(self.tenants, self.exponent)
        requests = [
            request
            for rank in range(self.tenants)
            for request in self._of_tenant(rank, popularity.share(rank))
        ]
        return sorted(requests, key=lambda request: request.at_s)

    def lane(self, rank: int) -> str:
        """Lane of a tenant; batch tenants are spread over all ranks."""
        batch = int((rank + 1) * self.batch_share) > int(rank * self.batch_share)
        return BATCH if batch else ONLINE

    def _of_tenant(self, rank: int, share: float) -> list[Planned]:
        rng = random.Random(f"tenant {self.seed} {rank}")
        typical = self.prompt_tokens.draw(rng)
        own = Spread(typical, 2 * typical)
        system = Segment(f"tenant-{rank}", self.system_tokens, "system")
        times = arrivals(rng, share * self.rate_per_s, self.duration_s, self.cv)
        return [
            Planned(
                at_s,
                (system, Segment(f"tenant-{self.seed}-{rank}-{number}", own.count(rng), "user")),
                self.answer_tokens.count(rng),
                tenant=f"tenant-{rank}",
                lane=self.lane(rank),
            )
            for number, at_s in enumerate(times)
        ]
