"""A complete installation in its own directory, as real processes, with its command line, client and HTTP API.

After the test all its processes are stopped by pid, and the test fails if one is left.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agent_host import agent_pid, alive
from fork_server import ForkedProcess, fork_server
from hodei import Client
from hodei.api.views import JobDetail
from hodei.client.transport import read_server_file

# Only failing tests take this long. A command may need half a minute on a busy machine.
DEADLINE_S = 120.0
BIN = Path(sys.executable).parent
T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Poll `condition` until its result is truthy, and return that; `what` describes it in the error message."""
    ends = time.monotonic() + deadline_s
    while not (found := condition()):
        if time.monotonic() > ends:
            raise AssertionError(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.01)
    return found


def pids_in(file: Path, count: int) -> list[int]:
    """Wait until jobs have written `count` process ids into `file`, and return all of them."""

    def read() -> list[int]:
        found = file.read_text().split() if file.exists() else []
        return [int(pid) for pid in found] if len(found) >= count else []

    return until(read, f"{count} processes have written their pids")


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Response(NamedTuple):
    """An HTTP response; `seconds` from the first byte sent to the last byte read."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def wait_for_file(file: Path, then: str = "exit 0") -> tuple[str, ...]:
    """A command that waits until the test creates `file`, and then runs `then`. It does not depend on timing."""
    return ("sh", "-c", f"while [ ! -e {file} ]; do sleep 0.02; done; {then}")


class ShortLivedClient(Client):
    """Closes its connection when it is garbage collected, for `installation.client().nodes()`."""

    def __del__(self) -> None:
        self.close()


def may_fork(env: dict[str, str] | None) -> bool:
    """Variables of Python, the locale or the time zone take effect only in a fresh process."""
    return all(name.startswith("HODEI_") for name in env or ())


class Installation:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home.parent / "server.log"
        self.address = ""
        self.server: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._commands: list[subprocess.Popen[Any]] = []

    def configure(self, toml: str) -> Installation:
        self.home.mkdir(mode=0o700, exist_ok=True)
        (self.home / "config.toml").write_text(toml)
        return self

    def up(self, *args: str, port: int = 0, env: dict[str, str] | None = None) -> Installation:
        """Start a server and wait until it is up."""
        self.start(*args, port=port, env=env)
        self.until_up()
        return self

    def start(self, *args: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        assert self.server is None or self.server.poll() is not None, "the server is already running"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        options = [f"--home={self.home}", f"--port={port}", *args]
        with self.log.open("ab") as log, open(os.devnull, "rb") as nothing:
            if self.server is None and may_fork(env):
                files = nothing.fileno(), log.fileno(), log.fileno()
                self.server = fork_server("server").start("server", options, self.env(env), files, new_session=True)
            else:
                self.server = subprocess.Popen(
                    [sys.executable, "-m", "hodei.server", *options],
                    stdin=nothing, stdout=log, stderr=log, start_new_session=True, env=self.env(env),
                )  # fmt: skip

    def until_up(self) -> None:
        server = self.server
        assert server is not None

        def is_up() -> str:
            output = self.server_output()
            assert server.poll() is None, f"the server ended with {server.returncode}: {output}"
            found = re.search(r"is up at (\S+)", output)
            return found[1] if found else ""

        self.address = until(is_up, "the server is up")

    def server_output(self) -> str:
        """What the current server process has written so far."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """kill -9; returns when the server has exited."""
        assert self.server is not None
        self.server.kill()
        self.server.wait(DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.server is not None
        self.server.terminate()
        return self.server.wait(DEADLINE_S)

    def env(self, more: dict[str, str] | None = None) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HODEI_")}
        return {**inherited, "HODEI_HOME": str(self.home), **(more or {})}

    def hodei(
        self, *args: str, input: str | bytes = "", env: dict[str, str] | None = None, timeout_s: float = DEADLINE_S
    ) -> CommandResult:
        """Run a command of the command line to its end."""
        data = input.encode() if isinstance(input, str) else input
        if may_fork(env) and "up" not in args:
            code, out, err = fork_server("hodei").run("hodei", [*args], self.env(env), data, timeout_s)
            return CommandResult(code, out.decode(errors="replace"), err.decode(errors="replace"))
        done = subprocess.run(
            [BIN / "hodei", *args], input=data, capture_output=True, env=self.env(env), timeout=timeout_s, check=False
        )
        return CommandResult(
            done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )

    def ok(self, *args: str, input: str = "") -> CommandResult:
        """Like `hodei`, and the command must succeed."""
        result = self.hodei(*args, input=input)
        assert result.code == 0, f"hodei {' '.join(args)}: exit code {result.code}\n{result.out}{result.err}"
        return result

    def begin(self, *args: str) -> subprocess.Popen[bytes]:
        """Start a command without waiting for it; its output is read from pipes."""
        command = subprocess.Popen(
            [BIN / "hodei", *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=self.env(), bufsize=0,
        )  # fmt: skip
        self._commands.append(command)
        return command

    def client(self, **fields: Any) -> Client:
        return ShortLivedClient(home=self.home, **fields)

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Response:
        """One HTTP request. An empty `token` sends none."""
        host, port = self.address.removeprefix("http://").rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
        token = self.token if token is None else token
        sent = {"Authorization": f"Bearer {token}"} if token else {}
        began = time.monotonic()
        try:
            connection.request(method, path, body, {**sent, **(headers or {})})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        seconds = time.monotonic() - began
        return Response(response.status, {k.lower(): v for k, v in response.getheaders()}, data, seconds)

    def job(self, id: int) -> JobDetail:
        with self.client() as client:
            return client.job(id)

    def state(self, id: int) -> str:
        return self.job(id).job.state

    def submit(self, *command: str, **fields: Any) -> int:
        with self.client() as client:
            return client.submit({"command": list(command) or ["true"], "cpu": "10m", "memory": "1Mi", **fields}).id

    def until_state(self, id: int, *states: str) -> JobDetail:
        def reached() -> JobDetail | None:
            detail = self.job(id)
            return detail if detail.job.state in states else None

        return until(reached, f"job {id} is {' or '.join(states)}")

    def ended(self, *ids: int, timeout_s: float = DEADLINE_S) -> list[JobDetail]:
        """Wait until these jobs have ended, and return them."""
        with self.client() as client:
            client.wait(ids, timeout_s)
            return [client.job(id) for id in ids]

    def log_of(self, id: int, stream: str = "stdout", **fields: Any) -> str:
        with self.client() as client:
            return b"".join(client.logs(id, stream=stream, **fields)).decode()

    def works(self) -> None:
        """Assert that a plain job still runs."""
        assert self.ended(self.submit("sh", "-c", "exit 7"))[0].job.exit_code == 7

    @property
    def agent_home(self) -> Path:
        return self.home / "agent"

    def agent(self) -> int:
        """The agent's pid; 0 if there is none."""
        try:
            return agent_pid(self.agent_home)
        except OSError:
            return 0

    def agents_stopped(self) -> bool:
        """Terminate all agents, also those of additional local backends; True if none is left."""
        locks = [self.agent_home / "lock", *(self.home / "backends").glob("*/lock")]
        agents = [pid for lock in locks if lock.exists() and (pid := agent_pid(lock.parent))]
        for pid in agents:
            with contextlib.suppress(ProcessLookupError):  # it has exited meanwhile
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
        return not agents

    def kill_agent(self) -> None:
        pid = until(self.agent, "an agent runs")
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid), "the agent has exited")

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Query the database file directly."""
        db = sqlite3.connect(f"{(self.home / 'hodei.db').as_uri()}?mode=ro", uri=True, timeout=10)
        try:
            return db.execute(sql, values).fetchall()
        finally:
            db.close()

    def close(self) -> None:
        """Stop everything that was started here, each process by its pid. Raises if one is left."""
        for command in self._commands:
            if command.poll() is None:
                command.kill()
            command.communicate()
        if found := read_server_file(self.home):  # a server started by `hodei up -d`
            _end(found.pid, self.home)
        if self.server is not None and self.server.poll() is None:
            self.server.kill()
            self.server.wait(DEADLINE_S)
        for pid, path in _open_files_below(self.home):
            if path.name == "status":  # held by the wrapper of a run, which leads its process group
                _end(pid, self.home, group=True)
        until(self.agents_stopped, "all agents have stopped")
        until(lambda: not list(_processes_of(self.home)), f"no process of {self.home} is left", 30)
        for log in (self.log, self.agent_home / "agent.log"):
            text = log.read_text(errors="replace") if log.exists() else ""
            assert "Traceback" not in text, text


def _end(pid: int, home: Path, *, group: bool = False) -> None:
    if alive(pid) and pid in {*_processes_of(home)}:
        with contextlib.suppress(ProcessLookupError):  # it has exited meanwhile
            (os.killpg if group else os.kill)(pid, signal.SIGKILL)
        until(lambda: not alive(pid), f"process {pid} has exited")


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            yield int(name)


def _open_files_below(path: Path) -> Iterator[tuple[int, Path]]:
    for pid in _pids():
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith(f"{path}/"):
                    yield pid, Path(target)
        except OSError:
            continue


def _processes_of(home: Path) -> Iterator[int]:
    """Processes with this home in their command line, or with one of its files open."""
    yield from (pid for pid, _ in _open_files_below(home))
    for pid in _pids():
        try:
            if str(home).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and alive(pid):
                yield pid
        except OSError:
            continue
