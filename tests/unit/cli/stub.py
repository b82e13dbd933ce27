"""A real HTTP server on loopback whose responses a test sets.

It shows what the client sends, how it reads responses, and what it does when a connection breaks or the server is down.
It does NOT show that a Hodei server understands the requests: routes, states and limits are those of the test.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from hodei.api.views import JobDetail, JobView, NodeView, RunView, TaintView

TOKEN = "hod_secret"
NOW_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


class Request(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Answer(NamedTuple):
    body: Any = b""
    status: int = 200
    headers: dict[str, str] = {}


Handler = Callable[[Request], Any]


class Stub:
    """`on("GET", "/api/v1/nodes", …)` takes a value, an Answer, or a function of the request. The last call counts."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Any] = {}
        self.requests: list[Request] = []
        self.drop = 0  # number of next requests that are read and then get no answer
        self.connections = 0
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self._sockets: set[socket.socket] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self, method: str, path: str, answer: Any) -> None:
        self.routes[method, path] = answer

    def sent(self, method: str, path: str) -> list[Request]:
        return [r for r in self.requests if (r.method, r.path) == (method, path)]

    def start(self) -> Stub:
        stub = self

        class Connection(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                stub.connections += 1
                stub._sockets.add(self.connection)

            def finish(self) -> None:
                stub._sockets.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def _serve(self) -> None:
                url = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.title(): value for name, value in self.headers.items()}
                request = Request(self.command, url.path, dict(parse_qsl(url.query)), headers, body)
                stub.requests.append(request)
                if stub.drop > 0:
                    stub.drop -= 1
                    self.close_connection = True
                    return
                answer = stub.routes.get((self.command, url.path))
                if callable(answer):
                    answer = answer(request)
                if answer is None:
                    answer = problem(404, "NOT_FOUND", f"nothing at {url.path}")
                if not isinstance(answer, Answer):
                    answer = Answer(answer)
                data = answer.body if isinstance(answer.body, bytes) else msgspec.json.encode(answer.body)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _serve

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Quiet(("127.0.0.1", self.port), Connection)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def stop(self) -> None:
        """Like a killed server: nothing listens, and open connections are closed."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        for open_socket in list(self._sockets):
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)


def problem(status: int, code: str, message: str, hint: str = "", problems: Any = ()) -> Answer:
    return Answer({"code": code, "message": message, "hint": hint, "problems": list(problems)}, status)


def job(id: int = 1, state: str = "succeeded", **changes: Any) -> JobView:
    ended = state in ("succeeded", "failed", "cancelled")
    view = JobView(
        id=id, name=f"job-{id}", project="default", user="admin", state=state, reason_code="", reason="", priority=500,
        profile="default", labels={}, tasks=1, members=1, attempt=1, cancel_requested=False,
        exit_code=0 if state == "succeeded" else None, submitted_at="2025-12-31T23:57:00.000Z",
        scheduled_at="2025-12-31T23:57:01.000Z", started_at="2025-12-31T23:57:02.000Z",
        finished_at="2025-12-31T23:57:12.000Z" if ended else "", version=3,
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)


def detail(view: JobView) -> JobDetail:
    run = RunView(
        id=f"{view.id}.0.1", job=view.id, task="main", member=0, attempt=1, node="laptop", backend="local",
        state="running" if view.state == "running" else "succeeded", exit_code=view.exit_code, reason_code="",
        reason="", placed_at=view.scheduled_at, started_at=view.started_at, finished_at=view.finished_at,
    )  # fmt: skip
    return JobDetail(view, {"name": view.name, "command": ["true"]}, [run])


def node(name: str = "laptop", **changes: Any) -> NodeView:
    view = NodeView(
        name=name, backend="local", kind="local", state="ready", reason="", arch="amd64", gpu_type="",
        capacity={"cpu": "8", "memory": "16Gi"}, used={"cpu": "1500m", "memory": "2Gi"}, labels={"zone": "a"},
        taints=[TaintView("disk", "slow", "NoSchedule")], location={}, runs=2, version="0.1.0",
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)
