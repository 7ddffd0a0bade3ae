"""The policy: every number that steers kvgate, validated once, frozen afterwards.

One YAML file, units in the names. Unknown fields are errors, and every message names the
field and the value it does not like.
"""

from extproc.policy.admission import AdmissionPolicy
from extproc.policy.base import normal_address, parse_address
from extproc.policy.cache import DigestPolicy, OverlayPolicy
from extproc.policy.document import Policy, load_policy, parse_policy
from extproc.policy.pool import PoolPolicy
from extproc.policy.reports import ReportPolicy
from extproc.policy.requests import RequestPolicy, TokenizationPolicy
from extproc.policy.routing import RoutingPolicy

__all__ = [
    "AdmissionPolicy",
    "DigestPolicy",
    "OverlayPolicy",
    "Policy",
    "PoolPolicy",
    "ReportPolicy",
    "RequestPolicy",
    "RoutingPolicy",
    "TokenizationPolicy",
    "load_policy",
    "normal_address",
    "parse_address",
    "parse_policy",
]
