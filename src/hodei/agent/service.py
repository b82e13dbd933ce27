"""The door: JSON lines over a unix socket, one server per installation, answers by request id, and news pushed.

Requests: {"id": n, "op": name, ...}; answers: {"id": n, "ok": ...} or {"id": n, "error": text, "code": code}; news:
{"news": [observation, ...]}. The first request is `hello`; a server with an older epoch than one seen before is turned
away, a newer or equal one takes the place of the one before it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hodei.agent import logs, proc
from hodei.agent.exec import EXECUTE, ExecSessions
from hodei.agent.limits import enforcement
from hodei.agent.logs import Aging
from hodei.agent.run import BadOrder, Observation, Run, check_installation, check_run_name
from hodei.agent.runs import Runs

# --------------------------------------------------------------------------------------- exec requests
# Commands that somebody wants run beside a run, and what they say: answered when they are over.


SAID_LIMIT = 1 << 20


class Busy(Exception):
    """As many as there may be are at it."""


class Later:
    """An answer that is not there yet; whoever wants it sets `then`."""

    def __init__(self) -> None:
        self.then: Callable[[Any], None] = lambda _: None


class ExecRequests:
    def __init__(self, beside: ExecSessions) -> None:
        self._beside = beside
        self._taken: set[tuple[str, str]] = set()

    def start(self, run: Run, command: Sequence[str], timeout_ms: int) -> Later:
        """Busy, OSError or ValueError: nothing was started."""
        place = next((place for place in EXECUTE if (run.key, place) not in self._taken), "")
        if not place:
            raise Busy(f"{len(EXECUTE)} commands are at work beside {run.name} already")
        streams = (f"{place}.out", f"{place}.err")
        for name in streams:
            _remove_request(f"{run.directory}/{name}")
        answer = Later()

        def over(code: int | None) -> None:
            self._taken.discard((run.key, place))
            said = [_said(f"{run.directory}/{name}") for name in streams]
            for name in streams:
                _remove_request(f"{run.directory}/{name}")
            answer.then(
                {
                    "exit_code": code,
                    "stdout": base64.b64encode(said[0][0]).decode(),
                    "stderr": base64.b64encode(said[1][0]).decode(),
                    "cut": said[0][1] or said[1][1],
                }
            )

        self._beside.start(run, place, command, timeout_ms, lambda _: None, streams=streams, over=over)
        self._taken.add((run.key, place))
        return answer


def _said(path: str) -> tuple[bytes, bool]:
    """The beginning of what was said, and whether there was more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b"", False
    with os.fdopen(fd, "rb") as file:
        data = file.read(SAID_LIMIT + 1)
    return data[:SAID_LIMIT], len(data) > SAID_LIMIT


