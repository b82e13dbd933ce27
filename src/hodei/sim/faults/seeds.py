"""Many seeds on all cores, or one alone: the number that failed, and for each what was wrong and how to see it again."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import get_context

from msgspec import Struct

from hodei.sim.faults.fault_run import FaultRun
from hodei.sim.faults.randomness import Wrong
from hodei.sim.faults.trace import in_words

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
    return "\n".join([*lines, f"  see it again: python -m hodei.sim.faults --seed {life.seed}"])


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hodei.sim.faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone, in this process")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        verdict = try_seed(given.seed)
        print(verdict.wrong or f"seed {given.seed}: clean, {verdict.steps} steps")
        return 1 if verdict.wrong else 0
    failed = run_seeds(range(given.first, given.first + given.seeds), max(given.jobs, 1))
    print(f"{given.seeds} seeds from {given.first}: {failed} failed" if failed else f"{given.seeds} seeds: all clean")
    return 1 if failed else 0
