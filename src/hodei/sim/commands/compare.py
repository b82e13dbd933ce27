"""`hodei sim compare TRACE --policies a,b,c`: one workload under several policies, side by side."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import click
import msgspec
from msgspec import Struct

from hodei.cli.output import emit_one, is_for_people, uses_colour
from hodei.model.errors import HodeiError
from hodei.sim.commands.output import Progress, print_notes, staged_directory, staged_file, write_waits
from hodei.sim.commands.simulate import (
    SimulationRequest,
    out_option,
    positive_int,
    prepare,
    request_of,
    run_options,
    simulate,
    waits_option,
)
from hodei.sim.metrics import Result, summary
from hodei.sim.policies import policy
from hodei.sim.report import draw_table, write_report

# Each simulation runs in its own process and reports its progress to the parent, which alone writes to the terminal. One
# that fails or is killed affects no other.


class Failure(Struct, frozen=True):
    message: str


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(requests: Sequence[SimulationRequest], progress: Progress, workers: int) -> list[Result | Failure]:
    """The outcome of each request, in their order. An interrupt ends all processes first."""
    ended: dict[int, Result | Failure] = {}
    waiting = list(enumerate(requests))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                place, request = waiting.pop(0)
                connection, process = _start(request)
                running[connection] = (place, process)
                progress.set_status(place, "reading the trace")
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                place, process = running[ready]
                outcome = _receive(ready, process, place, progress)
                if outcome is not None:
                    ended[place] = outcome
                    del running[ready]
                    ready.close()
                    process.join()
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [ended[place] for place in range(len(requests))]


def _start(request: SimulationRequest) -> tuple[Connection, BaseProcess]:
    # A fresh process instead of a fork: no state of the parent can leak into a result.
    context = get_context("spawn")
    # The first process would otherwise start this helper, which unblocks Ctrl-C.
    resource_tracker.ensure_running()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_in_child, args=(theirs, request), name=request.policy, daemon=True)
    with _defer_interrupt():
        process.start()
    theirs.close()
    return ours, process


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """A process started in this block never receives Ctrl-C. The parent raises it after the block and ends the process."""
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        raise KeyboardInterrupt


def _receive(connection: Connection, process: BaseProcess, place: int, progress: Progress) -> Result | Failure | None:
    try:
        kind, body = connection.recv()
    except EOFError:
        process.join()
        return Failure(f"its process ended unexpectedly ({_describe_exit(process.exitcode)})")
    if kind == "progress":
        progress.update(place, *body)
    elif kind == "begin":
        progress.begin(place)
    elif kind == "failed":
        progress.set_status(place, "failed")
        return Failure(body)
    else:
        progress.set_status(place, "done")
        return msgspec.msgpack.decode(body, type=Result)
    return None


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}; perhaps there was not enough memory" if name == "SIGKILL" else name
    return f"exit code {code}"


def _run_in_child(connection: Connection, request: SimulationRequest) -> None:
    """Ends when the parent is no longer there to receive anything."""
    try:
        try:
            prepared = prepare(request)
            connection.send(("begin", None))
            result = simulate(prepared, lambda *numbers: connection.send(("progress", numbers)))
            connection.send(("result", msgspec.msgpack.encode(result)))
        except BrokenPipeError:
            raise
        except HodeiError as error:
            connection.send(("failed", f"{error.message}{f'; {error.hint}' if error.hint else ''}"))
        except Exception as error:
            shown = traceback.format_exc() if os.environ.get("HODEI_DEBUG") else f"{type(error).__name__}: {error}"
            connection.send(("failed", f"{shown}; this is a bug, HODEI_DEBUG=1 shows where"))
    except BrokenPipeError:
        os._exit(1)


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
@click.option("--workers", type=positive_int, metavar="N", help="Number of parallel runs [default: one for each core].")
def compare(**options: Any) -> int:
    """Run a workload under several policies, and compare how its jobs fared. TRACE: see hodei sim traces."""
    given = SimpleNamespace(**options)
    for name in given.policies:
        policy(name)
    return compare_runs({name: request_of(given, name) for name in given.policies}, given)


def compare_runs(
    requests: Mapping[str, SimulationRequest], given: SimpleNamespace, columns: Sequence[str] | None = None
) -> int:
    """Run the requests, write what `given` asks for, and print the table. `columns`: of the table, by key; None for all."""
    names = list(requests)
    verbose = is_for_people(given.output) and not given.quiet
    progress = Progress(names, sys.stderr, shown=verbose)
    try:
        with staged_directory(given.out) as directory, staged_file(given.waits) as waits:
            # Prepared here too: an error in the input concerns all runs and is reported once.
            prepared = prepare(requests[names[0]])
            ended = run_all(list(requests.values()), progress, given.workers or available_cores())
            results = [each for each in ended if isinstance(each, Result)]
            failures = {n: each for n, each in zip(names, ended, strict=True) if isinstance(each, Failure)}
            if not results:
                name, failure = next(iter(failures.items()))
                raise HodeiError(f"every run failed; {name}: {failure.message}", hint="nothing was written")
            if waits is not None:
                write_waits(waits, results)
            if directory is not None:
                write_report(results, directory)
    except KeyboardInterrupt:
        progress.clear()
        for place, name in enumerate(names):
            print(f"interrupted: {name}: {progress.describe(place)}", file=sys.stderr)
        print("nothing was written", file=sys.stderr)
        return 130
    finally:
        progress.clear()
    if verbose:
        print_notes(prepared.workload.notes, given.out)
    for name, failure in failures.items():
        print(f"error: {name} failed: {failure.message}", file=sys.stderr)
    report = {
        "workload": prepared.workload.name,
        "results": [prepared.for_json(summary(result)) for result in results],
        "failed": {name: failure.message for name, failure in failures.items()},
    }

    def text(_: object) -> str:
        parts = [f"{prepared.workload.name}, {len(prepared.workload.arrivals):,} jobs"]
        parts.append(draw_table(results, colour=uses_colour(), columns=columns).rstrip("\n"))
        return "\n".join([*parts, *([f"report: {given.out / 'index.html'}"] if given.out else [])])

    emit_one(report, given.output, name=lambda _: "\n".join(result.policy for result in results), text=text)
    return 1 if failures else 0
