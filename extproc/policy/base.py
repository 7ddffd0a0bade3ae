"""What the parts of the policy are made of: number types, addresses, the section base."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ModelName = Annotated[str, Field(min_length=1)]


def parse_address(text: str) -> tuple[str, int]:
    """Split ``ip:port`` (IPv6 in brackets) into a normal-form ip and a port.

    Names are refused: Envoy's destination header takes addresses only.

    Raises:
        ValueError: anything else.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
        number = int(port) if port.isascii() and port.isdigit() else 0
    except ValueError:
        raise ValueError(f"{text!r} is not ip:port") from None
    if not colon or bracketed != (ip.version == 6) or not 0 < number < 65_536:
        raise ValueError(f"{text!r} is not ip:port")
    return str(ip), number


def normal_address(text: str) -> str:
    """Normal form of ``ip:port``, as Envoy prints it.

    Raises:
        ValueError: not an address.
    """
    host, port = parse_address(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Address = Annotated[str, AfterValidator(normal_address)]


class Section(BaseModel):
    """Base of every part of the policy: frozen, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
