"""The channel of a joined agent, its knowledge of the server's clock, and the file of its credential."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hodei.agent import channel as channel_module
from hodei.agent.channel import Batch, Channel, ChannelBroken
from hodei.agent.clock import ServerClock
from hodei.agent.credentials import CREDENTIAL_PREFIX, Joined, NotJoined, is_well_formed, load_joined, new_secret
from hodei.agent.https import BadUrl, server_address


def test_an_exchange_is_bounded_but_carries_at_least_one_message(monkeypatch):
    monkeypatch.setattr(channel_module, "BATCH_BYTES", 10)
    channel = Channel()
    for text in ("x" * 50, "four", "more", "last"):
        channel.send(text)
    assert channel.batch() == Batch(0, 1, ["x" * 50])
    channel.receive(Batch(1, 1, []))
    assert channel.batch() == Batch(0, 2, ["four", "more"])


def test_a_side_that_does_not_read_breaks_the_channel(monkeypatch):
    monkeypatch.setattr(channel_module, "OUTBOX_BYTES", 10)
    channel = Channel()
    channel.send("x" * 50)  # one message is always taken
    with pytest.raises(ChannelBroken, match="not acknowledged"):
        channel.send("y")


@pytest.mark.parametrize(
    ("batch", "why"),
    [(Batch(1, 1, []), "never sent"), (Batch(0, 2, ["second"]), "missing")],
    ids=["an acknowledgement of nothing", "a gap"],
)
def test_nonsense_breaks_the_channel(batch, why):
    with pytest.raises(ChannelBroken, match=why):
        Channel().receive(batch)


class Clocks:
    """A host's boot clock at 0, its own clock ahead of it by `host_ms`, the server's by `server_ms`."""

    def __init__(self, host_ms: int, server_ms: int) -> None:
        self.boot, self._host_ms, self._server_ms = 0, host_ms, server_ms
        self.clock = ServerClock(boot_ms=lambda: self.boot, wall_ms=lambda: self.boot + self._host_ms)

    def exchange(self, there_ms: int, back_ms: int) -> None:
        sent = self.boot
        server_now = self.boot + there_ms + self._server_ms
        self.boot += there_ms + back_ms
        self.clock.observe(sent, server_now)


@given(
    skew_ms=st.integers(-10_000_000, 10_000_000),
    delays=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 100_000)), min_size=1),
)
def test_the_servers_clock_is_never_behind_its_latest_bound(skew_ms, delays):
    clocks = Clocks(1_000_000, 1_000_000 + skew_ms)
    for there, back, pause in delays:
        clocks.exchange(there, back)
        clocks.boot += pause
        assert clocks.clock.latest_ms() >= clocks.boot + 1_000_000 + skew_ms
    widest = min(there + back for there, back, _ in delays) + 2000
    assert abs(clocks.clock.skew_ms() - skew_ms) <= widest


def test_an_answer_that_waited_while_the_host_slept_does_not_set_the_clock_back():
    clocks = Clocks(0, 0)
    clocks.exchange(5, 5)
    clocks.exchange(10, 3_600_000)
    assert clocks.clock.latest_ms() >= clocks.boot


def test_a_small_difference_is_no_skew_and_a_large_one_is_stable():
    same, ahead = Clocks(0, 3), Clocks(0, 60_000)
    same.exchange(10, 10)
    assert same.clock.skew_ms() == 0
    ahead.exchange(40, 10)
    skew = ahead.clock.skew_ms()
    assert abs(skew - 60_000) <= 60
    ahead.exchange(12, 30)
    assert ahead.clock.skew_ms() == skew


def test_a_secret_is_recognized_and_a_mistyped_one_is_not():
    secret = new_secret(CREDENTIAL_PREFIX)
    assert is_well_formed(secret, CREDENTIAL_PREFIX)
    assert not is_well_formed(secret[:-1] + ("a" if secret[-1] != "a" else "b"), CREDENTIAL_PREFIX)
    assert not is_well_formed(secret, "hode_")
    assert not is_well_formed("", CREDENTIAL_PREFIX)


def test_the_credential_is_readable_by_its_owner_only(tmp_path):
    joined = Joined("https://server", "n1", "lab", new_secret(CREDENTIAL_PREFIX), "ab" * 8, labels={"a": "b"})
    joined.save(str(tmp_path))
    assert load_joined(str(tmp_path)) == joined
    assert os.stat(tmp_path / "joined.json").st_mode & 0o777 == 0o600
    (tmp_path / "joined.json").write_text("{")
    with pytest.raises(NotJoined, match="cannot be read"):
        load_joined(str(tmp_path))


def test_plain_http_is_for_loopback_only(monkeypatch):
    assert server_address("http://127.0.0.1:7680").port == 7680
    assert server_address("http://host:1", insecure=True).context is None
    for url in ("http://10.0.0.7:7680", "ftp://x", "https://", "http://x:y"):
        with pytest.raises(BadUrl):
            server_address(url)


def test_a_proxy_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://me:p%40ss@proxy:8080")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert server_address("https://outside.example").proxy == ("proxy", 8080, "Basic bWU6cEBzcw==")
    assert server_address("https://inside.example").proxy is None
    assert server_address("http://127.0.0.1").proxy is None
