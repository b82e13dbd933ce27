"""Shares of the server: places, calls per second and bytes, in all and for each caller.

A caller is the name of a token, or the address of a client without one (`holder`). What one caller takes is bounded well
below what there is, so that one caller alone never shuts the others out.
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

from hodei.server.errors import Busy, TooFast, TooMany
from hodei.server.route import Principal

# --------------------------------------------------------------------------------------------- address
# Which clients count as one place: an IPv4 address, or a network of 64 bits of IPv6, which is what one host is given.


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


# ----------------------------------------------------------------------------------------------------

_KEPT = 4096


def holder(who: Principal, scope: Scope) -> str:
    """Whose share a call counts against. No token has a name with a colon in it."""
    return who.name or f"address:{place_of(scope.get('client'))}"


class Slots:
    """A bounded number of places, in all and for each caller (0: no limit). `what` is a plural noun for the error text."""

    def __init__(self, what: str, *, total: int, each: int = 0) -> None:
        self.what, self.total, self.each = what, total, each
        self.held: Counter[str] = Counter()
        self.count = 0

    def take(self, who: str) -> Callable[[], None]:
        """Take a place; the function returned gives it back (once, however often it is called). TooMany or Busy if full."""
        if self.each and self.held[who] >= self.each:
            raise TooMany(f"{who} already has {self.each} open {self.what}", hint=f"close some {self.what} first")
        if self.count >= self.total:
            raise Busy(f"{self.total} {self.what} are being served", hint="try again in a moment")
        self.held[who] += 1
        self.count += 1
        taken = True

        def give_back() -> None:
            nonlocal taken
            if taken:
                taken = False
                self.count -= 1
                self.held[who] -= 1
                if not self.held[who]:
                    del self.held[who]

        return give_back

    @contextmanager
    def hold(self, who: str) -> Iterator[None]:
        give_back = self.take(who)
        try:
            yield
        finally:
            give_back()


class Rates:
    """A token bucket for each caller: `per_s` calls a second for ever (0: no limit), `burst` of them at once."""

    def __init__(self, *, per_s: float, burst: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._monotonic = per_s, max(burst, 1), monotonic
        self._full_at: dict[str, float] = {}  # when the bucket of each caller is full again

    def spend(self, who: str) -> None:
        """One call of this caller. TooFast if its bucket is empty."""
        if not self._per_s:
            return
        now = self._monotonic()
        full_at = max(self._full_at.get(who, now), now) + 1 / self._per_s
        late_s = full_at - now - self._burst / self._per_s
        if late_s > 0:
            raise TooFast(
                f"{who} makes more than {self._per_s:g} calls per second",
                hint="wait as long as Retry-After says; submit many jobs in one call",
                headers={"retry-after": str(math.ceil(late_s))},
            )
        if who not in self._full_at and len(self._full_at) >= _KEPT:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        self._full_at[who] = full_at


class Room:
    """A bounded number of bytes that are being held for calls, in all and for each caller (0: no limit)."""

    def __init__(self, what: str, *, total: int, each: int = 0) -> None:
        self.what, self.total, self.each = what, total, each
        self.held: Counter[str] = Counter()
        self.count = 0

    @contextmanager
    def hold(self, who: str) -> Iterator[Callable[[int], None]]:
        """Hands out a function that takes so many bytes more; all are given back at the end. It raises TooMany or Busy."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.each and self.held[who] + size > self.each:
                raise TooMany(
                    f"{who} has {self.each} bytes of {self.what} under way", hint="send them one after another"
                )
            if self.count + size > self.total:
                raise Busy(f"{self.total} bytes of {self.what} are under way", hint="try again in a moment")
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
