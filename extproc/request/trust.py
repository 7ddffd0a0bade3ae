"""``TrustDomains``: the ``cache_salt`` that keeps a pool's tenants out of one another's cache.

Engines reuse a cached block only for requests with the salt that it was computed with, and
block keys are rooted in the salt, so hits are predicted only where the engine gives them.
``salt = hex(HMAC-SHA256(key, "tenant:" name))`` or ``"group:" name``: 64 characters, which
nobody without the key can make or turn back into a name.
"""

from __future__ import annotations

import hmac

from msgspec.structs import replace

from extproc.errors import UneditableBody
from extproc.policy import TrustPolicy
from extproc.request.profile import RequestProfile


class TrustDomains:
    """One pool's."""

    def __init__(self, policy: TrustPolicy) -> None:
        self._isolates = policy.isolate != "off"
        self._key = policy.key.get_secret_value().encode() if policy.key else b""
        self._groups = {
            tenant: group for group, tenants in policy.groups.items() for tenant in tenants
        }

    def isolate(self, profile: RequestProfile) -> RequestProfile:
        """The request with its tenant's salt in place of the client's.

        Raises:
            UneditableBody: the salt could not be put into its body.
        """
        if not self._isolates or not profile.counted:
            return profile
        if not profile.editable:
            raise UneditableBody(
                "Requests of this model must have a JSON object as body, without compression."
            )
        return replace(profile, cache_salt=self.salt(profile.identity.tenant), isolated=True)

    def salt(self, tenant: str) -> str:
        """Salt of a tenant, or of the group that it is in."""
        group = self._groups.get(tenant)
        name = f"tenant:{tenant}" if group is None else f"group:{group}"
        return hmac.digest(self._key, name.encode(), "sha256").hex()
