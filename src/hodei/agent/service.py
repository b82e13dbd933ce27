"""The agent's protocol: JSON lines over a unix socket, one server per installation.

Requests: {"id": n, "op": name, ...}; answers: {"id": n, "ok": ...} or {"id": n, "error": text, "code": code}; pushed by the
agent: {"observations": [observation, ...]}. The first request is `hello`; a server with an older epoch than one seen before
is refused, a newer or equal one replaces the one before it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Callable
from typing import Any, cast

from hodei.agent import logs, proc
from hodei.agent.exec import Busy
from hodei.agent.facts import CpuMeter, memory_used
from hodei.agent.logs import RetentionClock
from hodei.agent.run import BadOrder, Observation, check_installation, check_run_name
from hodei.agent.runs import Runs
from hodei.agent.usage import FRESH_FOR_SERVERS_MS

LINE_LIMIT = 16 << 20
BACKLOG_LIMIT = 64 << 20
KNOWN_PAGE = 5000
TICK_S = 1.0
PRUNE_EVERY_TICKS = 600
CHECKPOINTS_EVERY_TICKS = 3
_encode = json.JSONEncoder(separators=(",", ":")).encode

Request = dict[str, Any]
# Returned by an operation that answers later, by `Connection.answer`.
DEFERRED = object()


class Refused(Exception):
    """An error answer: a stable code and a text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Service:
    """The operations of a connected server. `done` is set when the agent should exit."""

    def __init__(self, runs: Runs, linger_s: float | None, keep_logs_s: float) -> None:
        """`linger_s` None: it stays, with or without a server."""
        self.runs = runs
        # The server's clock, at the latest; a joined agent knows it better than its own.
        self.server_now_ms: Callable[[], int] = proc.now_ms
        self._cpu_meter = CpuMeter()
        self.done = asyncio.Event()
        self._linger_s, self._retention = linger_s, RetentionClock(f"{runs.home}/clock", keep_logs_s)
        self._connections: set[Connection] = set()
        self._servers: dict[str, Connection] = {}
        self._alone_since_ms = proc.boot_clock_ms()
        self._ticks = 0
        self._ops: dict[str, Callable[[Connection, Request], Any]] = {
            "start": self._start,
            "stop": self._stop,
            "checkpoint": self._checkpoint,
            "known": self._known,
            "forget": self._forget,
            "logs": self._logs,
            "log_times": self._log_times,
            "facts": lambda connection, request: {"pid": os.getpid(), "problem": runs.journal_problem},
            "ping": lambda connection, request: {},
            "execute": self._execute,
            "usage": self._usage,
            "host_usage": self._host_usage,
        }

    def publish(self, installation: str, observations: list[Observation]) -> None:
        server = self._servers.get(installation)
        if server is not None:
            server.send({"observations": observations})

    def connected(self, connection: Connection) -> None:
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if self._servers.get(connection.installation) is connection:
            del self._servers[connection.installation]
        self._alone_since_ms = proc.boot_clock_ms()

    def handle(self, connection: Connection, request: Request) -> Any:
        op = request.get("op")
        if op == "hello":
            return self._hello(connection, request)
        if op not in self._ops:
            raise Refused("UNKNOWN", f"no such operation: {str(op)[:40]!r}")
        if not connection.installation:
            raise Refused("HELLO_FIRST", "the first request must be hello")
        if self._servers.get(connection.installation) is not connection:
            raise Refused("STALE_EPOCH", "another server has taken over")
        return self._ops[op](connection, request)

    def _hello(self, connection: Connection, request: Request) -> Any:
        installation = check_installation(request.get("installation"))
        if not self.runs.accept_epoch(installation, int(request.get("epoch", 0))):
            raise Refused("STALE_EPOCH", f"a server with epoch {self.runs.epochs[installation]} has taken over")
        os.makedirs(self.runs.dirs.path(installation, ""), mode=0o700, exist_ok=True)
        former = self._servers.get(installation)
        self._servers[installation] = connection
        connection.installation = installation
        if former is not None and former is not connection:
            former.close()
        return {"pid": os.getpid()}

    def _start(self, connection: Connection, request: Request) -> Any:
        late: list[Request] = []
        orders: list[Request] = []
        now_ms = self.server_now_ms()
        for order in request["runs"]:
            start_by_ms = int(order.get("start_by_ms") or 0)
            known = self.runs.knows(f"{connection.installation}/{order.get('run')}")
            (late if start_by_ms and now_ms > start_by_ms and not known else orders).append(order)
        refused = self.runs.start(connection.installation, orders)
        return {"refused": refused, "late": [str(order.get("run")) for order in late]}

    def _host_usage(self, connection: Connection, request: Request) -> Any:
        return {"cpu_milli": self._cpu_meter.milli(), "memory_bytes": memory_used()}

    def _stop(self, connection: Connection, request: Request) -> Any:
        for order in request["runs"]:
            key = f"{connection.installation}/{order['run']}"
            grace_ms = max(0, int(order["grace_ms"]))
            self.runs.stop(key, grace_ms, str(order.get("reason", "")), order.get("checkpoint"))
        return {}

    def _checkpoint(self, connection: Connection, request: Request) -> Any:
        for order in request["runs"]:
            self.runs.checkpoint(f"{connection.installation}/{order['run']}", order.get("checkpoint"))
        return {}

    def _known(self, connection: Connection, request: Request) -> Any:
        """One page, by name; `after` is the last name of the page before."""
        prefix = connection.installation + "/"
        after = prefix + str(request.get("after", ""))
        keys = sorted(key for key in self.runs.table if key.startswith(prefix) and key > after)
        page = keys[:KNOWN_PAGE]
        self.runs.journal.sync()  # ends must be durable before they are reported
        return {"runs": [self.runs.table[key].observation() for key in page], "more": len(keys) > len(page)}

    def _usage(self, connection: Connection, request: Request) -> Any:
        """What the live runs of this server have used so far, by name."""
        self.runs.meter.sample(FRESH_FOR_SERVERS_MS)
        runs = [run for run in self.runs.live.values() if run.installation == connection.installation]
        return {"runs": {run.name: run.usage for run in runs if run.usage}}

    def _forget(self, connection: Connection, request: Request) -> Any:
        self.runs.forget(f"{connection.installation}/{name}" for name in request["runs"])
        return {}

    def _logs(self, connection: Connection, request: Request) -> Any:
        name, offset = check_run_name(request.get("run")), int(request["offset"])
        directory = self.runs.dirs.path(connection.installation, name)
        try:
            data, after = logs.read(directory, str(request["stream"]), offset, int(request["limit"]))
        except logs.NoLog:
            # A known run without a log never started, or wrote nothing.
            if not self.runs.knows(f"{connection.installation}/{name}"):
                raise
            data, after = b"", offset
        return {"data": base64.b64encode(data).decode(), "offset": after}

    def _log_times(self, connection: Connection, request: Request) -> Any:
        directory = self.runs.dirs.path(connection.installation, check_run_name(request.get("run")))
        return {"marks": logs.read_times(directory, str(request["stream"]))}

    def _execute(self, connection: Connection, request: Request) -> Any:
        """A command inside a run; answered when it has ended."""
        run = self.runs.table.get(f"{connection.installation}/{check_run_name(request.get('run'))}")
        if run is None or not run.live:
            raise Refused("NOT_RUNNING", f"run {request['run']} does not run")
        command = [str(word) for word in request["command"]]
        if not command or any("\0" in word for word in command):
            raise Refused("BAD_REQUEST", "the command is empty, or holds a NUL character")
        timeout_ms, number = max(1, int(request["timeout_ms"])), request.get("id")
        try:
            self.runs.exec.execute(run, command, timeout_ms, lambda result: connection.answer(number, result))
        except Busy as error:
            raise Refused("BUSY", str(error)) from None
        return DEFERRED

    async def tick_until_done(self) -> None:
        """Once a second: trim logs, poll checkpoints and idle runs, and exit when the agent is not needed any more."""
        while not self.done.is_set():
            for run in list(self.runs.live.values()):
                self.runs.trim_logs(run)
            self.runs.log_times.update([run.directory for run in self.runs.live.values()], proc.now_ms())
            if self._ticks % PRUNE_EVERY_TICKS == 0:
                self.runs.dirs.prune(self._retention.cutoff_s(), set(self.runs.table))
            if self._ticks % CHECKPOINTS_EVERY_TICKS == 0:
                self.runs.poll_checkpoint_files()
            self.runs.idle_checks.check()
            self.runs.meter.sample_if_due()
            self._ticks += 1
            if not self._connections and self._may_exit():
                self.done.set()
            try:
                await asyncio.wait_for(self.done.wait(), TICK_S)
            except TimeoutError:
                continue

    def _may_exit(self) -> bool:
        if not os.path.exists(f"{self.runs.home}/lock"):
            return True  # the home was removed: no server can find this agent again
        if self._linger_s is None:
            return False
        return self.runs.idle and proc.boot_clock_ms() - self._alone_since_ms >= self._linger_s * 1000


