"""Limits in total and per caller."""

from __future__ import annotations

import pytest

from hodei.server.errors import RateLimited, ServerBusy, TooManyRequests
from hodei.server.rate_limits import RateLimit, UsageLimit, client_address, limit_key
from hodei.server.route import ANYONE, Principal
from hodei.server.serving import OpenConnections


def test_usage_is_limited_per_caller_and_in_total():
    limit = UsageLimit("streams", total=3, each=2)
    release = limit.acquire("ann")
    limit.acquire("ann")
    with pytest.raises(TooManyRequests):
        limit.acquire("ann")
    limit.acquire("bob")
    with pytest.raises(ServerBusy):
        limit.acquire("cid")
    release()
    release()
    limit.acquire("cid")
    assert limit.count == 3
    with pytest.raises(ServerBusy):
        UsageLimit("requests", total=0).acquire("ann")


def test_each_caller_has_a_bucket_that_fills_again():
    now = 100.0
    rates = RateLimit(per_s=10, burst=5, monotonic=lambda: now)
    for _ in range(5):
        rates.spend("ann")
    with pytest.raises(RateLimited) as refused:
        rates.spend("ann")
    assert refused.value.headers == {"retry-after": "1"}
    rates.spend("bob")
    now += 0.1
    rates.spend("ann")
    with pytest.raises(RateLimited):
        rates.spend("ann")
    now += 3600
    for _ in range(5):
        rates.spend("ann")
    with pytest.raises(RateLimited):
        rates.spend("ann")


def test_full_buckets_are_removed():
    now = 100.0
    rates = RateLimit(per_s=10, burst=5, monotonic=lambda: now)
    for number in range(10_000):
        now += 0.2
        rates.spend(f"address:{number}")
    assert len(rates._full_at) <= 4096


def test_no_rate_is_no_limit():
    rates = RateLimit(per_s=0, burst=0)
    for _ in range(10_000):
        rates.spend("ann")


def test_bytes_are_bounded_for_each_and_for_all():
    limit = UsageLimit("bodies", total=100, each=60)
    with limit.hold_growing("ann") as take, limit.hold_growing("ann") as also, limit.hold_growing("bob") as other:
        take(50)
        with pytest.raises(TooManyRequests):
            also(20)
        also(10)
        with pytest.raises(ServerBusy):
            other(50)
        other(40)
        assert limit.count == 100
    assert limit.count == 0
    assert not limit.held


@pytest.mark.parametrize(
    ("client", "place"),
    [
        (("127.0.0.1", 1), "127.0.0.1"), (("::ffff:10.0.0.1", 1), "10.0.0.1"), (None, ""),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"), (("fe80::1%eth0", 1), "fe80::/64"), (("odd", 1), "odd"),
    ],
)  # fmt: skip
def test_addresses_of_one_host_are_one_place(client, place):
    assert client_address(client) == place


def test_a_caller_without_a_token_is_known_by_the_address():
    assert limit_key(Principal("ann", "user"), {"client": ("10.0.0.1", 1)}) == "ann"
    assert limit_key(ANYONE, {"client": ("10.0.0.1", 1)}) == "address:10.0.0.1"


class Line:
    def __init__(self, idle: bool = True) -> None:
        self.idle, self.dropped = idle, False

    def drop(self) -> None:
        self.dropped = True


def test_a_full_place_drops_its_longest_idle_connection_and_no_others():
    crowd = OpenConnections(100, 2)
    other, first, second, third = Line(), Line(), Line(), Line()
    assert crowd.add(other, "b")
    assert crowd.add(first, "a")
    assert crowd.add(second, "a")
    crowd.touch(first, "a")
    assert crowd.add(third, "a")
    assert (first.dropped, second.dropped, other.dropped) == (False, True, False)
    crowd.remove(second, "a")  # as it does by itself, a little later
    assert crowd.count == 3


def test_a_full_place_that_works_turns_the_new_connection_away():
    crowd = OpenConnections(100, 2)
    busy = [Line(idle=False), Line(idle=False)]
    assert all(crowd.add(line, "a") for line in busy)
    late = Line()
    assert not crowd.add(late, "a")
    assert crowd.add(late, "b")
    assert not any(line.dropped for line in busy)
    crowd.remove(busy[0], "a")
    assert crowd.add(Line(), "a")


def test_a_full_house_takes_the_room_from_the_largest_place():
    crowd = OpenConnections(5, 4)
    many = [Line() for _ in range(4)]
    few = Line()
    assert all(crowd.add(line, "a") for line in many)
    assert crowd.add(few, "b")
    assert crowd.add(Line(), "c")
    assert (many[0].dropped, few.dropped, crowd.count) == (True, False, 5)


def test_clients_without_an_address_share_no_limit():
    crowd = OpenConnections(100, 2)
    lines = [Line() for _ in range(10)]
    assert all(crowd.add(line, "") for line in lines)
    assert not any(line.dropped for line in lines)
