"""The event stream on real sockets: order, resumption, slow clients, limits, cleanup."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest

from builders import a_job
from hodei.model.config import LimitsConfig
from hodei.server.app import make_app
from hodei.server.auth import Tokens, add_token
from unit.server.conftest import TOKENS, Served, serving, until

pytestmark = pytest.mark.real


class Listener:
    def __init__(
        self,
        served: Served,
        query: str = "",
        *,
        role: str = "viewer",
        token: str = "",
        headers: dict[str, str] | None = None,
    ):
        self.connection = served.connect(10)
        sent_headers = {"Authorization": f"Bearer {token or TOKENS[role]}"} | (headers or {})
        self.connection.request("GET", f"/api/v1/events/stream{query}", headers=sent_headers)
        self.response = self.connection.getresponse()

    def messages(self) -> Iterator[dict[str, str]]:
        """Each message as its fields; comments have the name ""."""
        message: dict[str, str] = {}
        for connection in self.response:
            name, _, value = connection.decode().rstrip("\n").partition(":")
            if connection == b"\n":
                yield message
                message = {}
            else:
                message[name] = value.strip()

    def seqs(self, count: int) -> list[int]:
        seqs: list[int] = []
        for message in self.messages():
            if "id" in message:
                assert json.loads(message["data"])["seq"] == int(message["id"])
                seqs.append(int(message["id"]))
            if len(seqs) == count:
                return seqs
        return seqs

    def close(self) -> None:
        self.response.close()
        self.connection.close()


def wait_until_live(served: Served, service, count: int = 1) -> None:
    until(lambda: len(service.subscriptions) >= count, "the stream is live")


def test_history_first_then_live_without_gap_or_repeat(served, service):
    service.publish(1700)
    listener = Listener(served, "?after=0")
    assert listener.response.headers["content-type"].startswith("text/event-stream")
    wait_until_live(served, service)
    served.on_loop(lambda: service.publish(300))
    assert listener.seqs(2000) == list(range(1, 2001))
    listener.close()


def test_events_published_while_history_is_read_arrive_once(served, service):
    service.publish(600)
    left = [300]

    def publish_more() -> None:  # on the loop, right after each read of the store
        if left[0]:
            left[0] -= 100
            service.publish(100)

    service.on_read = publish_more
    listener = Listener(served, "?after=100")
    assert listener.seqs(800) == list(range(101, 901))
    listener.close()


def test_a_subscription_that_overflows_during_history_is_renewed(service, tokens):
    service.subscription_size = 50
    service.publish(10)
    bursts = [0, 80, 80]

    def publish_more() -> None:
        if bursts:
            service.publish(bursts.pop(0))

    service.on_read = publish_more
    with serving(make_app(service, tokens)) as served:
        listener = Listener(served, "?after=0")
        assert listener.seqs(170) == list(range(1, 171))
        listener.close()


def test_a_stream_without_a_position_has_only_new_events(served, service):
    service.publish(5)
    listener = Listener(served)
    wait_until_live(served, service)
    served.on_loop(lambda: service.publish(2))
    assert listener.seqs(2) == [6, 7]
    listener.close()


def test_a_reconnecting_client_resumes_after_the_last_id_it_saw(served, service):
    service.publish(10)
    listener = Listener(served, "?after=0", headers={"Last-Event-ID": "7"})
    assert listener.seqs(3) == [8, 9, 10]
    listener.close()


def test_the_stream_of_one_job_has_only_its_events(served, service):
    for job in (1, 2, 1, 2):
        service.publish(job=job)
    listener = Listener(served, "?after=0&job=2")
    wait_until_live(served, service)
    served.on_loop(lambda: (service.publish(job=1), service.publish(job=2)))
    assert listener.seqs(3) == [2, 4, 6]
    listener.close()


def test_a_quiet_stream_is_kept_alive_by_comments(service, tokens):
    with serving(make_app(service, tokens, heartbeat_s=0.05)) as served:
        listener = Listener(served)
        comments = (message for message in listener.messages() if "" in message)
        assert [next(comments)[""] for _ in range(3)] == ["heartbeat"] * 3
        listener.close()


def test_a_slow_client_gets_resync_and_is_closed(service, tokens):
    service.subscription_size = 20
    with serving(make_app(service, tokens)) as served:
        listener = Listener(served)
        wait_until_live(served, service)
        for _ in range(40):  # far more than the socket's buffers hold
            served.on_loop(lambda: service.publish(20, detail={"pad": "x" * 20_000}))
            if not service.subscriptions or next(iter(service.subscriptions)).lagged:
                break
        else:
            served.on_loop(lambda: service.publish(400, detail={"pad": "x" * 20_000}))
        last = 0
        for message in listener.messages():
            if "id" in message:
                assert int(message["id"]) == last + 1
                last = int(message["id"])
            elif message.get("event") == "resync":
                assert json.loads(message["data"]) == {"last": last}
                break
        else:
            pytest.fail("no resync")
        assert listener.response.read() == b"", "the stream continues after resync"
        listener.close()
        resumed = Listener(served, headers={"Last-Event-ID": str(last)})
        total = len(service.store.event_list)
        assert resumed.seqs(total - last) == list(range(last + 1, total + 1)), "events were lost"
        resumed.close()


def test_a_client_that_reads_nothing_is_cut_off(service, tokens):
    app = make_app(service, tokens, send_timeout_s=0.2)
    with serving(app) as served:
        listener = Listener(served)
        wait_until_live(served, service)
        for _ in range(10):
            served.on_loop(lambda: service.publish(100, detail={"pad": "x" * 20_000}))
        until(lambda: not service.subscriptions, "the stream has ended")
        until(lambda: not served.server.server_state.connections, "the connection is closed")
        until(lambda: app.shared.streams.count == 0, "the stream is no longer counted")
        listener.close()


def test_streams_are_limited_per_token_and_in_total(service, tokens):
    with serving(make_app(service, tokens, limits=LimitsConfig(streams=3, streams_per_token=2))) as served:
        listeners = [Listener(served), Listener(served)]
        third = Listener(served)
        assert third.response.status == 429
        assert json.loads(third.response.read())["code"] == "TOO_MANY_REQUESTS"
        assert third.response.headers["retry-after"]
        listeners.append(Listener(served, role="user"))
        assert listeners[-1].response.status == 200
        assert Listener(served, role="admin").response.status == 503
        listeners[0].close()
        until(lambda: Listener(served, role="admin").response.status == 200, "a new stream is accepted")
        for listener in listeners:
            listener.close()


def test_disconnected_clients_leave_no_task(served, service, app):
    service.publish(5)
    tasks = served.on_loop(lambda: len(asyncio.all_tasks()))
    for round in range(10):
        listeners = [Listener(served, "?after=0" if round % 2 else "") for _ in range(5)]
        wait_until_live(served, service, 5)
        for listener in listeners:
            listener.close()
        until(lambda: not service.subscriptions and app.shared.streams.count == 0, "all streams have ended")
    until(lambda: served.on_loop(lambda: len(asyncio.all_tasks())) <= tasks, "no task is left")


def test_a_stream_without_a_token_is_refused_and_not_counted(served, app):
    assert served.call("GET", "/api/v1/events/stream", role="").status == 401
    assert app.shared.streams.count == 0
    assert served.call("HEAD", "/api/v1/events/stream").status == 405


def test_a_server_that_stops_ends_its_streams_and_waits_at_once(service, tokens):
    app = make_app(service, tokens)
    with serving(app) as served:
        served.call("POST", "/api/v1/jobs", body=b'{"name": "a", "command": ["true"]}')
        listener = Listener(served)
        wait_until_live(served, service)
        waiting = served.connect()
        waiting.request(
            "GET", "/api/v1/jobs/1/wait?timeout_s=60", headers={"Authorization": f"Bearer {TOKENS['user']}"}
        )
        until(lambda: app.shared.waits.count == 1, "the wait has started")
        served.server.should_exit = True
        assert listener.seqs(1) == []
        response = waiting.getresponse()
        assert response.status == 503
        assert json.loads(response.read())["code"] == "SHUTTING_DOWN"
        listener.close()
        waiting.close()


def test_a_revoked_token_ends_its_stream(service, tokens, monkeypatch):
    monkeypatch.setattr("hodei.server.stream.REVOCATION_CHECK_S", 0.05)
    with serving(make_app(service, tokens)) as served:
        listener = Listener(served)
        wait_until_live(served, service)
        tokens._entries = ()
        assert listener.seqs(1) == [], "the stream goes on"
        until(lambda: not service.subscriptions, "the stream has ended")
        listener.close()


def test_a_rotated_token_ends_the_stream_of_the_old_one(service, tmp_path):
    """The new token has the same name and role."""
    file = tmp_path / "tokens"
    old = add_token(file, "ann", "viewer")
    with serving(make_app(service, Tokens.load(file))) as served:
        listener = Listener(served, token=old)
        wait_until_live(served, service)
        new = add_token(file, "ann", "viewer")
        began = time.monotonic()
        assert listener.seqs(1) == [], "the stream goes on"
        assert time.monotonic() - began < 5 + 5  # documented: 5 s; the rest is for a busy machine
        until(lambda: not service.subscriptions, "the stream has ended")
        assert Listener(served, token=old).response.status == 401
        assert Listener(served, token=new).response.status == 200


def test_a_revoked_token_ends_a_stream_that_still_sends_history(service, tokens, monkeypatch):
    """Also when the client reads nothing, so that the server cannot write."""
    monkeypatch.setattr("hodei.server.stream.REVOCATION_CHECK_S", 0.05)
    app = make_app(service, tokens, send_timeout_s=60)
    with serving(app) as served:
        service.publish(20_000, detail={"x": "y" * 2000})
        connection = socket.create_connection(("127.0.0.1", served.port))
        auth = f"Authorization: Bearer {TOKENS['viewer']}"
        connection.sendall(f"GET /api/v1/events/stream?after=0 HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n\r\n".encode())
        connections = served.server.server_state.connections
        until(lambda: any(each.flow.write_paused for each in tuple(connections)), "the server cannot write any more")
        tokens._entries = ()
        until(lambda: app.shared.streams.count == 0, "the stream has ended", 10)
        connection.close()


def test_a_wait_whose_token_was_revoked_is_refused(service, tokens):
    service.store.by_id[1] = a_job(1)
    app = make_app(service, tokens)
    with serving(app) as served:
        waiting = served.connect()
        waiting.request(
            "GET", "/api/v1/jobs/1/wait?timeout_s=1", headers={"Authorization": f"Bearer {TOKENS['viewer']}"}
        )
        until(lambda: app.shared.waits.count == 1, "the wait has started")
        tokens._entries = ()
        assert waiting.getresponse().status == 401
        waiting.close()


def test_a_store_error_ends_only_its_stream(served, service, app):
    def broken(**_):
        raise RuntimeError("disk failure")

    service.store.events = broken
    listener = Listener(served, "?after=0")
    try:
        assert listener.seqs(1) == []
    except http.client.IncompleteRead:
        pass
    until(lambda: app.shared.streams.count == 0, "the stream is no longer counted")
    assert served.call("GET", "/livez").status == 200
