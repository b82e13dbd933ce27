"""A proxy in front of a server that injects faults into chosen HTTP requests.

It copies bytes between sockets and parses only the request line. A fault runs `before` and then forwards the request
unchanged (`PASS`), drops the response of the server (`CUT`), forwards the request and closes the client's connection at
once (`ABANDON`), or does not forward it (`DROP`). No TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PASS, CUT, ABANDON, DROP = "pass", "cut", "abandon", "drop"
_REQUEST_LINE = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE) (\S+) HTTP/1.1\r\n")


class Fault(NamedTuple):
    """For the next request whose method and path match `request`."""

    request: re.Pattern[str]
    action: str
    before: Callable[[], object]
    after: Callable[[], object]


class _Connection:
    """One client and its connection to the server."""

    def __init__(self, to_client: asyncio.StreamWriter) -> None:
        self.to_client = to_client
        self.to_server: asyncio.StreamWriter | None = None
        self.responses: asyncio.Future[None] | None = None
        self.fault: Fault | None = None
        self.unanswered, self.client_left = 0, False

    def close(self) -> None:
        if self.responses is not None:
            self.responses.cancel()
        self.to_client.close()
        if self.to_server is not None:
            self.to_server.close()


class FaultProxy:
    """From one unix socket to another, or from a free loopback port to a loopback port.
    `unanswered`: requests that the server has not answered yet, also those of clients that have disconnected."""

    def __init__(self, *, path: str = "", to_path: str = "", to_port: int = 0) -> None:
        self._path, self._to_path, self._to_port = path, to_path, to_port
        self.port = self.unanswered = 0
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self.requests: list[str] = []
        self.matched, self.client_left, self.answered = threading.Event(), threading.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        up = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(up,), daemon=True)
        self._thread.start()
        assert up.wait(10)

    def expect(
        self,
        request: str,
        action: str = PASS,
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
        also: bool = False,
    ) -> None:
        """Set the fault of the next request that matches; `also` keeps the earlier ones.

        `matched` is set when the request has been forwarded or dropped, `client_left` when its client has disconnected,
        `answered` when the server has answered it.
        """
        for event in (self.matched, self.client_left, self.answered):
            event.clear()
        with self._lock:
            expected = Fault(re.compile(request), action, before, after)
            self._faults = [*self._faults, expected] if also else [expected]

    def is_idle(self) -> bool:
        return self.unanswered == 0

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self, up: threading.Event) -> None:
        server: asyncio.Server | None = None

        async def listen() -> None:
            nonlocal server
            if self._path:
                server = await asyncio.start_unix_server(self._accept, self._path)
            else:
                server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
                self.port = server.sockets[0].getsockname()[1]

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(listen())
        up.set()
        self._loop.run_forever()
        if server is not None:
            server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=5))
        self._loop.close()

    async def _accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        connection = _Connection(to_client)
        try:
            await self._forward_requests(client, connection)
            connection.client_left = True
            if connection.fault is not None:
                self.client_left.set()
            if connection.unanswered and connection.responses is not None:
                await connection.responses  # the server still works on it
        finally:
            self.unanswered -= connection.unanswered
            connection.close()

    async def _forward_requests(self, client: asyncio.StreamReader, connection: _Connection) -> None:
        with contextlib.suppress(OSError):
            while data := await client.read(1 << 20):
                request = _REQUEST_LINE.match(data)
                fault = self._fault_for(f"{request[1].decode()} {request[2].decode()}") if request else None
                if fault is not None:
                    await asyncio.to_thread(fault.before)
                    if fault.action == DROP:
                        self.matched.set()
                        return
                    connection.fault = fault
                if request:
                    connection.unanswered += 1
                    self.unanswered += 1
                if fault is not None and connection.to_server is None:
                    self.matched.set()  # a server that hangs may not even accept the connection
                to_server = connection.to_server or await self._connect(connection)
                to_server.write(data)
                await to_server.drain()
                if fault is not None:
                    self.matched.set()
                    if fault.action == ABANDON:
                        connection.to_client.close()

    async def _connect(self, connection: _Connection) -> asyncio.StreamWriter:
        if self._to_path:
            server, to_server = await asyncio.open_unix_connection(self._to_path)
        else:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._to_port)
        connection.to_server = to_server
        connection.responses = asyncio.ensure_future(self._forward_responses(server, connection))
        return to_server

    async def _forward_responses(self, server: asyncio.StreamReader, connection: _Connection) -> None:
        with contextlib.suppress(OSError):
            while data := await server.read(1 << 20):
                if data.startswith(b"HTTP/1.1 ") and connection.unanswered:
                    connection.unanswered -= 1
                    self.unanswered -= 1
                fault, connection.fault = connection.fault, None
                if fault is not None:
                    self.answered.set()
                    if fault.action == CUT:
                        await asyncio.to_thread(fault.after)
                        break
                if connection.client_left and not connection.unanswered:
                    break
                if not connection.client_left:
                    connection.to_client.write(data)
                    await connection.to_client.drain()
        connection.to_client.close()

    def _fault_for(self, request: str) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            fault = next((fault for fault in self._faults if fault.request.search(request)), None)
            if fault is not None:
                self._faults.remove(fault)
            return fault


def freeze(pid: int) -> None:
    """SIGSTOP; returns when every thread has stopped, which takes a while on a busy machine."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while any(_state(task) not in "TtXZ" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"  # it has ended
