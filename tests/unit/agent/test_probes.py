"""Health checks in the agent: which addresses are allowed, and which orders are valid."""

from __future__ import annotations

import asyncio

import pytest

from hodei.agent.probes import BadHealthCheck, HealthCheck, get_status, probe_target


@pytest.mark.parametrize(
    ("url", "target"),
    [
        pytest.param("http://127.0.0.1:8080/ready?x=1", (("127.0.0.1",), 8080, "/ready?x=1"), id="loopback"),
        pytest.param("http://localhost", (("127.0.0.1", "::1"), 80, "/"), id="localhost"),
        pytest.param("http://[::1]:9/", (("::1",), 9, "/"), id="IPv6 loopback"),
        pytest.param("http://127.9.9.9:1/", (("127.9.9.9",), 1, "/"), id="any loopback"),
    ],
)
def test_an_address_of_this_host_is_accepted(url, target):
    assert probe_target(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data", "http://[::ffff:169.254.169.254]/", "http://[::ffff:127.0.0.1]/",
        "http://192.0.2.1/", "http://example.com/", "http://localhost.example.com/", "http://127.1/",
        "http://2130706433/", "http://0x7f000001/", "http://0.0.0.0/", "http://[::]/", "http://224.0.0.1/",
        "http://255.255.255.255/", "https://127.0.0.1/", "file:///etc/passwd", "http://user@127.0.0.1/",
        "http://127.0.0.1@example.com/", "http://127.0.0.1:99999/", "http://127.0.0.1/a b", "http://127.0.0.1/\r\nX: y",
        "http://127.0.0.1\\@example.com/", "http:///x", "127.0.0.1:80", "",
    ],
)  # fmt: skip
def test_every_other_address_is_refused(url):
    with pytest.raises(BadHealthCheck):
        probe_target(url)


def test_a_health_check_survives_the_journal():
    order = {
        "command": ["true"],
        "every_ms": 1000,
        "timeout_ms": 500,
        "after_ms": 0,
        "failures": 2,
    }
    health = HealthCheck.from_order(order)
    assert health == HealthCheck(("true",), every_ms=1000, timeout_ms=500, failures=2)
    assert health.as_order() == order
    assert HealthCheck.from_order(None) is None


@pytest.mark.parametrize(
    "order",
    [
        pytest.param({"every_ms": 5}, id="no check"),
        pytest.param({"command": ["x"], "file": "/x"}, id="two checks"),
        pytest.param({"command": "x"}, id="a command that is not a list"),
        pytest.param({"file": "/x\0"}, id="an invalid file name"),
        pytest.param({"file": "/x", "every_ms": 0}, id="no interval"),
        pytest.param({"file": "/x", "failures": "3"}, id="a number as text"),
    ],
)
def test_an_invalid_health_check_is_refused(order):
    with pytest.raises(BadHealthCheck):
        HealthCheck.from_order(order)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", 200, id="healthy"),
        pytest.param(b"HTTP/1.0 503 no\r\n\r\n", 503, id="unhealthy"),
        pytest.param(b"HTTP/1.1 302 Found\r\nLocation: http://example.com/\r\n\r\n", 302, id="a redirect is an answer"),
        pytest.param(b"SSH-2.0-OpenSSH\r\n", None, id="not HTTP"),
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"x" * 100_000, None, id="endless"),
    ],
)
def test_the_http_status_is_returned(answer, status):
    requests = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    async def probe() -> int | None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            try:
                return await get_status(f"http://127.0.0.1:{port}/ready?all=1")
            except (OSError, ValueError):
                return None

    assert asyncio.run(probe()) == status
    assert requests[0].startswith(b"GET /ready?all=1 HTTP/1.1\r\nHost: 127.0.0.1:")
