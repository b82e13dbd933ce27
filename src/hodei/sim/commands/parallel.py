"""Several runs at once, each in a process of its own. They report how far they are through the parent, which alone writes
to the terminal; one that fails, or is killed, takes no other with it."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import msgspec
from msgspec import Struct

from hodei.model.errors import HodeiError
from hodei.sim.commands.progress import Progress
from hodei.sim.commands.simulate import Order, prepare, simulate
from hodei.sim.results import Result


class Failure(Struct, frozen=True):
    what: str


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(orders: Sequence[Order], progress: Progress, workers: int) -> list[Result | Failure]:
    """What became of each order, in their order. If this is interrupted all processes are ended first."""
    ended: dict[int, Result | Failure] = {}
    waiting = list(enumerate(orders))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                place, order = waiting.pop(0)
                ours, process = _start(order)
                running[ours] = (place, process)
                progress.say(place, "reads the trace")
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                place, process = running[ready]
                outcome = _heard(ready, process, place, progress)
                if outcome is not None:
                    ended[place] = outcome
                    del running[ready]
                    ready.close()
                    process.join()
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [ended[place] for place in range(len(orders))]


def _start(order: Order) -> tuple[Connection, BaseProcess]:
    # A fresh process rather than a copy of this one: nothing of the parent's state can leak into a result.
    context = get_context("spawn")
    # The first process would start this helper on its way, and starting it lets Ctrl-C through again.
    resource_tracker.ensure_running()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, order), name=order.policy, daemon=True)
    with _ctrl_c_is_ours():
        process.start()
    theirs.close()
    return ours, process


@contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    """A process that is started in here never hears of Ctrl-C: the parent does, and ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heard(ours: Connection, process: BaseProcess, place: int, progress: Progress) -> Result | Failure | None:
    try:
        kind, said = ours.recv()
    except EOFError:
        process.join()
        return Failure(f"its process ended unexpectedly ({_why_ended(process.exitcode)})")
    if kind == "tell":
        progress.tell(place, *said)
    elif kind == "begin":
        progress.begin(place)
    elif kind == "failed":
        progress.say(place, "failed")
        return Failure(said)
    else:
        progress.say(place, "done")
        return msgspec.msgpack.decode(said, type=Result)
    return None


def _why_ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}; perhaps there was not enough memory" if name == "SIGKILL" else name
    return f"exit code {code}"


def _work(theirs: Connection, order: Order) -> None:
    """In the child. A parent that has gone is noticed when it is told something."""
    try:
        try:
            prepared = prepare(order)
            theirs.send(("begin", None))
            result = simulate(prepared, lambda now_ms, done, jobs: theirs.send(("tell", (now_ms, done, jobs))))
            theirs.send(("result", msgspec.msgpack.encode(result)))
        except BrokenPipeError:
            raise
        except HodeiError as error:
            theirs.send(("failed", f"{error.message}{f'; {error.hint}' if error.hint else ''}"))
        except Exception as error:
            shown = traceback.format_exc() if os.environ.get("HODEI_DEBUG") else f"{type(error).__name__}: {error}"
            theirs.send(("failed", f"{shown}; this is a bug, HODEI_DEBUG=1 says where"))
    except BrokenPipeError:
        os._exit(1)
