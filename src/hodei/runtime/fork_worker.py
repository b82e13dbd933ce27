"""Expensive queries: in a forked child on a snapshot of the state (`ForkWorker`), or on the loop in turns (`QueryQueue`).

A fork costs the loop a page table (some 20 ms for a gigabyte) and copies no state. The child has its own interpreter, so
it does not compete with the loop. It touches no file, socket, thread or log of its parent: it computes, writes the answer
into a pipe, and exits.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import pickle
import resource
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from hodei.model.errors import HodeiError, Unavailable

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ForkWorker:
    """At most `max_children` at once. Equal queries that wait share one answer."""

    def __init__(self, max_children: int, *, nice: int = 0, limit_s: float = 60.0) -> None:
        self._slots = asyncio.Semaphore(max_children)
        self._nice, self._limit_s = nice, limit_s
        self._readers = ThreadPoolExecutor(max_children, thread_name_prefix="fork-worker")
        self._waiting: dict[Hashable, asyncio.Future[Any]] = {}
        self._children: set[int] = set()
        self._children_lock = threading.Lock()
        self._closed = False

    async def run(self, work: Callable[[], T], key: Hashable = None) -> T:
        """What `work` returns or raises in a child. Calls with the same `key` that wait for a child share its answer."""
        answer = self._waiting.get(key) if key is not None else None
        if answer is None:
            answer = asyncio.ensure_future(self._run_in_turn(work, key))
            answer.add_done_callback(_retrieve_exception)
            if key is not None:
                self._waiting[key] = answer
        # A caller that is cancelled leaves the answer to the others.
        return await asyncio.shield(answer)

    def run_now(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Forks before it returns, whatever the limit on children, so that the child sees the state of this moment."""
        loop = asyncio.get_running_loop()
        try:
            pid, read = self._fork(work)
        except Unavailable as error:
            failed: asyncio.Future[T] = loop.create_future()
            failed.set_exception(error)
            return failed
        answer = loop.run_in_executor(self._readers, self._read_answer, pid, read)
        answer.add_done_callback(_retrieve_exception)
        return answer

    async def _run_in_turn(self, work: Callable[[], T], key: Hashable) -> T:
        try:
            await self._slots.acquire()
        finally:
            self._waiting.pop(key, None)  # the answer is that of the fork: later calls need a new one
        try:
            return await self.run_now(work)
        finally:
            self._slots.release()

    def _fork(self, work: Callable[[], object]) -> tuple[int, int]:
        if self._closed:
            raise Unavailable("the server is shutting down", hint="try again when it is back")
        read, write = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read)
            os.close(write)
            raise Unavailable(f"cannot start a process for this query: {error.strerror}", hint="try again") from error
        if pid == 0:
            _run_child(work, write, self._nice, self._limit_s)
        os.close(write)
        with self._children_lock:
            self._children.add(pid)
        return pid, read

    def _read_answer(self, pid: int, read: int) -> Any:
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        with self._children_lock:
            # From here on `close` does not kill it: its pid may be reused.
            self._children.discard(pid)
        _, status = os.waitpid(pid, 0)
        try:
            ok, answer = pickle.loads(data)  # from our own child
        except (EOFError, pickle.UnpicklingError):
            how = "took too long" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "was killed"
            raise Unavailable(f"the process for this query {how}", hint="try again, or ask about less") from None
        if not ok:
            raise answer
        return answer

    def close(self) -> None:
        """Kills the children; calls that still wait fail."""
        self._closed = True
        with self._children_lock:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)
        self._readers.shutdown(wait=True)


def _retrieve_exception(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()  # avoids a warning if all callers were cancelled


def _run_child(work: Callable[[], object], write: int, nice: int, limit_s: float) -> NoReturn:
    """Nothing here may take a lock that another thread of the parent may have held at the fork."""
    try:
        gc.disable()  # a collection would write to, and so copy, all memory
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        # Connections that the parent closes must not stay open in the child.
        os.closerange(3, write)
        os.closerange(write + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if nice:
            os.nice(nice)
        answer = _pickled_answer(work)
        while answer:
            answer = answer[os.write(write, answer) :]
    finally:
        os._exit(0)


def _pickled_answer(work: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps((True, work()))
    except HodeiError as error:
        return pickle.dumps((False, error))
    except Exception as error:
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


# Work shorter than this is not followed by a pause: the timer would take longer.
_SHORT_S = 0.0005


class QueryQueue:
    """Runs queries on the loop, one after another, and leaves it at least half of the time."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Hashable, Callable[[], Any]]] = deque()
        self._answers: dict[Hashable, asyncio.Future[Any]] = {}
        self._task: asyncio.Task[None] | None = None

    async def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Calls with the same `key` that wait share one answer."""
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = asyncio.get_running_loop().create_future()
            self._queue.append((key, work))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._serve())
        # A caller that is cancelled leaves the answer to the others.
        return await asyncio.shield(answer)

    async def _serve(self) -> None:
        while self._queue:
            key, work = self._queue.popleft()
            answer = self._answers.pop(key)
            began = time.thread_time()
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)
                _retrieve_exception(answer)
            spent = time.thread_time() - began
            await asyncio.sleep(spent if spent > _SHORT_S else 0)
