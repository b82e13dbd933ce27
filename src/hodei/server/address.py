"""Which clients count as one place: an IPv4 address, or a network of 64 bits of IPv6, which is what one host is given."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


def place_of(client: Sequence[Any] | None) -> str:
    """ "" for a client without an address (a Unix socket)."""
    return _place(str(client[0])) if client else ""


@lru_cache(maxsize=4096)
def _place(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
