"""A caller that floods the server, on real sockets, does not affect others. Other addresses are others of loopback."""

from __future__ import annotations

import json
import socket
import time

import pytest

from hodei.model.config import LimitsConfig
from hodei.server.app import make_app
from hodei.server.serving import Limits
from unit.server.conftest import TOKENS, Served, serving, until

pytestmark = pytest.mark.real
JOB = b'{"name": "a", "command": ["true"]}'


def connected(served: Served, address: str = "127.0.0.2") -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=10, source_address=(address, 0))


def slow_body(served: Served, role: str, path: str = "/api/v1/jobs") -> socket.socket:
    """A request whose body has begun and does not go on."""
    line = connected(served)
    auth = f"Authorization: Bearer {TOKENS[role]}\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{auth}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    )
    line.sendall(head.encode() + b"{")
    return line


def answer_of(line: socket.socket) -> tuple[int, dict[str, str], bytes]:
    with line, line.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while line_of := file.readline().strip():
            name, _, value = line_of.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers, file.read(int(headers.get("content-length", "0")))


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/whatif"])
def test_slow_bodies_of_one_token_take_its_own_places_only(service, tokens, path):
    app = make_app(service, tokens)
    with serving(app) as served:
        slow = [slow_body(served, "user", path) for _ in range(300)]
        try:
            until(lambda: app.shared.requests.held["user"] == 128, "all its places are taken")
            until(lambda: served.server.server_state.total_requests >= 172, "the others were turned away")
            for role in ("admin", "viewer"):
                for _ in range(5):
                    assert served.ask("GET", "/api/v1/jobs", role=role).status == 200
            assert served.ask("POST", "/api/v1/jobs", role="admin", body=JOB).status == 201
            refused = served.ask("GET", "/api/v1/jobs", role="user")
            assert (refused.status, refused.code) == (429, "TOO_MANY_REQUESTS")
            assert int(refused.headers["retry-after"]) >= 1
        finally:
            for line in slow:
                line.close()
        until(lambda: served.ask("GET", "/api/v1/jobs", role="user").status == 200, "its places are free again")


def test_no_row_of_the_audit_is_written_for_calls_that_are_turned_away(service, tokens):
    app = make_app(service, tokens, limits=LimitsConfig(rate_per_token=1, burst_per_token=2))
    with serving(app) as served:
        codes = [served.ask("POST", "/api/v1/jobs", body=b"{}").status for _ in range(20)]
        assert codes[:2] == [422, 422]
        assert codes.count(429) >= 15
        assert len(service.recorded) <= 20 - codes.count(429)


def test_one_token_has_its_rate_and_the_others_theirs(service, tokens):
    app = make_app(service, tokens, limits=LimitsConfig(rate_per_token=5, burst_per_token=20))
    with serving(app) as served:
        got = [served.ask("GET", "/api/v1/jobs") for _ in range(60)]
        refused = [answer for answer in got if answer.status == 429]
        assert refused
        assert refused[0].code == "RATE_LIMITED"
        assert int(refused[0].headers["retry-after"]) >= 1
        assert [served.ask("GET", "/api/v1/jobs", role="admin").status for _ in range(5)] == [200] * 5
        assert [served.ask("GET", "/livez", role="").status for _ in range(60)] == [200] * 60


def test_callers_without_a_token_have_a_rate_by_their_address(service, tokens):
    app = make_app(service, tokens, limits=LimitsConfig(rate_per_token=1, burst_per_token=5))
    with serving(app) as served:

        def ask(address: str, auth: str = "") -> int:
            line = connected(served, address)
            line.sendall(f"GET {'/api/v1/jobs' if auth else '/'} HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n".encode())
            return answer_of(line)[0]

        assert 429 in [ask("127.0.0.2") for _ in range(20)]
        assert 429 in [ask("127.0.0.4", "Authorization: Bearer wrong\r\n") for _ in range(20)]
        assert ask("127.0.0.3") == 200
        assert served.ask("GET", "/api/v1/jobs").status == 200


