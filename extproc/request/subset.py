"""The Endpoint Picker Protocol's subset hint: workers that the gateway allows."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.struct_pb2 import Struct

NAMESPACE = "envoy.lb.subset_hint"
KEY = "x-gateway-destination-endpoint-subset"
_MAX_ENTRIES = 4_096


def subset_hint(filters: Mapping[str, Struct]) -> frozenset[str] | None:
    """Addresses or bare ips of the hint, a list or one text with commas; None without one.

    An empty hint allows nobody, and so does one of another kind.
    """
    if NAMESPACE not in filters or KEY not in filters[NAMESPACE].fields:
        return None
    value = filters[NAMESPACE].fields[KEY]
    if value.WhichOneof("kind") == "list_value":
        entries = [each.string_value for each in value.list_value.values[:_MAX_ENTRIES]]
    else:
        entries = value.string_value.split(",")[:_MAX_ENTRIES]
    return frozenset(entry for each in entries if (entry := each.strip()))
