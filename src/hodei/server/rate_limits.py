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


class ConcurrencyLimit:
    """ConfigOrigin many at once, in total and per caller (0: no limit). `what` is a plural noun for the error text."""

    def __init__(self, what: str, *, total: int, each: int = 0) -> None:
        self.what, self.total, self.each = what, total, each
        self.held: Counter[str] = Counter()
        self.count = 0

    def acquire(self, who: str) -> Callable[[], None]:
        """Returns the function that releases it; further calls of that do nothing. TooManyRequests or ServerBusy at the limit."""
        if self.each and self.held[who] >= self.each:
            raise TooManyRequests(
                f"{who} already has {self.each} open {self.what}", hint=f"close some {self.what} first"
            )
        if self.count >= self.total:
            raise ServerBusy(f"the server has {self.total} open {self.what}, its limit", hint="try again in a moment")
        self.held[who] += 1
        self.count += 1
        acquired = True

        def release() -> None:
            nonlocal acquired
            if acquired:
                acquired = False
                self.count -= 1
                self.held[who] -= 1
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


class ByteLimit:
    """ConfigOrigin many bytes are held for requests at once, in total and per caller (0: no limit)."""

    def __init__(self, what: str, *, total: int, each: int = 0) -> None:
        self.what, self.total, self.each = what, total, each
        self.held: Counter[str] = Counter()
        self.count = 0

    @contextmanager
    def hold(self, who: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that adds bytes (TooManyRequests or ServerBusy at the limit); all are released at the end."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.each and self.held[who] + size > self.each:
                raise TooManyRequests(
                    f"{who} exceeds its limit of {self.each} bytes of {self.what}", hint="send them one after another"
                )
            if self.count + size > self.total:
                raise ServerBusy(
                    f"the server is at its limit of {self.total} bytes of {self.what}", hint="try again in a moment"
                )
            mine += size
            self.held[who] += size
            self.count += size

        try:
            yield take
        finally:
            self.count -= mine
            self.held[who] -= mine
            if not self.held[who]:
                del self.held[who]
