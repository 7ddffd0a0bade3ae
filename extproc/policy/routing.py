"""How a worker is chosen."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from extproc.policy.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

Profile = Literal[
    "balanced",
    "linear",
    "health",
    "finish",
    "round_robin",
    "random",
    "least_requests",
    "power_of_two",
    "consistent_hash",
]
Term = Literal[
    "uncached",
    "pending_prefill",
    "running",
    "over_slots",
    "queued_tokens",
    "recent_work",
    "slow_prefill",
    "finish",
    "kv_pressure",
    "health",
    "health_loss",
    "load",
    "miss_share",
    "prefix_locality",
    "switch",
    "session",
    "adapter_cold",
    "zone",
    "last_pick",
    "hash_rank",
]
PickerMode = Literal["argmin", "two_choices", "softmax"]
Share = Annotated[float, Field(ge=0, le=1)]


class HealthPolicy(Section):
    """Health score of a worker, 0 to 100, from what its requests and reports show."""

    ttft_limit_s: PositiveFloat = 5.0
    """A mean TTFT of this long, beside the prefill itself, costs all 35 points for TTFT."""
    slow_prefill_tokens_per_s: PositiveFloat = 2_000.0
    """Pace at which even a slow worker should prefill what it was sent."""
    queue_limit: PositiveInt = 16
    """So many requests waiting inside the engine cost all 25 points of queue and KV use."""
    recovery_points_per_s: PositiveFloat = 15.0
    """A score falls at once and rises at most this fast, also that of a new worker."""
    first_score: Annotated[float, Field(ge=0, le=100)] = 40.0
    """Where a new or restarted worker begins."""
    cool_down_s: PositiveFloat = 4.0
    """After an answer that says saturated, long prompts avoid the worker for this long."""
    cool_down_min_tokens: NonNegativeInt = 2_048
    """Uncached tokens from which a prompt is long."""
    stall_after_s: PositiveFloat = 3.0
    """Without any sign of progress beyond the expected prefill time, a worker that has
    requests to answer is a last resort until it shows one."""


class AffinityPolicy(Section):
    """When a cached prefix is a reason to choose a worker, and when it is not."""

    min_benefit: Share = 0.0
    """A match below this share of the prompt is no reason to choose a worker."""
    max_extra_running: PositiveInt = 64
    """Cached prefixes count only on workers with at most so many requests more than the
    least loaded one."""
    sticky_s: NonNegativeFloat = 0.0
    """A conversation stays on its last worker for this long, 0: cost alone decides."""
    sticky_max_load: Share = 0.9
    """Share of its slots in use beyond which a worker keeps no conversation."""
    max_prefixes: PositiveInt = 32_768
    """Conversations whose last worker is remembered; the longest unused leave first."""
    max_sessions: PositiveInt = 32_768
    """Sessions (`x-session-id`) whose last worker is remembered."""
    hash_tokens: PositiveInt = 1_024
    """`consistent_hash`: prompts alike in so many first tokens go to one worker."""
    hash_max_load: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.25
    """`consistent_hash`: a worker takes at most this multiple of the pool's mean requests."""


class ReplicaPolicy(Section):
    """On how many workers a hot prefix is held."""

    max_holders: PositiveInt = 3
    """Workers that get a hot prefix while they have room for it."""
    hot_per_s: PositiveFloat = 2.0
    """A prefix asked for this often, over half a minute, is hot."""
    min_share: Share = 0.3
    """Only a match of at least this share of the prompt keeps a request with the holders."""
    max_load: Share = 0.75
    """Share of their slots in use beyond which the holders may become more."""
    max_extra_running: PositiveInt = 16
    """The same for requests beyond those of the least loaded worker."""
    max_prefixes: PositiveInt = 4_096
    """Prefixes counted; the longest unused leave first."""


class WarmupPolicy(Section):
    """How a new or restarted worker comes into its share of the traffic."""

    duration_s: NonNegativeFloat = 60.0
    """How long a worker counts as new."""
    share: Share = 0.08
    """Share of prompts without a useful match that goes to new workers in any case."""
    max_load: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """A new worker is explored only below this multiple of the pool's mean requests."""
    load_discount: Share = 0.1
    """Part of its load that a new worker is forgiven, fading over its time as new."""


class DisaggregationPolicy(Section):
    """Long prompts computed on a worker labelled `prefill` or `both` for one labelled `decode`
    or `both`, whose sidecar is told by the header `x-prefiller-host-port`."""

    min_uncached_tokens: NonNegativeInt = 0
    """Uncached tokens from which a prompt is handed over; 0: never."""
    transfer_cost: NonNegativeFloat = 0.1
    """What moving the KV of one prompt token costs, in tokens of prefill: a worker of role
    `both` hands over only what is done sooner so."""


class RoutingPolicy(Section):
    """How a worker is chosen: the lowest sum of weighted cost terms wins."""

    profile: Profile = "balanced"
    """A named list of terms, weights and a picker; docs/routing describes each."""
    weights: dict[Term, NonNegativeFloat] = Field(default_factory=dict)
    """Weights in place of the profile's, or of terms that it does not have."""
    picker: PickerMode | None = None
    """How the leader is picked from the costs; the profile's own if not given."""
    softmax_temperature: PositiveFloat = 500.0
    """`softmax`: cost difference that makes a worker e times less likely."""
    min_prefix_tokens: NonNegativeInt = 0
    """A shorter cached prefix gives no credit."""
    host_hit_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """What a block in the engine's host memory is worth beside one where it computes."""
    endpoints: Annotated[int, Field(ge=1, le=16)] = 3
    """Length of the ordered list that Envoy's retries walk."""
    max_in_flight_per_worker: PositiveInt = 256
    """Slots of a worker that does not report how many sequences it runs."""
    max_engine_queue: NonNegativeInt = 4
    """Requests that may wait inside an engine; beyond it they wait here, where order is kept."""
    max_over_slots: NonNegativeInt = 2
    """Requests beyond its slots that a worker may be sent while another has room, because it
    holds so much of their prompts. Only with a weight for `over_slots`, their cost."""
    suspect_s: NonNegativeFloat = 2.0
    """A worker that Envoy had to retry away from is a last resort for this long."""
    zone: str = ""
    """Zone of this gateway: workers labelled with another one cost the weight of `zone` more.
    Empty: zones do not matter."""
    zone_label: str = "zone"
    """Label that holds a worker's zone (agent's `--label zone=a`)."""
    calibrate: bool = True
    """Scale down the cached tokens predicted on workers whose engines report fewer."""
    health: HealthPolicy = HealthPolicy()
    """What makes a worker look ill."""
    affinity: AffinityPolicy = AffinityPolicy()
    """When to stay."""
    replicas: ReplicaPolicy = ReplicaPolicy()
    """Hot prefixes."""
    warmup: WarmupPolicy = WarmupPolicy()
    """New workers."""
    disaggregation: DisaggregationPolicy = DisaggregationPolicy()
    """Prefill and decode on different workers."""
