"""Bounds on requests, and where their text becomes tokens."""

from __future__ import annotations

from extproc.policy.base import PositiveFloat, PositiveInt, Section


class RequestPolicy(Section):
    """Bounds on what one request may be."""

    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    """A longer body gets 413."""
    max_decoded_bytes: PositiveInt = 64 * 1024 * 1024
    """Cap on what a compressed body may expand to before kvgate stops reading it."""
    max_prompts: PositiveInt = 16
    """Prompts of a batch that are looked up; the rest is estimated."""
    media_part_tokens: PositiveInt = 576
    """Charge for an image, audio or video part, whose real size only the engine knows."""


class TokenizationPolicy(Section):
    """Where and how much kvgate tokenises."""

    inline_max_chars: PositiveInt = 8_192
    """Cold text up to this long is tokenised on the event loop (about 3 ms)."""
    threads: PositiveInt = 1
    """Threads for longer cold text."""
    max_pending: PositiveInt = 64
    """Cold prompts waiting for a thread; beyond it a request is routed by load."""
    timeout_s: PositiveFloat = 5.0
    """A prompt not tokenised by then is routed by load."""
    max_prompt_chars: PositiveInt = 2_097_152
    """Only so much of a prompt is tokenised; the rest is estimated."""
    segment_cache_bytes: PositiveInt = 128 * 1024 * 1024
    """Token ids kept by text, per pool."""
    boundary_cache_bytes: PositiveInt = 64 * 1024 * 1024
    """Block keys kept by conversation prefix, per pool."""
