"""The guard without a socket; `test_guard_real.py` has the tests that need one."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.server.guard import Guard, deeper_than, host_name


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:9", "[0:0::1]", "hodei.example", "localhost."]
)
def test_the_names_of_the_server_are_accepted(call, host):
    assert call("GET", "/livez", headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "127.0.0.2", "hodei.example.evil", "", "0.0.0.0",
             "localhost@evil.example", "[::2]:80", "evil.example:localhost"],
)  # fmt: skip
def test_a_foreign_host_is_refused_even_with_a_token(call, host):
    response = call("GET", "/api/v1/jobs", headers={"host": host})
    assert (response.status, response.code) == (421, "MISDIRECTED")
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "same-origin", "origin": "http://evil.example"},
    ],
)
def test_web_pages_of_other_origins_are_refused(call, headers):
    for path in ("/api/v1/jobs", "/livez"):
        response = call("GET", path, headers=headers)
        assert (response.status, response.code) == (403, "CROSS_SITE")


def test_same_origin_and_direct_requests_are_accepted(call):
    for headers in ({"origin": "http://localhost:80"}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        assert call("GET", "/livez", headers=headers).status == 200


def test_every_response_has_the_security_headers(call):
    for path, role in (("/livez", ""), ("/api/v1/jobs", ""), ("/nowhere", ""), ("/api/v1/jobs", "user")):
        headers = call("GET", path, role=role).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_too_many_headers_are_refused(call):
    response = call("GET", "/livez", headers={f"x-{n}": "1" for n in range(150)})
    assert (response.status, response.code) == (431, "HEADERS_TOO_LARGE")
    assert call("GET", "/livez", headers={"x": "1" * 40_000}).status == 431


def test_a_websocket_handshake_is_closed_without_an_answer():
    sent = []

    async def never(*_):
        raise AssertionError("the app was reached")

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(never, [])({"type": "websocket", "headers": []}, never, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    ("host", "name"), [("[::1]:80", "::1"), ("a:80", "a"), ("::1", "::1"), ("A.", "a"), ("[0:0:0::1]", "::1"), ("", "")]
)
def test_the_host_name_excludes_the_port(host, name):
    assert host_name(host) == name


documents = st.recursive(
    st.text('a"\\[]{}', max_size=6), lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[{'), inner)
)


def depth_of(value) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@settings(deadline=None)  # the machine may be busy
@given(documents, st.integers(0, 8))
def test_the_depth_of_a_json_text_is_known_without_parsing_it(value, limit):
    assert deeper_than(json.dumps(value).encode(), limit) == (depth_of(value) > limit)


def test_brackets_in_strings_neither_add_nor_hide_depth():
    assert not deeper_than(json.dumps(["[" * 500]).encode(), 64)
    hidden = '["]",' * 100 + "1" + ',"["]' * 100
    assert deeper_than(hidden.encode(), 64)
    assert deeper_than(b"[" * 5_000_000, 64)
