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


def send_raw(port: int, text: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(text.encode())
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection:
        parts = []
        try:
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def test_a_body_with_a_too_large_content_length_is_refused_before_it_is_read(served):
    answer = served.call("POST", "/api/v1/plan", body=b" " * (3 * MIB))
    assert (answer.status, answer.code) == (413, "TOO_LARGE")
    assert answer.headers["connection"] == "close"


def test_a_too_large_chunked_body_is_cut_off(served):
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
    assert served.call("POST", "/api/v1/jobs", body=body).status == 201
    assert served.call("POST", "/api/v1/jobs", body=body + b" " * (28 * MIB)).status == 413


def test_a_body_without_a_token_is_not_read(served):
    answer = served.call("POST", "/api/v1/jobs", role="", body=b" " * (4 * MIB))
    assert (answer.status, answer.code) == (401, "UNAUTHORIZED")
    assert answer.headers["connection"] == "close"


def test_a_body_that_does_not_arrive_times_out(service, tokens):
    with serving(make_app(service, tokens, body_timeout_s=0.2)) as served:
        text = f"POST /api/v1/jobs HTTP/1.1\r\n{AUTH}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
        answer = read_all(send_raw(served.port, text))
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert b"TOO_SLOW" in answer
        assert served.call("GET", "/livez").status == 200


def test_incomplete_headers_time_out(app):
    with serving(app, Limits(headers_s=0.2)) as served:
        connections = [
            send_raw(served.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: 1\r\n") for _ in range(20)
        ]
        silent = send_raw(served.port, "")
        assert served.call("GET", "/livez").status == 200
        for connection in (*connections, silent):
            assert read_all(connection) == b""
        until(lambda: not served.server.server_state.connections, "all connections are closed")


def test_incomplete_headers_of_a_second_request_time_out(app):
    with serving(app, Limits(headers_s=0.2)) as served:
        connection = send_raw(served.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"ok\n"):
            answer += connection.recv(4096)
        connection.sendall(b"GET /livez HT")
        assert read_all(connection) == b""


def test_endless_headers_end_the_connection(served):
    connection = send_raw(served.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\n")
    cut_off = False
    for _ in range(1000):
        try:
            connection.sendall(b"X-Filler: " + b"x" * 4000 + b"\r\n")
        except (ConnectionResetError, BrokenPipeError):
            cut_off = True
            break
    assert cut_off or read_all(connection) == b""
    connection.close()
    assert served.call("GET", "/livez").status == 200


def test_idle_connections_are_closed_beyond_the_connection_limit(app):
    with serving(app, Limits(connections=5)) as served:
        connections = [served.connect() for _ in range(5)]
        for connection in connections:
            connection.request("GET", "/livez")
            assert connection.getresponse().read() == b"ok\n"
        assert served.call("GET", "/livez").status == 200
        until(lambda: len(served.server.server_state.connections) <= 5, "no more connections than allowed are open")
        connections[4].request("GET", "/livez")
        assert connections[4].getresponse().status == 200
        for connection in connections:
            connection.close()


def test_a_client_that_never_reads_its_answer_is_cut_off(service, tokens):
    service.log = b"x" * (4 * MIB)
    app = make_app(service, tokens)
    served_limits = Limits(keep_alive_s=1, flush_s=0.2)
    with serving(app, served_limits) as served:
        served.call("POST", "/api/v1/jobs", body=b'{"name": "a", "command": ["true"]}')
        from builders import a_run

        service.store.run_list = [a_run(1, state="running")]
        connection = send_raw(served.port, f"GET /api/v1/jobs/1/logs?limit=4194304 HTTP/1.1\r\n{AUTH}\r\n")
        until(lambda: served.server.server_state.total_requests >= 2, "the answer was written")
        until(lambda: not served.server.server_state.connections, "the connection was dropped")
        connection.close()


def test_a_busy_server_still_answers_probes(service, tokens):
    with serving(make_app(service, tokens, limits=LimitsConfig(requests=0))) as served:
        answer = served.call("GET", "/api/v1/jobs")
        assert (answer.status, answer.code) == (503, "BUSY")
        assert answer.headers["retry-after"]
        assert served.call("GET", "/livez").status == 200
        assert served.call("GET", "/readyz").status == 200


@pytest.mark.parametrize(
    "text", ["nonsense\r\n\r\n", "GET /\xff HTTP/1.1\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "CONNECT a:1 HTTP/1.1\r\n\r\n"]
)
def test_invalid_http_gets_a_problem(served, text):
    answer = read_all(send_raw(served.port, text))
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "MALFORMED"


def test_a_foreign_or_repeated_host_header_is_refused(served):
    answer = read_all(send_raw(served.port, "GET /livez HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"))
    assert b" 421 " in answer.split(b"\r\n")[0]
    twice = read_all(
        send_raw(served.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n")
    )
    assert b" 400 " in twice.split(b"\r\n")[0]


def test_the_server_installs_no_signal_handlers(app):
    before = signal.getsignal(signal.SIGTERM)
    with make_server(app).capture_signals():
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "hodei.example", ""])
def test_listening_beyond_loopback_needs_tls_or_insecure(app, host):
    with pytest.raises(InvalidInput, match="unencrypted"):
        make_server(app, host=host)
    assert make_server(app, host=host, insecure=True)
    assert make_server(app, host="127.0.0.1")
    assert make_server(app, host="localhost")
