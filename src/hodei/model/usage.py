"""What accounts have used, as a store keeps it."""

from __future__ import annotations

from msgspec import Struct

AccountPath = tuple[str, ...]


class UsageRow(Struct, frozen=True):
    """What one account itself used in one bucket of time: one row for (path, resource, start_ms). `amount` is in base
    units times milliseconds and may be larger than 64 bits; 0 means that the row is gone."""

    path: AccountPath
    resource: str
    start_ms: int
    width_ms: int
    amount: int
