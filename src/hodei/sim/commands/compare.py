"""`hodei sim compare TRACE --policies a,b,c`: one workload under several policies, side by side."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import click
import msgspec
from msgspec import Struct

from hodei.model.errors import HodeiError
from hodei.sim.commands.outputs import file_for, folder_for, write_waits
from hodei.sim.commands.progress import Progress
from hodei.sim.commands.replay import tell_notes
from hodei.sim.commands.simulate import (
    Order,
    numbers_for_json,
    order_of,
    out_option,
    prepare,
    run_options,
    simulate,
    waits_option,
    whole,
)
from hodei.sim.metrics import Result, summary
from hodei.sim.policies import policy
from hodei.sim.report import draw_table, write_report

# -------------------------------------------------------------------------------------------- parallel
# Several runs at once, each in a process of its own. They report how far they are through the parent, which alone
# writes to the terminal; one that fails, or is killed, takes no other with it.


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
    """A process that is started in here never gets Ctrl-C: the parent does, when the start is complete, and ends it."""
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if heard:
        raise KeyboardInterrupt


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


# ----------------------------------------------------------------------------------------------------


def policy_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise click.BadParameter("name at least one policy")
    if len(set(names)) < len(names):
        raise click.BadParameter("a policy is named twice")
    return names


@click.command()
@run_options
@click.option("--policies", required=True, type=policy_names, metavar="A,B,C", help="See: hodei sim policies.")
@out_option
@waits_option
@click.option("--workers", type=whole, metavar="N", help="Number of parallel runs [default: one for each core].")
def compare(**options: Any) -> int:
    """Run a workload under several policies, and compare how its jobs fared. TRACE: see hodei sim traces."""
    given = SimpleNamespace(**options)
    for name in given.policies:
        policy(name)
    progress = Progress(given.policies, sys.stderr, shown=not (given.json or given.quiet))
    try:
        with folder_for(given.out) as folder, file_for(given.waits) as waits:
            # Read here too: what is wrong with the trace is wrong for all policies, and told once.
            prepared = prepare(order_of(given, given.policies[0]))
            orders = [order_of(given, name) for name in given.policies]
            ended = run_all(orders, progress, given.workers or cores())
            results = [each for each in ended if isinstance(each, Result)]
            failures = {n: each for n, each in zip(given.policies, ended, strict=True) if isinstance(each, Failure)}
            if not results:
                name, failure = next(iter(failures.items()))
                raise HodeiError(f"every policy failed; {name}: {failure.what}", hint="nothing was written")
            if waits is not None:
                write_waits(waits, results)
            if folder is not None:
                write_report(results, folder)
    except KeyboardInterrupt:
        progress.clear()
        for place, name in enumerate(given.policies):
            print(f"interrupted: {name}: {progress.how_far(place)}", file=sys.stderr)
        print("nothing was written", file=sys.stderr)
        return 130
    finally:
        progress.clear()
    if not given.quiet and not given.json:
        tell_notes(prepared.workload.notes, given.out)
    for name, failure in failures.items():
        print(f"error: {name} failed: {failure.what}", file=sys.stderr)
    if given.json:
        told = {
            "workload": prepared.workload.name,
            "results": [numbers_for_json(summary(result), prepared) for result in results],
            "failed": {name: failure.what for name, failure in failures.items()},
        }
        print(json.dumps(told))
    else:
        print(f"{prepared.workload.name}, {len(prepared.workload.arrivals):,} jobs")
        print(draw_table(results, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")), end="")
        if given.out:
            print(f"report: {given.out / 'index.html'}")
    return 1 if failures else 0
