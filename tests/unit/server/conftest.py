"""Two ways to call the app: in-process without a socket (`call`), and through a real one (`served`)."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hodei.server.app import App, make_app
from hodei.server.auth import Entry, Tokens
from hodei.server.route import Principal
from hodei.server.serving import Limits, Server, make_server
from unit.server.fake_service import FakeService

TOKENS = {"viewer": "viewer-token", "user": "user-token", "admin": "admin-token"}


class Response:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a Problem; fails the test if the body is not one."""
        assert set(self.json) == {"code", "message", "hint", "problems"}
        assert self.json["message"]
        return self.json["code"]


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def tokens() -> Tokens:
    entries = [
        Entry(Principal(role, role), hashlib.sha256(token.encode()).digest())  # type: ignore[arg-type]
        for role, token in TOKENS.items()
    ]
    return Tokens(entries)


@pytest.fixture
def app(service: FakeService, tokens: Tokens) -> App:
    return make_app(service, tokens, hosts=["hodei.example"])  # type: ignore[arg-type]


async def call_app(
    app: App, method: str, target: str, *, role: str = "user", body: bytes = b"", headers: dict[str, str] | None = None
) -> Response:
    """One request without a socket. `role` "" sends no token."""
    path, _, query = target.partition("?")
    sent_headers = {"host": "localhost:80"} | ({"authorization": f"Bearer {TOKENS[role]}"} if role else {})
    if body:
        sent_headers |= {"content-length": str(len(body)), "content-type": "application/json"}
    sent_headers |= {name.lower(): value for name, value in (headers or {}).items()}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent_headers.items()],
        "scheme": "http", "root_path": "", "http_version": "1.1",
    }  # fmt: skip
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    status, received_headers, answer = 0, {}, b""

    async def receive() -> dict[str, Any]:
        return incoming.pop() if incoming else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, received_headers, answer
        if message["type"] == "http.response.start":
            status = message["status"]
            received_headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            answer += message["body"]

    await app(scope, receive, send)  # type: ignore[arg-type]
    return Response(status, received_headers, answer)


@pytest.fixture
def call(app: App) -> Callable[..., Response]:
    def call_in_process(method: str, target: str, **options: Any) -> Response:
        return asyncio.run(call_app(app, method, target, **options))

    return call_in_process


class Served:
    """A real server on a free port of loopback, in a thread of its own."""

    def __init__(self, server: Server, port: int) -> None:
        self.server, self.port = server, port
        self.loop: asyncio.AbstractEventLoop

    def on_loop(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(5)

    def connect(self, timeout_s: float = 5) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def call(
        self,
        method: str,
        target: str,
        *,
        role: str = "user",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Response:
        connection = self.connect()
        sent_headers = {"Authorization": f"Bearer {TOKENS[role]}"} if role else {}
        if body is not None:
            sent_headers["Content-Type"] = "application/json"
        try:
            connection.request(method, target, body, sent_headers | (headers or {}))
            response = connection.getresponse()
            return Response(response.status, dict(response.headers), response.read())
        finally:
            connection.close()


@contextmanager
def serving(app: App, limits: Limits | None = None) -> Iterator[Served]:
    server = make_server(app, limits=limits)
    socket = server.config.bind_socket()
    served = Served(server, socket.getsockname()[1])

    async def run() -> None:
        served.loop = asyncio.get_running_loop()
        await server.serve(sockets=[socket])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    until(lambda: server.started, "the server has started")
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join(10)
        socket.close()
        assert not thread.is_alive(), "the server did not stop"


def until(condition: Callable[[], Any], description: str, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s: {description}"
        time.sleep(0.005)


@pytest.fixture
def served(app: App) -> Iterator[Served]:
    with serving(app) as server:
        yield server