class Connection(asyncio.Protocol):
    """One connected server: splits lines, answers each, and closes on nonsense."""

    def __init__(self, service: Service) -> None:
        self.installation = ""
        self._service = service
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # or what `outbound` has in its place
        self._service.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._service.disconnected(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if b"\n" in data:
            *lines, rest = self._buffer.split(b"\n")
            self._buffer = rest
            for line in lines:
                self._handle_line(bytes(line))
        if len(self._buffer) > LINE_LIMIT:
            self.send({"id": None, "error": f"a line is longer than {LINE_LIMIT} bytes", "code": "TOO_LONG"})
            self.close()

    def _handle_line(self, line: bytes) -> None:
        number = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise BadOrder("a request must be an object")
            number = request.get("id")
            result = self._service.handle(self, request)
            if result is not DEFERRED:
                self.answer(number, result)
        except Refused as error:
            self._refuse(number, str(error), error.code)
        except logs.LogError as error:
            self._refuse(number, str(error), "NO_LOG")
        except (BadOrder, ValueError, KeyError, TypeError, RecursionError) as error:
            self._refuse(number, f"bad request: {error}", "BAD_REQUEST")
        except OSError as error:
            self._refuse(number, str(error), "HOST_ERROR")

    def answer(self, number: Any, result: Any) -> None:
        self.send({"id": number, "ok": result})

    def _refuse(self, number: Any, text: str, code: str) -> None:
        self.send({"id": number, "error": text, "code": code})

    def send(self, message: Request) -> None:
        if self._transport is None:
            return
        self._transport.write(_encode(message).encode() + b"\n")
        if self._transport.get_write_buffer_size() > BACKLOG_LIMIT:
            print("a server does not read its messages; closing the connection", file=sys.stderr)
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
