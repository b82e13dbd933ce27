"""For tests: a complete installation in its own directory, as real processes, with its command line, client and HTTP API.

All processes of the directory are stopped by pid after the test, and none may be left.
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

# Only how long a test that fails takes: a command may need half a minute on a machine that is busy with other things.
DEADLINE_S = 120.0
BIN = Path(sys.executable).parent
T = TypeVar("T")


def until(true: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
    """What `true` says once that is no longer nothing: polled, with a deadline."""
    ends = time.monotonic() + deadline_s
    while not (found := true()):
        if time.monotonic() > ends:
            raise AssertionError(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.01)
    return found


def pids_in(file: Path, count: int) -> list[int]:
    """The first `count` process numbers that jobs have written into `file`, when they have."""

    def read() -> list[int]:
        found = file.read_text().split() if file.exists() else []
        return [int(pid) for pid in found] if len(found) >= count else []

    return until(read, f"{count} processes have said who they are")


class Said(NamedTuple):
    """What a command said and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Answer(NamedTuple):
    """An HTTP answer; `seconds` from the first byte sent to the last byte read."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def until_told(file: Path, then: str = "exit 0") -> tuple[str, ...]:
    """A command that runs until the test makes `file`, and then does `then`: how fast the machine is changes nothing."""
    return ("sh", "-c", f"while [ ! -e {file} ]; do sleep 0.02; done; {then}")


class ShortLivedClient(Client):
    """Closes its connection when the test drops it, as in `installation.client().nodes()`."""

    def __del__(self) -> None:
        self.close()


def may_fork(env: dict[str, str] | None) -> bool:
    """Variables of Python, the locale or the time zone have an effect only on a fresh process."""
    return all(name.startswith("HODEI_") for name in env or ())


class Installation:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home.parent / "server.log"
        self.address = ""
        self.server: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.faults_expected = False
        self._commands: list[subprocess.Popen[Any]] = []

    def configure(self, toml: str) -> Installation:
        self.home.mkdir(mode=0o700, exist_ok=True)
        (self.home / "config.toml").write_text(toml)
        return self

    def up(self, *args: str, port: int = 0, env: dict[str, str] | None = None) -> Installation:
        """Start a server and wait until it says that it is up."""
        self.start(*args, port=port, env=env)
        self.until_up()
        return self

    def start(self, *args: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        assert self.server is None or self.server.poll() is not None, "it is running already"
        self._began = self.log.stat().st_size if self.log.exists() else 0
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
            said = self.said()
            assert server.poll() is None, f"the server ended with {server.returncode}: {said}"
            found = re.search(r"is up at (\S+)", said)
            return found[1] if found else ""

        self.address = until(is_up, "the server is up")

    def said(self) -> str:
        """What the server of now has said."""
        with self.log.open("rb") as log:
            log.seek(self._began)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """kill -9, and gone when this returns."""
        assert self.server is not None
        self.server.kill()
        self.server.wait(DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.server is not None
        self.server.terminate()
        return self.server.wait(DEADLINE_S)

    def env(self, more: dict[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HODEI_")}
        return {**kept, "HODEI_HOME": str(self.home), **(more or {})}

    def hodei(
        self, *args: str, input: str | bytes = "", env: dict[str, str] | None = None, timeout_s: float = DEADLINE_S
    ) -> Said:
        """The real command line, to its end."""
        data = input.encode() if isinstance(input, str) else input
        if may_fork(env) and "up" not in args:
            code, out, err = fork_server("hodei").run("hodei", [*args], self.env(env), data, timeout_s)
            return Said(code, out.decode(errors="replace"), err.decode(errors="replace"))
        done = subprocess.run(
            [BIN / "hodei", *args], input=data, capture_output=True, env=self.env(env), timeout=timeout_s, check=False
        )
        return Said(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def ok(self, *args: str, input: str = "") -> Said:
        """The same, and it must succeed."""
        said = self.hodei(*args, input=input)
        assert said.code == 0, f"hodei {' '.join(args)}: exit code {said.code}\n{said.out}{said.err}"
        return said

    def begin(self, *args: str) -> subprocess.Popen[bytes]:
        """A command that goes on; its output can be read as it comes."""
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
    ) -> Answer:
        """One bare HTTP request. `token` "" sends none."""
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
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, data, seconds)

    def job(self, id: int) -> JobDetail:
        with self.client() as client:
            return client.job(id)

    def state(self, id: int) -> str:
        return self.job(id).job.state

    def submit(self, *command: str, **fields: Any) -> int:
        with self.client() as client:
            return client.submit({"command": list(command) or ["true"], "cpu": "10m", "memory": "1Mi", **fields}).id

    def until_state(self, id: int, *states: str) -> JobDetail:
        def there() -> JobDetail | None:
            found = self.job(id)
            return found if found.job.state in states else None

        return until(there, f"job {id} is {' or '.join(states)}")

    def ended(self, *ids: int, timeout_s: float = DEADLINE_S) -> list[JobDetail]:
        """All of them, when they have ended."""
        with self.client() as client:
            client.wait(ids, timeout_s)
            return [client.job(id) for id in ids]

    def log_of(self, id: int, stream: str = "stdout", **fields: Any) -> str:
        with self.client() as client:
            return b"".join(client.logs(id, stream=stream, **fields)).decode()

    def works(self) -> None:
        """A plain job still runs."""
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

    def agent_has_left(self) -> bool:
        """Ask it to leave; it may have left by itself since we looked."""
        if agent := self.agent():
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGTERM)
        return not agent

    def kill_agent(self) -> None:
        pid = until(self.agent, "an agent is there")
        os.kill(pid, signal.SIGKILL)
        until(lambda: not alive(pid), "the agent is gone")

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the store from outside."""
        db = sqlite3.connect(f"{(self.home / 'hodei.db').as_uri()}?mode=ro", uri=True, timeout=10)
        try:
            return db.execute(sql, values).fetchall()
        finally:
            db.close()

    def close(self) -> None:
        """Stop all that was started here, each by its own pid; whatever is left then is a fault."""
        for command in self._commands:
            if command.poll() is None:
                command.kill()
            command.communicate()
        if found := read_server_file(self.home):  # one that was started by `hodei up -d`
            _end(found.pid, self.home)
        if self.server is not None and self.server.poll() is None:
            self.server.kill()
            self.server.wait(DEADLINE_S)
        for pid, path in _open_files_below(self.agent_home / "runs"):
            if path.name == "status":  # held by the wrapper of a run, which leads its process group
                _end(pid, self.home, group=True)
        until(self.agent_has_left, "the agent has left")
        until(lambda: not list(_processes_of(self.home)), f"nothing is left of {self.home}", 5)
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        if not self.faults_expected:
            assert "Traceback" not in said, said
        agent_log = self.agent_home / "agent.log"
        agent_output = agent_log.read_text(errors="replace") if agent_log.exists() else ""
        assert "Traceback" not in agent_output, agent_output


def _end(pid: int, home: Path, *, group: bool = False) -> None:
    if alive(pid) and pid in {*_processes_of(home)}:
        with contextlib.suppress(ProcessLookupError):  # it ended since we looked
            (os.killpg if group else os.kill)(pid, signal.SIGKILL)
        until(lambda: not alive(pid), f"process {pid} is gone")


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
    """Processes that were started for this home, or that hold one of its files open."""
    yield from (pid for pid, _ in _open_files_below(home))
    for pid in _pids():
        try:
            if str(home).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and alive(pid):
                yield pid
        except OSError:
            continue
