"""The policy: every number that steers kvgate, validated once, frozen afterwards.

One YAML file, units in the names. Unknown fields are errors, and every message names the
field and the value it does not like.
"""

from extproc.policy.admission import (
    POOL_RULE,
    AdmissionPolicy,
    DegradeStep,
    LanePolicy,
    LeasePolicy,
    PoolAdmissionPolicy,
    PressurePolicy,
    QuotaMatch,
    QuotaRule,
    RolloutPolicy,
)
from extproc.policy.base import normal_address, parse_address
from extproc.policy.cache import DigestPolicy, OverlayPolicy
from extproc.policy.document import Policy, load_policy, parse_policy
from extproc.policy.identity import (
    IdentityPolicy,
    IdentitySource,
    MetadataSource,
    TenantClassPolicy,
    TenantPolicy,
    TenantSource,
)
from extproc.policy.pool import PoolPolicy
from extproc.policy.reports import ReportPolicy
from extproc.policy.requests import RequestPolicy, TokenizationPolicy
from extproc.policy.routing import (
    AffinityPolicy,
    DisaggregationPolicy,
    HealthPolicy,
    PickerMode,
    Profile,
    ReplicaPolicy,
    RoutingPolicy,
    Term,
    WarmupPolicy,
)
from extproc.policy.scaling import ScalingPolicy
from extproc.policy.trust import TrustPolicy

__all__ = [
    "POOL_RULE",
    "AdmissionPolicy",
    "AffinityPolicy",
    "DegradeStep",
    "DigestPolicy",
    "DisaggregationPolicy",
    "HealthPolicy",
    "IdentityPolicy",
    "IdentitySource",
    "LanePolicy",
    "LeasePolicy",
    "MetadataSource",
    "OverlayPolicy",
    "PickerMode",
    "Policy",
    "PoolAdmissionPolicy",
    "PoolPolicy",
    "PressurePolicy",
    "Profile",
    "QuotaMatch",
    "QuotaRule",
    "ReplicaPolicy",
    "ReportPolicy",
    "RequestPolicy",
    "RolloutPolicy",
    "RoutingPolicy",
    "ScalingPolicy",
    "TenantClassPolicy",
    "TenantPolicy",
    "TenantSource",
    "Term",
    "TokenizationPolicy",
    "TrustPolicy",
    "WarmupPolicy",
    "load_policy",
    "normal_address",
    "parse_address",
    "parse_policy",
]
