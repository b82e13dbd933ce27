"""Run many seeds on all cores, or one alone. Reports each failure and how to reproduce it."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context

import click
from msgspec import Struct

from hodei.cli.groups import exit_code
from hodei.model.effects import Forget, Start, Stop, WithdrawStop
from hodei.model.facts import JobRestored, JobSubmitted, NodeJoined, RunObserved
from hodei.model.job import JobSpec
from hodei.model.node import Node
from tools.faults.fault_run import FaultRun
from tools.faults.setup import InvariantViolated

_CHUNK = 20
_PROGRESS_EVERY_S = 1.0


class Verdict(Struct, frozen=True):
    """`problem` is empty for a seed that passed."""

    seed: int
    steps: int
    problem: str = ""


def try_seed(seed: int, *, elastic: bool = False) -> Verdict:
    run = FaultRun(seed, elastic=elastic)
    try:
        # Collections take a tenth of the time; the little garbage is collected with the next seed.
        gc.disable()
        run.run()
    except InvariantViolated as error:
        return Verdict(seed, run.step, _report(run, str(error)))
    except Exception:
        return Verdict(seed, run.step, _report(run, traceback.format_exc(limit=-6)))
    finally:
        gc.enable()
    return Verdict(seed, run.step)


def _report(run: FaultRun, problem: str) -> str:
    setup = "calm" if run.setup.calm else ", ".join(sorted(run.setup.odds))
    lines = [f"seed {run.seed}, step {run.step}: {problem}", f"  setup: {setup}", "  the last facts and acts:"]
    lines += [f"  {step:4} {at_ms / 1000:10.3f} s  {describe(what)}" for step, at_ms, what in run.recent]
    elastic = " --elastic" if run.setup.cloud else ""
    return "\n".join([*lines, f"  reproduce: python -m tools.faults --seed {run.seed}{elastic}"])


def describe(what: object) -> str:
    match what:
        case JobSubmitted(job=job):
            return f"submitted job {job.id}: {_spec(job.spec)}"
        case JobRestored(job=job, runs=runs):
            states = " ".join(f"{run.id}:{run.state}" for run in runs)
            return f"restored job {job.id} {job.state} {states}: {_spec(job.spec)}"
        case NodeJoined(node=node):
            return f"node {_node(node)}"
        case RunObserved():
            why = " ".join(part for part in (what.reason_code, what.reason) if part)
            return f"observed {what.run} {what.state} {why}"
        case Start(run=run):
            return f"START {run.id} on {run.node} ({run.backend})"
        case Stop():
            return f"STOP {what.run} ({what.backend}): {what.reason.text}"
        case WithdrawStop():
            return f"WITHDRAW STOP {what.run} ({what.backend})"
        case Forget():
            return f"FORGET {what.run} ({what.backend})"
    return str(what)


def _spec(spec: JobSpec) -> str:
    tasks = ", ".join(f"{task.needed}-{task.count} x {task.request} {task.binding}".strip() for task in spec.tasks)
    parts = [f"{spec.profile} {spec.priority}", tasks, f"estimate {spec.estimate_ms}", spec.restart, str(spec.retries)]
    gang = spec.gang
    parts += [gang.on_failure, "elastic" * gang.elastic, f"assembly {gang.assembly_timeout_ms}", gang.topology]
    return "; ".join(part for part in parts if part)


def _node(node: Node) -> str:
    parts = [f"{node.name} ({node.backend})", str(node.capacity), *map(str, node.taints)]
    return " ".join([*parts, "" if node.ready else "NOT READY", "sockets" if node.sockets else ""]).strip()


def run_seeds(seeds: Sequence[int], jobs: int, max_reports: int = 5, *, elastic: bool = False) -> int:
    """Returns the number of failed seeds; reports the first few."""
    began = reported = time.monotonic()
    done = steps = failed = 0
    with get_context("spawn").Pool(jobs) as pool:
        for verdict in pool.imap_unordered(partial(try_seed, elastic=elastic), seeds, chunksize=_CHUNK):
            done, steps = done + 1, steps + verdict.steps
            if verdict.problem:
                failed += 1
                if failed <= max_reports:
                    print(f"\n{verdict.problem}", flush=True)
            now = time.monotonic()
            if now - reported > _PROGRESS_EVERY_S or done == len(seeds):
                reported = now
                rate = done / max(now - began, 1e-9)
                text = f"{done} of {len(seeds)} seeds, {steps} steps, {failed} failed, {rate:.0f} seeds/s"
                print(text, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return failed


@click.command("python -m tools.faults", help=__doc__)
@click.option("--seeds", type=int, default=1000, show_default=True, help="Number of seeds.")
@click.option("--first", type=int, default=0, show_default=True, help="The first of them.")
@click.option("--seed", type=int, help="Only this seed, in this process.")
@click.option("--jobs", type=int, default=os.cpu_count() or 1, help="Number of processes.")
@click.option("--elastic", is_flag=True, help="One more backend has nodes that are ordered and released.")
def faults(seeds: int, first: int, seed: int | None, jobs: int, elastic: bool) -> int:
    if seed is not None:
        verdict = try_seed(seed, elastic=elastic)
        print(verdict.problem or f"seed {seed}: clean, {verdict.steps} steps")
        return 1 if verdict.problem else 0
    failed = run_seeds(range(first, first + seeds), max(jobs, 1), elastic=elastic)
    print(f"{seeds} seeds from {first}: {failed} failed" if failed else f"{seeds} seeds: all clean")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(faults.main, arguments, "python -m tools.faults")
