"""For tests: a proxy in front of a server, which meets chosen HTTP requests with trouble.

It carries bytes between sockets and reads only the first line of what a client sends. Trouble is: something that happens
before the request goes on (`before`), an answer that is cut after the server has acted (`CUT`), a request that goes on
while its client is cut off at once (`ABANDON`), and one that never arrives (`DROP`). It speaks no TLS.
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
_LINE = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE) (\S+) HTTP/1.1\r\n")


class Trouble(NamedTuple):
    """For the next request whose method and path match `what`."""

    what: re.Pattern[str]
    then: str
    before: Callable[[], object]
    after: Callable[[], object]


class _Carried:
    """One connection. `left`: its client has gone."""

    def __init__(self, to_here: asyncio.StreamWriter) -> None:
        self.to_here = to_here
        self.to_there: asyncio.StreamWriter | None = None
        self.answering: asyncio.Future[None] | None = None
        self.trouble: Trouble | None = None
        self.unanswered, self.left = 0, False

    def close(self) -> None:
        if self.answering is not None:
            self.answering.cancel()
        self.to_here.close()
        if self.to_there is not None:
            self.to_there.close()


class Gate:
    """From a unix socket to another, or from a free port of the loopback to a port of it.
    `unanswered`: how many requests the server has not answered yet, whether their clients have gone or not."""

    def __init__(self, *, path: str = "", to_path: str = "", to_port: int = 0) -> None:
        self._path, self._to_path, self._to_port = path, to_path, to_port
        self.port = self.unanswered = 0
        self._lock = threading.Lock()
        self._troubles: list[Trouble] = []
        self.requests: list[str] = []
        self.met, self.left, self.answered = threading.Event(), threading.Event(), threading.Event()
        self._loop = asyncio.new_event_loop()
        up = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(up,), daemon=True)
        self._thread.start()
        assert up.wait(10)

    def expect(
        self,
        what: str,
        then: str = PASS,
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
        also: bool = False,
    ) -> None:
        """`met` is set when such a request has gone on, `left` when its client has gone, `answered` when the server has
        answered it."""
        for event in (self.met, self.left, self.answered):
            event.clear()
        with self._lock:
            expected = Trouble(re.compile(what), then, before, after)
            self._troubles = [*self._troubles, expected] if also else [expected]

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
                server = await asyncio.start_unix_server(self._carry, self._path)
            else:
                server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
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

    async def _carry(self, here: asyncio.StreamReader, to_here: asyncio.StreamWriter) -> None:
        carried = _Carried(to_here)
        try:
            await self._ask(here, carried)
            carried.left = True
            if carried.trouble is not None:
                self.left.set()
            if carried.unanswered and carried.answering is not None:
                await carried.answering  # the server goes on with it, and is listened to
        finally:
            self.unanswered -= carried.unanswered
            carried.close()

    async def _ask(self, here: asyncio.StreamReader, carried: _Carried) -> None:
        with contextlib.suppress(OSError):
            while data := await here.read(1 << 20):
                asked = _LINE.match(data)
                trouble = self._trouble(f"{asked[1].decode()} {asked[2].decode()}") if asked else None
                if trouble is not None:
                    await asyncio.to_thread(trouble.before)
                    if trouble.then == DROP:
                        self.met.set()
                        return
                    carried.trouble = trouble
                if asked:
                    carried.unanswered += 1
                    self.unanswered += 1
                if trouble is not None and carried.to_there is None:
                    self.met.set()  # a server that hangs may not even let us in
                to_there = carried.to_there or await self._reach(carried)
                to_there.write(data)
                await to_there.drain()
                if trouble is not None:
                    self.met.set()
                    if trouble.then == ABANDON:
                        carried.to_here.close()

    async def _reach(self, carried: _Carried) -> asyncio.StreamWriter:
        if self._to_path:
            there, to_there = await asyncio.open_unix_connection(self._to_path)
        else:
            there, to_there = await asyncio.open_connection("127.0.0.1", self._to_port)
        carried.to_there = to_there
        carried.answering = asyncio.ensure_future(self._answer(there, carried))
        return to_there

    async def _answer(self, there: asyncio.StreamReader, carried: _Carried) -> None:
        with contextlib.suppress(OSError):
            while data := await there.read(1 << 20):
                if data.startswith(b"HTTP/1.1 ") and carried.unanswered:
                    carried.unanswered -= 1
                    self.unanswered -= 1
                trouble, carried.trouble = carried.trouble, None
                if trouble is not None:
                    self.answered.set()
                    if trouble.then == CUT:
                        await asyncio.to_thread(trouble.after)
                        break
                if carried.left and not carried.unanswered:
                    break
                if not carried.left:
                    carried.to_here.write(data)
                    await carried.to_here.drain()
        carried.to_here.close()

    def _trouble(self, line: str) -> Trouble | None:
        with self._lock:
            self.requests.append(line)
            trouble = next((one for one in self._troubles if one.what.search(line)), None)
            if trouble is not None:
                self._troubles.remove(trouble)
            return trouble


def freeze(pid: int) -> None:
    """SIGSTOP, and every thread stands still when this returns: on a busy machine some run on for a while."""
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
