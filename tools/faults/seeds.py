"""Many seeds on all cores, or one alone: the number that failed, and for each what was wrong and how to see it again."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import get_context

import click
from msgspec import Struct

from hodei.cli.groups import exit_code
from tools.faults.fault_run import FaultRun
from tools.faults.randomness import Wrong
from tools.faults.trace import in_words

_CHUNK = 20
_TOLD_EVERY_S = 1.0


class Verdict(Struct, frozen=True):
    """`wrong` is empty for a seed that ran clean."""

    seed: int
    steps: int
    wrong: str = ""


def try_seed(seed: int) -> Verdict:
    life = FaultRun(seed)
    try:
        # Looking for garbage in rings takes a tenth of the time; the little that there is goes with the next seed.
        gc.disable()
        life.run()
    except Wrong as wrong:
        return Verdict(seed, life.step, _report(life, str(wrong)))
    except Exception:
        return Verdict(seed, life.step, _report(life, traceback.format_exc(limit=-6)))
    finally:
        gc.enable()
    return Verdict(seed, life.step)


def _report(life: FaultRun, wrong: str) -> str:
    scene = "calm" if life.scene.calm else ", ".join(sorted(life.scene.odds))
    lines = [f"seed {life.seed}, step {life.step}: {wrong}", f"  scene: {scene}", "  the last facts and acts:"]
    lines += [f"  {step:4} {at_ms / 1000:10.3f} s  {in_words(what)}" for step, at_ms, what in life.recent]
    return "\n".join([*lines, f"  see it again: python -m tools.faults --seed {life.seed}"])


def run_seeds(seeds: Sequence[int], jobs: int, most_failures: int = 5) -> int:
    """The number of seeds that failed; tells about the first few."""
    began = told = time.monotonic()
    done = steps = failed = 0
    with get_context("spawn").Pool(jobs) as pool:
        for verdict in pool.imap_unordered(try_seed, seeds, chunksize=_CHUNK):
            done, steps = done + 1, steps + verdict.steps
            if verdict.wrong:
                failed += 1
                if failed <= most_failures:
                    print(f"\n{verdict.wrong}", flush=True)
            now = time.monotonic()
            if now - told > _TOLD_EVERY_S or done == len(seeds):
                told = now
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
def faults(seeds: int, first: int, seed: int | None, jobs: int) -> int:
    if seed is not None:
        verdict = try_seed(seed)
        print(verdict.wrong or f"seed {seed}: clean, {verdict.steps} steps")
        return 1 if verdict.wrong else 0
    failed = run_seeds(range(first, first + seeds), max(jobs, 1))
    print(f"{seeds} seeds from {first}: {failed} failed" if failed else f"{seeds} seeds: all clean")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(faults.main, arguments, "python -m tools.faults")
