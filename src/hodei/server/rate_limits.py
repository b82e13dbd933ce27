"""Limits on concurrency, rate and bytes, in total and per caller.

A caller is the name of a token, or the address of a client without one (`limit_key`). The limit per caller is well below
the total, so that one caller alone cannot lock out the others.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from starlette.types import Scope

from hodei.server.errors import RateLimited, ServerBusy, TooManyRequests
from hodei.server.route import Principal

_MAX_BUCKETS = 4096


def client_address(client: Sequence[Any] | None) -> str:
    """The IPv4 address, or the /64 network of an IPv6 address, which is what one host gets. "" for a Unix socket."""
    return _normalized(str(client[0])) if client else ""


@lru_cache(maxsize=4096)
def _normalized(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def limit_key(who: Principal, scope: Scope) -> str:
    """The caller whose limits a request counts against. Token names have no colon."""
    return who.name or f"address:{client_address(scope.get('client'))}"


class UsageLimit:
    """How much may be held at once, in total and per caller (0: no limit). `what` is a plural noun for the error text."""

    def __init__(self, what: str, *, total: int, per_caller: int = 0) -> None:
        self.what, self.total, self.per_caller = what, total, per_caller
        self.held: Counter[str] = Counter()
        self.count = 0

    def acquire(self, who: str, amount: int = 1) -> Callable[[], None]:
        """Returns the function that releases it; calling that again does nothing. TooManyRequests or ServerBusy at the limit."""
        if self.per_caller and self.held[who] + amount > self.per_caller:
            raise TooManyRequests(
                f"{who} is at its limit of {self.per_caller} {self.what} at once",
                hint="wait until some of them are done",
            )
        if self.count + amount > self.total:
            raise ServerBusy(f"the server is at its limit of {self.total} {self.what}", hint="try again in a moment")
        self.held[who] += amount
        self.count += amount
        acquired = True

        def release() -> None:
            nonlocal acquired
            if acquired:
                acquired = False
                self.count -= amount
                self.held[who] -= amount
                if not self.held[who]:
                    del self.held[who]

        return release

    @contextmanager
    def hold(self, who: str) -> Iterator[None]:
        release = self.acquire(who)
        try:
            yield
        finally:
            release()

    @contextmanager
    def hold_growing(self, who: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that acquires more; all of it is released at the end."""
        releases: list[Callable[[], None]] = []
        try:
            yield lambda amount: releases.append(self.acquire(who, amount))
        finally:
            for release in releases:
                release()


class RateLimit:
    """A token bucket per caller: `per_s` requests a second (0: no limit), `burst` of them at once."""

    def __init__(self, *, per_s: float, burst: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._monotonic = per_s, max(burst, 1), monotonic
        self._full_at: dict[str, float] = {}  # by caller, when its bucket is full again

    def spend(self, who: str) -> None:
        """Counts one request. RateLimited if the bucket is empty."""
        if not self._per_s:
            return
        now = self._monotonic()
        full_at = max(self._full_at.get(who, now), now) + 1 / self._per_s
        late_s = full_at - now - self._burst / self._per_s
        if late_s > 0:
            raise RateLimited(
                f"{who} sends more than {self._per_s:g} requests per second",
                hint="wait for the seconds in Retry-After; submit many jobs in one request",
                headers={"retry-after": str(math.ceil(late_s))},
            )
        if who not in self._full_at and len(self._full_at) >= _MAX_BUCKETS:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        self._full_at[who] = full_at