def _remove_request(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


# ----------------------------------------------------------------------------------------------------

PROTOCOL = 1
LINE_LIMIT = 16 << 20
BACKLOG_LIMIT = 64 << 20
KNOWN_PAGE = 5000
TICK_S = 1.0
PRUNE_EVERY_TICKS = 600
LOOK_EVERY_TICKS = 3
_encode = json.JSONEncoder(separators=(",", ":")).encode

Request = dict[str, Any]


class Refused(Exception):
    """An answer that says no: a stable code and the reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Service:
    """Everything a connected server can ask for. `done` is set when the agent should leave."""

    def __init__(self, runs: Runs, linger_s: float, keep_logs_s: float) -> None:
        self.runs = runs
        self.done = asyncio.Event()
        self._linger_s, self._aging = linger_s, Aging(f"{runs.home}/clock", keep_logs_s)
        self._connections: set[Connection] = set()
        self._servers: dict[str, Connection] = {}
        self._alone_since_ms = proc.boot_clock_ms()
        self._ticks = 0
        self._executing = ExecRequests(runs.beside)
        self._ops: dict[str, Callable[[Connection, Request], Any]] = {
            "start": self._start,
            "stop": self._stop,
            "checkpoint": self._checkpoint,
            "known": self._known,
            "forget": self._forget,
            "logs": self._logs,
            "log_times": self._log_times,
            "facts": self._facts,
            "ping": self._ping,
            "execute": self._execute,
            "shutdown": self._shutdown,
        }

    def tell(self, installation: str, observations: list[Observation]) -> None:
        server = self._servers.get(installation)
        if server is not None:
            server.send({"news": observations})

    def came(self, connection: Connection) -> None:
        self._connections.add(connection)

    def went(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if self._servers.get(connection.installation) is connection:
            del self._servers[connection.installation]
        self._alone_since_ms = proc.boot_clock_ms()

    def answer(self, connection: Connection, request: Request) -> Any:
        op = request.get("op")
        if op == "hello":
            return self._hello(connection, request)
        if op not in self._ops:
            raise Refused("UNKNOWN", f"no such operation: {str(op)[:40]!r}")
        if not connection.installation:
            raise Refused("HELLO_FIRST", "say hello first")
        if self._servers.get(connection.installation) is not connection:
            raise Refused("STALE_EPOCH", "another server has taken over")
        return self._ops[op](connection, request)

    def _hello(self, connection: Connection, request: Request) -> Any:
        installation = check_installation(request.get("installation"))
        if not self.runs.see_epoch(installation, int(request.get("epoch", 0))):
            raise Refused("STALE_EPOCH", f"a server with epoch {self.runs.epochs[installation]} has been here")
        os.makedirs(self.runs.places.path(installation, ""), mode=0o700, exist_ok=True)
        former = self._servers.get(installation)
        self._servers[installation] = connection
        connection.installation = installation
        if former is not None and former is not connection:
            former.close()
        return {"protocol": PROTOCOL, "pid": os.getpid()}

    def _start(self, connection: Connection, request: Request) -> Any:
        return {"refused": self.runs.start(connection.installation, request["runs"])}

    def _stop(self, connection: Connection, request: Request) -> Any:
        for order in request["runs"]:
            key = f"{connection.installation}/{order['run']}"
            grace_ms = max(0, int(order["grace_ms"]))
            self.runs.stop(key, grace_ms, str(order.get("reason", "")), order.get("checkpoint"))
        return {}

    def _checkpoint(self, connection: Connection, request: Request) -> Any:
        for order in request["runs"]:
            self.runs.save_work(f"{connection.installation}/{order['run']}", order.get("checkpoint"))
        return {}

    def _known(self, connection: Connection, request: Request) -> Any:
        """One page, by name; `after` is the last name of the page before."""
        prefix = connection.installation + "/"
        after = prefix + str(request.get("after", ""))
        keys = sorted(key for key in self.runs.table if key.startswith(prefix) and key > after)
        page = keys[:KNOWN_PAGE]
        self.runs.journal.sync()  # what is told here must be durable first
        return {"runs": [self.runs.table[key].observation() for key in page], "more": len(keys) > len(page)}

    def _forget(self, connection: Connection, request: Request) -> Any:
        self.runs.forget(f"{connection.installation}/{name}" for name in request["runs"])
        return {}

    def _logs(self, connection: Connection, request: Request) -> Any:
        name, offset = check_run_name(request.get("run")), int(request["offset"])
        directory = self.runs.places.path(connection.installation, name)
        try:
            data, after = logs.read(directory, str(request["stream"]), offset, int(request["limit"]))
        except logs.NoLog:
            # A run that we know of and that has no log was never born, or has said nothing.
            if not self.runs.knows(f"{connection.installation}/{name}"):
                raise
            data, after = b"", offset
        return {"data": base64.b64encode(data).decode(), "offset": after}

    def _log_times(self, connection: Connection, request: Request) -> Any:
        directory = self.runs.places.path(connection.installation, check_run_name(request.get("run")))
        return {"marks": logs.read_times(directory, str(request["stream"]))}

    def _execute(self, connection: Connection, request: Request) -> Any:
        """A command beside a run; answered when it is over."""
        run = self.runs.table.get(f"{connection.installation}/{check_run_name(request.get('run'))}")
        if run is None or run.end is not None or not run.pid:
            raise Refused("NOT_RUNNING", f"run {request['run']} does not run")
        command = [str(word) for word in request["command"]]
        if not command or any("\0" in word for word in command):
            raise Refused("BAD_REQUEST", "a command is one word or more, without a NUL")
        try:
            return self._executing.start(run, command, max(1, int(request["timeout_ms"])))
        except Busy as error:
            raise Refused("BUSY", str(error)) from None

    def _ping(self, connection: Connection, request: Request) -> Any:
        """Costs nothing: asked every few seconds, to see whether we answer."""
        return {}

    def _facts(self, connection: Connection, request: Request) -> Any:
        return {
            "enforcement": enforcement(),
            "pid": os.getpid(),
            "protocol": PROTOCOL,
            "trouble": self.runs.trouble,
        }

    def _shutdown(self, connection: Connection, request: Request) -> Any:
        self.done.set()
        return {}

    # ---------------------------------------------------------------------------------------------- time

    async def tick_until_done(self) -> None:
        """Once a second: keep logs within their caps, look at checkpoints and for idle runs, and leave when nobody needs us."""
        while not self.done.is_set():
            for run in list(self.runs.live.values()):
                self.runs.trim_logs(run)
            self.runs.log_times.look([run.directory for run in self.runs.live.values()], proc.now_ms())
            if self._ticks % PRUNE_EVERY_TICKS == 0:
                self.runs.places.prune(self._aging.oldest_s(), set(self.runs.table))
            if self._ticks % LOOK_EVERY_TICKS == 0:
                self.runs.look_at_checkpoints()
            self.runs.idles.look()
            self._ticks += 1
            if not self._connections and self._may_leave():
                self.done.set()
            try:
                await asyncio.wait_for(self.done.wait(), TICK_S)
            except TimeoutError:
                continue

    def _may_leave(self) -> bool:
        if not os.path.exists(f"{self.runs.home}/lock"):
            return True  # our home was removed: nobody can ever find us again
        return self.runs.idle and proc.boot_clock_ms() - self._alone_since_ms >= self._linger_s * 1000


class Connection(asyncio.Protocol):
    """One server at the other end: splits lines, answers each, and hangs up on nonsense."""

    def __init__(self, service: Service) -> None:
        self.installation = ""
        self._service = service
        self._transport: asyncio.Transport | None = None
        self._parts = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._service.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._service.went(self)

    def data_received(self, data: bytes) -> None:
        self._parts += data
        if b"\n" in data:
            *lines, rest = self._parts.split(b"\n")
            self._parts = rest
            for line in lines:
                self._line(bytes(line))
        if len(self._parts) > LINE_LIMIT:
            self.send({"id": None, "error": f"a line is longer than {LINE_LIMIT} bytes", "code": "TOO_LONG"})
            self.close()

    def _line(self, line: bytes) -> None:
        number = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise BadOrder("a request must be an object")
            number = request.get("id")
            ok = self._service.answer(self, request)
            if isinstance(ok, Later):
                ok.then = lambda late: self.send({"id": number, "ok": late})
                return
            answer: Request = {"id": number, "ok": ok}
        except Refused as error:
            answer = {"id": number, "error": str(error), "code": error.code}
        except logs.LogError as error:
            answer = {"id": number, "error": str(error), "code": "NO_LOG"}
        except (BadOrder, ValueError, KeyError, TypeError, RecursionError) as error:
            answer = {"id": number, "error": f"bad request: {error}", "code": "BAD_REQUEST"}
        except OSError as error:
            answer = {"id": number, "error": str(error), "code": "HOST_ERROR"}
        self.send(answer)

    def send(self, message: Request) -> None:
        if self._transport is None:
            return
        self._transport.write(_encode(message).encode() + b"\n")
        if self._transport.get_write_buffer_size() > BACKLOG_LIMIT:
            print("a server does not read what it is told; hanging up", file=sys.stderr)
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