def test_idle_connections_of_one_address_shut_nobody_else_out(app):
    with serving(app, Limits(connections=60, connections_each=40)) as served:
        idle = [connected(served) for _ in range(200)]
        try:
            for _ in range(10):
                assert served.ask("GET", "/api/v1/jobs").status == 200
            # Even from the same address a client that works comes in: the idle ones make room.
            line = connected(served)
            line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer_of(line)[0] == 200
            until(lambda: len(served.server.server_state.connections) <= 60, "no more than allowed are open")
        finally:
            for line in idle:
                line.close()


def test_an_address_whose_connections_all_work_is_turned_away_with_an_answer(service, tokens):
    app = make_app(service, tokens)
    with serving(app, Limits(connections=60, connections_each=10)) as served:
        slow = [slow_body(served, "user") for _ in range(10)]
        try:
            until(lambda: app.shared.requests.held["user"] == 10, "all of them work")
            status, headers, body = answer_of(connected(served))
            assert status == 429
            assert int(headers["retry-after"]) >= 1
            assert json.loads(body)["code"] == "TOO_MANY_REQUESTS"
            assert served.ask("GET", "/api/v1/jobs").status == 200
        finally:
            for line in slow:
                line.close()


def test_connections_of_many_addresses_leave_room_for_one_more(app):
    with serving(app, Limits(connections=50, connections_each=20)) as served:
        idle = [connected(served, f"127.0.1.{number % 5 + 1}") for number in range(100)]
        try:
            for _ in range(5):
                assert served.ask("GET", "/api/v1/jobs").status == 200
        finally:
            for line in idle:
                line.close()


def test_headers_that_trickle_in_are_idle_connections(app):
    with serving(app, Limits(connections=60, connections_each=20, headers_s=30)) as served:
        slow = [connected(served) for _ in range(20)]
        for line in slow:
            line.sendall(b"GET /livez HTTP/1.1\r\nHost: loc")
        until(lambda: len(served.server.server_state.connections) == 20, "all are in")
        line = connected(served)
        line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer_of(line)[0] == 200
        for line in slow:
            line.close()


def test_bodies_of_one_token_are_bounded_together(service, tokens):
    app = make_app(service, tokens)
    app.shared.bodies.each = 100_000
    with serving(app) as served:
        assert served.ask("POST", "/api/v1/jobs", body=JOB + b" " * 50_000).status == 201
        big = served.ask("POST", "/api/v1/jobs", body=JOB + b" " * 150_000)
        assert (big.status, big.code) == (429, "TOO_MANY_REQUESTS")
        assert app.shared.bodies.count == 0


def test_waits_of_one_token_leave_places_for_others(service, tokens):
    app = make_app(service, tokens, limits=LimitsConfig(waits=4, waits_per_token=2))
    with serving(app) as served:
        served.ask("POST", "/api/v1/jobs", body=JOB)
        waiting = [connected(served) for _ in range(3)]
        for line in waiting:
            auth = f"Authorization: Bearer {TOKENS['user']}"
            line.sendall(f"GET /api/v1/jobs/1/wait?timeout_s=60 HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n\r\n".encode())
        until(lambda: app.shared.waits.count == 2, "two wait")
        assert served.ask("GET", "/api/v1/jobs/1/wait?timeout_s=0", role="admin").status == 200
        assert served.ask("GET", "/api/v1/jobs/1/wait?timeout_s=0", role="user").status == 429
        for line in waiting:
            line.close()


def test_what_is_not_http_fills_no_log(served, caplog):
    for _ in range(20):
        line = connected(served)
        line.sendall(b"nonsense\r\n\r\n")
        assert answer_of(line)[0] == 400
    began = time.monotonic()
    assert served.ask("GET", "/livez").status == 200
    assert time.monotonic() - began < 5
    assert not [record for record in caplog.records if "Invalid HTTP" in record.message]
