"""A caller that floods the server, on real sockets, does not affect others. All addresses are in 127.0.0.0/8."""

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
    """A request that sends the first byte of its body and no more."""
    connection = connected(served)
    auth = f"Authorization: Bearer {TOKENS[role]}\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{auth}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    )
    connection.sendall(head.encode() + b"{")
    return connection


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    with connection, connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while header := file.readline().strip():
            name, _, value = header.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers, file.read(int(headers.get("content-length", "0")))


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/whatif"])
def test_slow_bodies_of_one_token_count_only_for_that_token(service, tokens, path):
    app = make_app(service, tokens)
    with serving(app) as served:
        slow = [slow_body(served, "user", path) for _ in range(300)]
        try:
            until(lambda: app.shared.requests.held["user"] == 128, "the token uses all its requests")
            until(lambda: served.server.server_state.total_requests >= 172, "the others were refused")
            for role in ("admin", "viewer"):
                for _ in range(5):
                    assert served.call("GET", "/api/v1/jobs", role=role).status == 200
            assert served.call("POST", "/api/v1/jobs", role="admin", body=JOB).status == 201
            refused = served.call("GET", "/api/v1/jobs", role="user")
            assert (refused.status, refused.code) == (429, "TOO_MANY_REQUESTS")
            assert int(refused.headers["retry-after"]) >= 1
        finally:
            for connection in slow:
                connection.close()
        until(
            lambda: served.call("GET", "/api/v1/jobs", role="user").status == 200, "the token can send requests again"
        )


def test_rate_limited_calls_add_no_audit_row(service, tokens):
    app = make_app(service, tokens, limits=LimitsConfig(rate_per_token=1, burst_per_token=2))
    with serving(app) as served:
        codes = [served.call("POST", "/api/v1/jobs", body=b"{}").status for _ in range(20)]
        assert codes[:2] == [422, 422]
        assert codes.count(429) >= 15
        assert len(service.recorded) <= 20 - codes.count(429)


def test_each_token_has_its_own_rate(service, tokens):
    app = make_app(service, tokens, limits=LimitsConfig(rate_per_token=5, burst_per_token=20))
    with serving(app) as served:
        responses = [served.call("GET", "/api/v1/jobs") for _ in range(60)]
        refused = [response for response in responses if response.status == 429]
        assert refused
        assert refused[0].code == "RATE_LIMITED"
        assert int(refused[0].headers["retry-after"]) >= 1
        assert [served.call("GET", "/api/v1/jobs", role="admin").status for _ in range(5)] == [200] * 5
        assert [served.call("GET", "/livez", role="").status for _ in range(60)] == [200] * 60


def test_callers_without_a_token_are_limited_by_address(service, tokens):
    app = make_app(service, tokens, limits=LimitsConfig(rate_per_token=1, burst_per_token=5))
    with serving(app) as served:

        def get(address: str, auth: str = "") -> int:
            connection = connected(served, address)
            connection.sendall(
                f"GET {'/api/v1/jobs' if auth else '/'} HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n".encode()
            )
            return read_response(connection)[0]

        assert 429 in [get("127.0.0.2") for _ in range(20)]
        assert 429 in [get("127.0.0.4", "Authorization: Bearer wrong\r\n") for _ in range(20)]
        assert get("127.0.0.3") == 200
        assert served.call("GET", "/api/v1/jobs").status == 200


def test_idle_connections_of_one_address_do_not_block_others(app):
    with serving(app, Limits(connections=60, connections_per_address=40)) as served:
        idle = [connected(served) for _ in range(200)]
        try:
            for _ in range(10):
                assert served.call("GET", "/api/v1/jobs").status == 200
            # Even from the same address a client that sends a request is served: idle connections are closed for it.
            connection = connected(served)
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_response(connection)[0] == 200
            until(
                lambda: len(served.server.server_state.connections) <= 60, "no more connections than allowed are open"
            )
        finally:
            for connection in idle:
                connection.close()


def test_a_new_connection_of_an_address_with_only_busy_ones_gets_429(service, tokens):
    app = make_app(service, tokens)
    with serving(app, Limits(connections=60, connections_per_address=10)) as served:
        slow = [slow_body(served, "user") for _ in range(10)]
        try:
            until(lambda: app.shared.requests.held["user"] == 10, "all connections are busy")
            status, headers, body = read_response(connected(served))
            assert status == 429
            assert int(headers["retry-after"]) >= 1
            assert json.loads(body)["code"] == "TOO_MANY_REQUESTS"
            assert served.call("GET", "/api/v1/jobs").status == 200
        finally:
            for connection in slow:
                connection.close()


def test_connections_of_many_addresses_do_not_block_a_new_one(app):
    with serving(app, Limits(connections=50, connections_per_address=20)) as served:
        idle = [connected(served, f"127.0.1.{number % 5 + 1}") for number in range(100)]
        try:
            for _ in range(5):
                assert served.call("GET", "/api/v1/jobs").status == 200
        finally:
            for connection in idle:
                connection.close()


def test_connections_with_incomplete_headers_count_as_idle(app):
    with serving(app, Limits(connections=60, connections_per_address=20, headers_s=30)) as served:
        slow = [connected(served) for _ in range(20)]
        for connection in slow:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: loc")
        until(lambda: len(served.server.server_state.connections) == 20, "all are connected")
        connection = connected(served)
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(connection)[0] == 200
        for connection in slow:
            connection.close()


def test_bodies_of_one_token_have_a_common_limit(service, tokens):
    app = make_app(service, tokens)
    app.shared.bodies.per_caller = 100_000
    with serving(app) as served:
        assert served.call("POST", "/api/v1/jobs", body=JOB + b" " * 50_000).status == 201
        big = served.call("POST", "/api/v1/jobs", body=JOB + b" " * 150_000)
        assert (big.status, big.code) == (429, "TOO_MANY_REQUESTS")
        assert app.shared.bodies.count == 0


def test_waits_of_one_token_do_not_block_others(service, tokens):
    app = make_app(service, tokens, limits=LimitsConfig(waits=4, waits_per_token=2))
    with serving(app) as served:
        served.call("POST", "/api/v1/jobs", body=JOB)
        waiting = [connected(served) for _ in range(3)]
        for connection in waiting:
            auth = f"Authorization: Bearer {TOKENS['user']}"
            connection.sendall(
                f"GET /api/v1/jobs/1/wait?timeout_s=60 HTTP/1.1\r\nHost: localhost\r\n{auth}\r\n\r\n".encode()
            )
        until(lambda: app.shared.waits.count == 2, "two requests wait")
        assert served.call("GET", "/api/v1/jobs/1/wait?timeout_s=0", role="admin").status == 200
        assert served.call("GET", "/api/v1/jobs/1/wait?timeout_s=0", role="user").status == 429
        for connection in waiting:
            connection.close()


def test_invalid_http_is_not_logged(served, caplog):
    for _ in range(20):
        connection = connected(served)
        connection.sendall(b"nonsense\r\n\r\n")
        assert read_response(connection)[0] == 400
    began = time.monotonic()
    assert served.call("GET", "/livez").status == 200
    assert time.monotonic() - began < 5
    assert not [record for record in caplog.records if "Invalid HTTP" in record.message]
