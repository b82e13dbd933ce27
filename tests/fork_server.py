"""Real `hodei` processes that start in a tenth of the time, as forks of a process that has imported everything.

A fork does not show that a fresh interpreter imports what it needs, or that nothing depends on the hash seed. So tests start
fresh processes for restarted servers, for commands with variables other than HODEI_*, and for `hodei up -d`, and servers
and commands are forks of two processes with different hash seeds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pickle
import pkgutil
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_NUMBER = struct.Struct("i")
# A server imports these only when it starts to serve.
_LAZY = (
    "uvicorn.lifespan.off",
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.httptools_impl",
)
_MAINS: dict[str, Callable[[], object]] = {}


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: int, args: list[str]) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            data = os.read(self._status, _NUMBER.size)
            os.close(self._status)
            assert data, "the fork server has ended"
            self.returncode = os.waitstatus_to_exitcode(*_NUMBER.unpack(data))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # The fork server may have reaped it meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    def __init__(self, program: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # Forks keep this command line, and `hodei down` recognises a server by the module name in it.
            command = [sys.executable, __file__, str(theirs.fileno()), f"hodei.{program}"]
            # In another session, so that Ctrl-C ends the tests but not the processes that they still have to stop.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
            )
        atexit.register(self._close)

    def start(
        self,
        program: str,
        args: list[str],
        env: dict[str, str],
        files: tuple[int, int, int],
        *,
        new_session: bool = False,
    ) -> ForkedProcess:
        """`program` is "hodei" or "server"; `files` become its stdin, stdout and stderr."""
        ours, theirs = os.pipe()
        request = pickle.dumps((program, args, env, os.getcwd(), new_session))
        try:
            socket.send_fds(self._socket, [_NUMBER.pack(len(request))], [*files, theirs])
        except BrokenPipeError:
            os.close(ours)
            raise AssertionError(f"{self._process.args} has ended: see its error in the first test of it") from None
        finally:
            os.close(theirs)
        self._socket.sendall(request)
        (pid,) = _NUMBER.unpack(os.read(ours, _NUMBER.size))
        return ForkedProcess(pid, ours, [program, *args])

    def run(
        self, program: str, args: list[str], env: dict[str, str], data: bytes, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """The exit code, stdout and stderr of a command that gets `data` on stdin."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(os.fdopen(os.memfd_create("stdio"), "w+b")) for _ in range(3)]
            files[0].write(data)
            files[0].seek(0)
            stdin, stdout, stderr = files
            command = self.start(program, args, env, (stdin.fileno(), stdout.fileno(), stderr.fileno()))
            try:
                code = command.wait(timeout_s)
            except subprocess.TimeoutExpired:
                command.kill()
                command.wait()
                raise
            stdout.seek(0)
            stderr.seek(0)
            return code, stdout.read(), stderr.read()

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def fork_server(program: str) -> ForkServer:
    """The fork server of this test process for `program`."""
    return ForkServer(program)


def _serve(connection: socket.socket) -> None:
    """Fork on request, and report the pid and later the exit status of each fork, until the connection is closed."""
    children: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    size, files, _, _ = socket.recv_fds(connection, _NUMBER.size, 4)
                    if not size:
                        return
                    request = pickle.loads(_read(connection, *_NUMBER.unpack(size)))
                    pid = os.fork()
                    if pid == 0:
                        selector.close()
                        connection.close()
                        os.close(files.pop())
                        _run(request, files)
                    for file in files[:3]:
                        os.close(file)
                    os.write(files[3], _NUMBER.pack(pid))
                    watched = os.pidfd_open(pid)
                    children[watched] = pid, files[3]
                    selector.register(watched, selectors.EVENT_READ)
                else:
                    watched = key.fd
                    selector.unregister(watched)
                    os.close(watched)
                    pid, report = children.pop(watched)
                    with contextlib.suppress(BrokenPipeError):
                        os.write(report, _NUMBER.pack(os.waitpid(pid, 0)[1]))
                    os.close(report)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def _run(request: tuple[str, list[str], dict[str, str], str, bool], files: list[int]) -> None:
    """Run the program in this fork; ends with SystemExit."""
    program, args, env, directory, new_session = request
    for fd, file in enumerate(files):
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    if new_session:
        os.setsid()
    sys.argv = [str(Path(sys.executable).with_name("hodei")), *args]
    sys.exit(_MAINS[program]())


def _preload() -> None:
    import hodei

    for module in pkgutil.walk_packages(hodei.__path__, "hodei."):
        if not module.name.endswith("__main__") and "testing" not in module.name and "pytest" not in module.name:
            importlib.import_module(module.name)
    for name in _LAZY:
        importlib.import_module(name)
    _MAINS["hodei"] = importlib.import_module("hodei.cli.main").main
    _MAINS["server"] = importlib.import_module("hodei.server.__main__").main
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    _preload()
    _serve(requests)
