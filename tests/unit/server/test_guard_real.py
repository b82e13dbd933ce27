"""Sizes, times and floods, on real sockets."""

from __future__ import annotations

import json
import signal
import socket

import pytest

from hodei.model.config import LimitsConfig
from hodei.model.errors import InvalidInput
from hodei.server.app import make_app
from hodei.server.route import MIB
from hodei.server.serving import Limits, make_server
from unit.server.conftest import TOKENS, serving, until

pytestmark = pytest.mark.real
AUTH = f"Host: localhost\r\nAuthorization: Bearer {TOKENS['user']}\r\n"


def raw(port: int, text: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(text.encode())
    return connection


def all_of(connection: socket.socket) -> bytes:
    with connection:
        parts = []
        try:
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_read(served):
    got = served.ask("POST", "/api/v1/plan", body=b" " * (3 * MIB))
    assert (got.status, got.code) == (413, "TOO_LARGE")
    assert got.headers["connection"] == "close"


def test_a_body_that_does_not_say_so_is_cut_off_while_it_streams(served):
    connection = served.connect()
    chunks = (b" " * 65536 for _ in range(40))
    connection.request(
        "POST", "/api/v1/plan", chunks, {"Authorization": f"Bearer {TOKENS['user']}"}, encode_chunked=True
    )
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["code"] == "TOO_LARGE"
    connection.close()


def test_a_submit_may_be_larger_than_other_bodies(served):
    padding = b" " * (5 * MIB)
    body = b'{"name": "a", "command": ["true"]}' + padding
    assert served.ask("POST", "/api/v1/jobs", body=body).status == 201
    assert served.ask("POST", "/api/v1/jobs", body=body + b" " * (28 * MIB)).status == 413


def test_a_stranger_cannot_make_us_keep_a_body(served):
    got = served.ask("POST", "/api/v1/jobs", role="", body=b" " * (4 * MIB))
    assert (got.status, got.code) == (401, "UNAUTHORIZED")
    assert got.headers["connection"] == "close"


def test_a_body_that_never_comes_is_given_up(service, tokens):
    with serving(make_app(service, tokens, body_timeout_s=0.2)) as served:
        text = f"POST /api/v1/jobs HTTP/1.1\r\n{AUTH}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
        answer = all_of(raw(served.port, text))
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert b"TOO_SLOW" in answer
        assert served.ask("GET", "/livez").status == 200


def test_headers_that_never_end_are_given_up(app):
    with serving(app, Limits(headers_s=0.2)) as served:
        connections = [raw(served.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: 1\r\n") for _ in range(20)]
        silent = raw(served.port, "")
        assert served.ask("GET", "/livez").status == 200
        for connection in (*connections, silent):
            assert all_of(connection) == b""
        until(lambda: not served.server.server_state.connections, "all connections are gone")


def test_a_second_request_on_a_connection_has_the_same_clock(app):
    with serving(app, Limits(headers_s=0.2)) as served:
        connection = raw(served.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"ok\n"):
            answer += connection.recv(4096)
        connection.sendall(b"GET /livez HT")
        assert all_of(connection) == b""


def test_endless_headers_end_the_connection(served):
    connection = raw(served.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\n")
    cut_off = False
    for _ in range(1000):
        try:
            connection.sendall(b"X-Filler: " + b"x" * 4000 + b"\r\n")
        except (ConnectionResetError, BrokenPipeError):
            cut_off = True
            break
    assert cut_off or all_of(connection) == b""
    connection.close()
    assert served.ask("GET", "/livez").status == 200


def test_no_more_connections_than_allowed_are_open_and_the_idle_make_room(app):
    with serving(app, Limits(connections=5)) as served:
        kept = [served.connect() for _ in range(5)]
        for connection in kept:
            connection.request("GET", "/livez")
            assert connection.getresponse().read() == b"ok\n"
        assert served.ask("GET", "/livez").status == 200
        until(lambda: len(served.server.server_state.connections) <= 5, "no more are open")
        kept[4].request("GET", "/livez")
        assert kept[4].getresponse().status == 200
        for connection in kept:
            connection.close()


def test_a_client_that_never_reads_its_answer_is_cut_off(service, tokens):
    service.log = b"x" * (4 * MIB)
    app = make_app(service, tokens)
    served_limits = Limits(keep_alive_s=1, flush_s=0.2)
    with serving(app, served_limits) as served:
        served.ask("POST", "/api/v1/jobs", body=b'{"name": "a", "command": ["true"]}')
        from builders import a_run

        service.store.run_list = [a_run(1, state="running")]
        connection = raw(served.port, f"GET /api/v1/jobs/1/logs?limit=4194304 HTTP/1.1\r\n{AUTH}\r\n")
        until(lambda: served.server.server_state.total_requests >= 2, "the answer was written")
        until(lambda: not served.server.server_state.connections, "the connection was dropped")
        connection.close()


def test_a_busy_server_still_answers_probes(service, tokens):
    with serving(make_app(service, tokens, limits=LimitsConfig(requests=0))) as served:
        got = served.ask("GET", "/api/v1/jobs")
        assert (got.status, got.code) == (503, "BUSY")
        assert got.headers["retry-after"]
        assert served.ask("GET", "/livez").status == 200
        assert served.ask("GET", "/readyz").status == 200


@pytest.mark.parametrize(
    "text", ["nonsense\r\n\r\n", "GET /\xff HTTP/1.1\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "CONNECT a:1 HTTP/1.1\r\n\r\n"]
)
def test_what_is_not_even_http_gets_a_problem_too(served, text):
    answer = all_of(raw(served.port, text))
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "MALFORMED"


def test_a_foreign_host_on_the_wire(served):
    answer = all_of(raw(served.port, "GET /livez HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"))
    assert b" 421 " in answer.split(b"\r\n")[0]
    twice = all_of(
        raw(served.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n")
    )
    assert b" 400 " in twice.split(b"\r\n")[0]


def test_signals_are_left_to_whoever_runs_the_loop(app):
    before = signal.getsignal(signal.SIGTERM)
    with make_server(app).capture_signals():
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "hodei.example", ""])
def test_listening_beyond_loopback_needs_tls_or_an_explicit_word(app, host):
    with pytest.raises(InvalidInput, match="unencrypted"):
        make_server(app, host=host)
    assert make_server(app, host=host, insecure=True)
    assert make_server(app, host="127.0.0.1")
    assert make_server(app, host="localhost")
