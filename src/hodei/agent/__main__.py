"""`python -m hodei.agent --home DIR`: lock the home, recover the runs, listen, and exit when the agent is no longer needed.

`python -m hodei.agent join URL` dials out to a server instead, and stays (`outbound`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator

from hodei.agent.journal import Journal, recover
from hodei.agent.limits import Cgroups
from hodei.agent.runs import Runs
from hodei.agent.service import Connection, Service
from hodei.agent.spawn import remove_file
from hodei.process import call_on_stop_signal

ALREADY_RUNNING = 3
SOCKET_PATH_LIMIT = 107


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["join"]:
        from hodei.agent.join import join  # the local agent starts faster without

        return join(words[1:])
    parser = argparse.ArgumentParser(prog="hodei.agent", description="Runs commands on this host for a Hodei server.")
    parser.add_argument("--home", required=True, help="directory for the socket, the journal and the runs' output")
    parser.add_argument("--linger", type=float, default=30, help="seconds to stay without a server and without runs")
    parser.add_argument("--keep-logs", type=float, default=7 * 86_400, help="seconds to keep output of forgotten runs")
    options = parser.parse_args(words)
    home = os.path.realpath(options.home)
    if lock_home(home) is None:
        return ALREADY_RUNNING
    asyncio.run(_serve(home, options.linger, options.keep_logs))
    return 0


def lock_home(home: str) -> int | None:
    """The lock's file descriptor, held until this process ends; None if another agent has it."""
    os.makedirs(f"{home}/runs", mode=0o700, exist_ok=True)
    os.chmod(home, 0o700)
    lock = os.open(f"{home}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another agent already runs for {home}", file=sys.stderr)
        return None
    return lock


@contextlib.contextmanager
def recovered_runs(home: str, linger_s: float | None, keep_logs_s: float) -> Iterator[Service]:
    """The agent without its way to a server. Everything is durable when it ends."""
    journal = Journal(f"{home}/journal")
    cgroups = Cgroups("hodei-" + hashlib.sha256(home.encode()).hexdigest()[:12])
    runs = Runs(home, journal, cgroups, lambda installation, seen: service.publish(installation, seen))
    service = Service(runs, linger_s, keep_logs_s)
    recover(runs)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, runs.reap)
    call_on_stop_signal(service.done.set)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield service
        runs.close()
    finally:
        journal.close()
        if runs.idle:
            cgroups.close()


async def _serve(home: str, linger_s: float, keep_logs_s: float) -> None:
    with recovered_runs(home, linger_s, keep_logs_s) as service:
        listener, path = _listen(home)
        server = await asyncio.get_running_loop().create_unix_server(lambda: Connection(service), sock=listener)
        try:
            await service.tick_until_done()
        finally:
            server.close()
            _remove_socket(home, path)


def _listen(home: str) -> tuple[socket.socket, str]:
    """A socket in the home. If its path is too long for a socket, one in a short private directory, named in `agent.addr`."""
    path, address = f"{home}/agent.sock", f"{home}/agent.addr"
    remove_file(address)
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        path = tempfile.mkdtemp(prefix="hodei-") + "/agent.sock"
    else:
        remove_file(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)  # both directories are private, so no other user can connect before the chmod
    os.chmod(path, 0o600)
    listener.setblocking(False)
    if os.path.dirname(path) != home:
        with open(f"{address}.new", "w") as file:
            file.write(path)
        os.rename(f"{address}.new", address)
    return listener, path


def _remove_socket(home: str, path: str) -> None:
    if os.path.dirname(path) == home:
        remove_file(path)
    else:
        remove_file(f"{home}/agent.addr")
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
