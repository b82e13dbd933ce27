"""Limits in total and per caller."""

from __future__ import annotations

import pytest

from hodei.server.errors import RateLimited, ServerBusy, TooManyRequests
from hodei.server.rate_limits import RateLimit, UsageLimit, client_address, limit_key
from hodei.server.route import ANYONE, Principal
from hodei.server.serving import OpenConnections


def test_usage_is_limited_per_caller_and_in_total():
    limit = UsageLimit("streams", total=3, per_caller=2)
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


def test_body_bytes_are_limited_per_caller_and_in_total():
    limit = UsageLimit("bodies", total=100, per_caller=60)
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
    ("client", "key"),
    [
        (("127.0.0.1", 1), "127.0.0.1"), (("::ffff:10.0.0.1", 1), "10.0.0.1"), (None, ""),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"), (("fe80::1%eth0", 1), "fe80::/64"), (("odd", 1), "odd"),
    ],
)  # fmt: skip
def test_addresses_of_one_host_share_one_key(client, key):
    assert client_address(client) == key


def test_a_caller_without_a_token_is_limited_by_address():
    assert limit_key(Principal("ann", "user"), {"client": ("10.0.0.1", 1)}) == "ann"
    assert limit_key(ANYONE, {"client": ("10.0.0.1", 1)}) == "address:10.0.0.1"


class FakeConnection:
    def __init__(self, idle: bool = True) -> None:
        self.idle, self.dropped = idle, False

    def drop(self) -> None:
        self.dropped = True


def test_an_address_at_its_limit_drops_its_longest_idle_connection():
    connections = OpenConnections(100, 2)
    other, first, second, third = FakeConnection(), FakeConnection(), FakeConnection(), FakeConnection()
    assert connections.add(other, "b")
    assert connections.add(first, "a")
    assert connections.add(second, "a")
    connections.touch(first, "a")
    assert connections.add(third, "a")
    assert (first.dropped, second.dropped, other.dropped) == (False, True, False)
    connections.remove(second, "a")  # as the server does when the dropped connection closes
    assert connections.count == 3


def test_an_address_with_only_busy_connections_is_refused_a_new_one():
    connections = OpenConnections(100, 2)
    busy = [FakeConnection(idle=False), FakeConnection(idle=False)]
    assert all(connections.add(connection, "a") for connection in busy)
    new = FakeConnection()
    assert not connections.add(new, "a")
    assert connections.add(new, "b")
    assert not any(connection.dropped for connection in busy)
    connections.remove(busy[0], "a")
    assert connections.add(FakeConnection(), "a")


def test_a_full_server_drops_an_idle_connection_of_the_address_with_most():
    connections = OpenConnections(5, 4)
    many = [FakeConnection() for _ in range(4)]
    few = FakeConnection()
    assert all(connections.add(connection, "a") for connection in many)
    assert connections.add(few, "b")
    assert connections.add(FakeConnection(), "c")
    assert (many[0].dropped, few.dropped, connections.count) == (True, False, 5)


def test_clients_without_an_address_share_no_limit():
    connections = OpenConnections(100, 2)
    many = [FakeConnection() for _ in range(10)]
    assert all(connections.add(connection, "") for connection in many)
    assert not any(connection.dropped for connection in many)
