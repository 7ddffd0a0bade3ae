"""Profiles as data: which terms, how much each weighs, and how the leader is picked."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.policy import PickerMode, Profile, RoutingPolicy, Term


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """One profile.

    ``tie``: costs that differ by less are equal. ``uses_cache``: stickiness, hot prefixes and
    exploration narrow its choice.
    """

    weights: dict[Term, float]
    picker: PickerMode = "argmin"
    tie: float = 0.5
    uses_cache: bool = True


PROFILES: dict[Profile, ProfileSpec] = {
    "balanced": ProfileSpec(
        {
            "uncached": 4.0,
            "pending_prefill": 1.0,
            "running": 160.0,
            "over_slots": 2_000.0,
            "recent_work": 0.05,
            "slow_prefill": 1.0,
            "kv_pressure": 2_000.0,
            "health": 4_000.0,
            "session": 320.0,
            "adapter_cold": 2_000.0,
            "zone": 320.0,
        }
    ),
    "linear": ProfileSpec({"load": 1.2, "miss_share": 0.7, "switch": 0.3}, tie=1e-6),
    "health": ProfileSpec(
        {"health_loss": 1.0, "running": 2.0}, "two_choices", tie=1e-3, uses_cache=False
    ),
    "finish": ProfileSpec(
        {
            "finish": 1.0,
            "queued_tokens": 0.2,
            "kv_pressure": 2_000.0,
            "adapter_cold": 2_000.0,
            "zone": 320.0,
            "prefix_locality": 0.5,
        }
    ),
    "round_robin": ProfileSpec({"last_pick": 1.0}, uses_cache=False),
    "random": ProfileSpec({}, uses_cache=False),
    "least_requests": ProfileSpec({"running": 1.0}, uses_cache=False),
    "power_of_two": ProfileSpec({"running": 1.0}, "two_choices", uses_cache=False),
    "consistent_hash": ProfileSpec({"hash_rank": 1.0}, tie=1e-9, uses_cache=False),
}


def weights_of(policy: RoutingPolicy) -> dict[Term, float]:
    """The profile's weights with the policy's in their place; zero switches a term off."""
    merged = {**PROFILES[policy.profile].weights, **policy.weights}
    return {term: weight for term, weight in merged.items() if weight}
