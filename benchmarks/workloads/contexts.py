"""Workloads of single requests: shared system prompts, retrieved documents, long beside short."""

from __future__ import annotations

import random

import msgspec

from benchmarks.workloads.plan import Planned, Segment
from benchmarks.workloads.shapes import Count, Positive, Share, Spread, Zipf, arrivals


class SharedPrompts(
    msgspec.Struct, frozen=True, tag="shared", tag_field="kind", forbid_unknown_fields=True
):
    """A few long system prompts, asked by many in words of their own."""

    rate_per_s: Positive = 50.0
    duration_s: Positive = 45.0
    seed: int = 1
    system_prompts: Count = 20
    system_tokens: Count = 2_000
    exponent: Positive = 1.0
    """Zipf's, of the system prompts' popularity."""
    ask_tokens: Spread = Spread(100, 400, 2_000)
    answer_tokens: Spread = Spread(50, 150, 600)

    def requests(self) -> list[Planned]:
        """All requests, in order of time."""
        rng = random.Random(f"shared {self.seed}")
        popularity = Zipf(self.system_prompts, self.exponent)
        return [
            Planned(
                at_s,
                (
                    Segment(f"shared-{popularity.draw(rng)}", self.system_tokens, "system"),
                    Segment(f"shared-{self.seed}-ask-{number}", self.ask_tokens.count(rng), "user"),
                ),
                self.answer_tokens.count(rng),
            )
            for number, at_s in enumerate(arrivals(rng, self.rate_per_s, self.duration_s))
        ]


class Retrieval(
    msgspec.Struct, frozen=True, tag="rag", tag_field="kind", forbid_unknown_fields=True
):
    """Questions with retrieved documents before them, best match first.

    Two prompts share the documents that they begin with. Lengths are near Azure's chat trace
    (input p90 2,734, p99 4,142 tokens) at two or three documents.
    """

    rate_per_s: Positive = 20.0
    duration_s: Positive = 45.0
    seed: int = 1
    documents: Count = 300
    exponent: Positive = 1.0
    """Zipf's, of the documents' popularity."""
    retrieved: Count = 3
    system_tokens: Count = 200
    document_tokens: Spread = Spread(700, 1_500, 4_000)
    ask_tokens: Spread = Spread(50, 150, 500)
    answer_tokens: Spread = Spread(129, 424, 1_000)

    def requests(self) -> list[Planned]:
        """All requests, in order of time."""
        rng = random.Random(f"rag {self.seed}")
        popularity = Zipf(self.documents, self.exponent)
        library = [
            Segment(f"rag-document-{number}", self.document_tokens.count(rng))
            for number in range(self.documents)
        ]
        requests = []
        for number, at_s in enumerate(arrivals(rng, self.rate_per_s, self.duration_s)):
            picked = sorted({popularity.draw(rng) for _ in range(self.retrieved)})
            prompt = (
                Segment("rag-system", self.system_tokens, "system"),
                Segment("rag-context", 20, "user"),
                *(library[rank] for rank in picked),
                Segment(f"rag-{self.seed}-ask-{number}", self.ask_tokens.count(rng)),
            )
            requests.append(Planned(at_s, prompt, self.answer_tokens.count(rng)))
        return requests


class LongShortMix(
    msgspec.Struct, frozen=True, tag="mix", tag_field="kind", forbid_unknown_fields=True
):
    """Short questions with some very long prompts between them, in bursts.

    Half of the long prompts are about a few shared documents. ``cv`` of the gaps is ServeGen's
    rate-weighted 2.3.
    """

    rate_per_s: Positive = 12.0
    duration_s: Positive = 45.0
    seed: int = 1
    cv: Positive = 2.3
    long_share: Share = 0.1
    long_tokens: Count = 16_000
    shared_documents: Count = 6
    shared_share: Share = 0.5
    """Of the long prompts."""
    short_tokens: Spread = Spread(400, 1_600, 6_000)
    answer_tokens: Spread = Spread(80, 300, 800)

    def requests(self) -> list[Planned]:
        """All requests, in order of time."""
        rng = random.Random(f"mix {self.seed}")
        times = arrivals(rng, self.rate_per_s, self.duration_s, self.cv)
        return [
            Planned(at_s, self._prompt(rng, number), self.answer_tokens.count(rng))
            for number, at_s in enumerate(times)
        ]

    def _prompt(self, rng: random.Random, number: int) -> tuple[Segment, ...]:
        ask = Segment(f"mix-{self.seed}-ask-{number}", self.short_tokens.count(rng))
        if rng.random() >= self.long_share:
            return (ask,)
        shared = rng.random() < self.shared_share
        name = rng.randrange(self.shared_documents) if shared else f"{self.seed}-{number}"
        return (Segment(f"mix-document-{name}", self.long_tokens), ask)
