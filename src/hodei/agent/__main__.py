"""`python -m hodei.agent --home DIR`: take the lock, find our runs again, open the door, stay until nobody needs us."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import sys
import tempfile

from hodei.agent.journal import Journal
from hodei.agent.limits import Fences
from hodei.agent.recovery import recover
from hodei.agent.run import Observation
from hodei.agent.runs import Runs
from hodei.agent.service import Connection, Service

ALREADY_RUNNING = 3
SOCKET_PATH_LIMIT = 107


def main() -> int:
    parser = argparse.ArgumentParser(prog="hodei.agent", description="Runs commands on this host for a Hodei server.")
    parser.add_argument("--home", required=True, help="directory for the socket, the journal and the runs' output")
    parser.add_argument("--linger", type=float, default=30, help="seconds to stay without a server and without runs")
    parser.add_argument("--keep-logs", type=float, default=7 * 86_400, help="seconds to keep output of forgotten runs")
    options = parser.parse_args()
    home = os.path.realpath(options.home)
    os.makedirs(f"{home}/runs", mode=0o700, exist_ok=True)
    os.chmod(home, 0o700)
    lock = os.open(f"{home}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another agent is at home in {home}", file=sys.stderr)
        return ALREADY_RUNNING
    asyncio.run(_serve(home, options.linger, options.keep_logs))
    return 0


async def _serve(home: str, linger_s: float, keep_logs_s: float) -> None:
    loop = asyncio.get_running_loop()
    journal = Journal(f"{home}/journal")
    fences = Fences("hodei-" + hashlib.sha256(home.encode()).hexdigest()[:12])

    def tell(installation: str, observations: list[Observation]) -> None:
        service.tell(installation, observations)

    runs = Runs(home, journal, fences, tell)
    service = Service(runs, linger_s, keep_logs_s)
    recover(runs)
    loop.add_signal_handler(signal.SIGCHLD, runs.reap)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.done.set)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    door, path = _open_door(home)
    server = await loop.create_unix_server(lambda: Connection(service), sock=door)
    try:
        await service.tick_until_done()
        runs.leave()
    finally:
        server.close()
        _close_door(home, path)
        journal.close()
        if runs.idle:
            fences.close()


def _open_door(home: str) -> tuple[socket.socket, str]:
    """A socket at home; in a short private directory if the path is too long for one, with its address at home."""
    path, address = f"{home}/agent.sock", f"{home}/agent.addr"
    _remove(address)
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        path = tempfile.mkdtemp(prefix="hodei-") + "/agent.sock"
    else:
        _remove(path)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(path)  # both directories are closed to others, so there is no moment in which others could come in
    os.chmod(path, 0o600)
    door.setblocking(False)
    if os.path.dirname(path) != home:
        with open(f"{address}.new", "w") as file:
            file.write(path)
        os.rename(f"{address}.new", address)
    return door, path


def _close_door(home: str, path: str) -> None:
    if os.path.dirname(path) == home:
        _remove(path)
    else:
        _remove(f"{home}/agent.addr")
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


if __name__ == "__main__":
    sys.exit(main())
