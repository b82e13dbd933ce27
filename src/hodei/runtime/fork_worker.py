"""Work on the state of this very moment, beside the loop: in a forked child, which sees everything as it is and changes
nothing here.

A fork costs the loop a page table (some 20 ms for a gigabyte) and no copy of what waits. The child has a core and an
interpreter of its own, so that the loop does not take turns with it. It touches no file, socket, thread or log of its parent:
it works, writes its answer into a pipe, and is gone.
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
    """At most `places` children at once. Whoever asks what is being waited for already gets that answer too."""

    def __init__(self, places: int, *, nice: int = 0, limit_s: float = 60.0) -> None:
        self._places = asyncio.Semaphore(places)
        self._nice, self._limit_s = nice, limit_s
        self._readers = ThreadPoolExecutor(places, thread_name_prefix="aside")
        self._asked: dict[Hashable, asyncio.Future[Any]] = {}
        self._children: set[int] = set()
        self._changing = threading.Lock()
        self._closed = False

    async def ask(self, work: Callable[[], T], key: Hashable = None) -> T:
        """What `work` returns or raises, done in a child. `key`: those who ask with the same one before the child has begun
        share its answer; None: nobody does."""
        asked = self._asked.get(key) if key is not None else None
        if asked is None:
            asked = asyncio.ensure_future(self._at_its_turn(work, key))
            asked.add_done_callback(_looked_at)
            if key is not None:
                self._asked[key] = asked
        # One who gives up leaves it to the others.
        return await asyncio.shield(asked)

    def at_once(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """The same of this very moment: the child is there when it returns, however many others there are."""
        try:
            pid, read = self._fork(work)
        except Unavailable as error:
            failed: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed
        asked = asyncio.get_running_loop().run_in_executor(self._readers, self._answer, pid, read)
        asked.add_done_callback(_looked_at)
        return asked

    async def _at_its_turn(self, work: Callable[[], T], key: Hashable) -> T:
        try:
            await self._places.acquire()
        finally:
            self._asked.pop(key, None)  # the answer is of the moment of the fork: who comes later asks anew
        try:
            return await self._in_a_child(work)
        finally:
            self._places.release()

    async def _in_a_child(self, work: Callable[[], T]) -> T:
        pid, read = self._fork(work)
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._answer, pid, read)

    def _fork(self, work: Callable[[], object]) -> tuple[int, int]:
        if self._closed:
            raise Unavailable("the server is shutting down", hint="try again when it is back")
        read, write = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read)
            os.close(write)
            raise Unavailable(f"no process can be made to work this out: {error.strerror}", hint="try again") from error
        if pid == 0:
            _work(work, write, self._nice, self._limit_s)
        os.close(write)
        with self._changing:
            self._children.add(pid)
        return pid, read

    def _answer(self, pid: int, read: int) -> Any:
        with os.fdopen(read, "rb") as pipe:
            told = pipe.read()
        with self._changing:
            # From here on it is not killed any more: its number may soon be another's.
            self._children.discard(pid)
        _, status = os.waitpid(pid, 0)
        try:
            done, answer = pickle.loads(told)  # from our own child
        except (EOFError, pickle.UnpicklingError):
            how = "took too long" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "was ended"
            raise Unavailable(f"the process that worked it out {how}", hint="try again, or ask about less") from None
        if not done:
            raise answer
        return answer

    def close(self) -> None:
        """Whoever still waits is told that nothing came of it."""
        self._closed = True
        with self._changing:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)
        self._readers.shutdown(wait=True)


def _looked_at(asked: asyncio.Future[Any]) -> None:
    if not asked.cancelled():
        asked.exception()  # so that nobody is warned of it when all who asked have gone


def _work(work: Callable[[], object], write: int, nice: int, limit_s: float) -> NoReturn:
    """The child's whole life. Nothing here may take a lock that another thread of the parent may have held."""
    told = b""
    try:
        gc.disable()  # a look at all objects would copy all of memory
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        # Connections that the parent closes must not stay open here.
        os.closerange(3, write)
        os.closerange(write + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if nice:
            os.nice(nice)
        told = _told(work)
        while told:
            told = told[os.write(write, told) :]
    finally:
        os._exit(0)


def _told(work: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps((True, work()))
    except HodeiError as error:
        return pickle.dumps((False, error))
    except Exception as error:
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


# ----------------------------------------------------------------------------------------- query queue
# Questions whose answer costs the loop some time: one after another, and never more than half of it.


# What one answer may cost without a rest after it: shorter ones would wait for the timer longer than they take.
_SHORT_S = 0.0005


class QueryQueue:
    def __init__(self) -> None:
        self._waiting: deque[tuple[Hashable, Callable[[], Any]]] = deque()
        self._asked: dict[Hashable, asyncio.Future[Any]] = {}
        self._task: asyncio.Task[None] | None = None

    async def ask(self, key: Hashable, answer: Callable[[], T]) -> T:
        """What `answer` returns or raises, at its turn. `key`: what is asked; equal ones that wait share one answer."""
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = asyncio.get_running_loop().create_future()
            self._waiting.append((key, answer))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._serve())
        # One who gives up leaves it to the others.
        return await asyncio.shield(asked)

    async def _serve(self) -> None:
        while self._waiting:
            key, answer = self._waiting.popleft()
            asked = self._asked.pop(key)
            began = time.thread_time()
            try:
                asked.set_result(answer())
            except Exception as error:
                asked.set_exception(error)
                asked.exception()  # so that nobody is warned of it when all who asked have gone
            spent = time.thread_time() - began
            await asyncio.sleep(spent if spent > _SHORT_S else 0)
