"""Jobs are handed in while the system hangs, loses its answers, or the server is killed with -9: each runs, and none runs twice.

Counted by what the commands themselves wrote. HODEI_ROUNDS says how often; in every second round the server is killed while the
jobs are on their way. Slurm is real, PBS is its stand-in, and windows and timeouts are short, but for one test.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_backends import PbsStandIn
from real.slurm.counting_installation import QUICK, ROUNDS, CountingInstallation
from real.slurm.cutter import Cutter
from slurm_cluster import SlurmCluster, running

pytestmark = [pytest.mark.real, pytest.mark.slow]
JOBS = 5
MANY = pytest.mark.skipif("HODEI_ROUNDS" not in os.environ, reason="takes long: asked for by HODEI_ROUNDS")
# A round hangs for longer than a command waits, and than the window takes.
HANG_S = 8.0


@pytest.fixture(scope="module")
def hasty_slurm(own_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """Its commands give up early. (`own_slurm` is there to skip where there is no Slurm.)"""
    with running("MessageTimeout=1") as cluster:
        yield cluster


def slurm(cluster: SlurmCluster, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "slurm",
        "conf": str(cluster.conf),
        "mode": "delegate",
        "partitions": ["main"],
        "poll": "200ms",
        **fields,
    }


@contextlib.contextmanager
def a_house(home: Path, system: dict[str, Any], short: dict[str, float] = QUICK) -> Iterator[CountingInstallation]:
    installation = CountingInstallation(home, system, short)
    installation.up()
    try:
        yield installation
    finally:
        installation.kill()


def rounds(
    installation: CountingInstallation,
    trouble: Any,
    seconds: float = HANG_S,
    count: int = ROUNDS,
    *,
    system_may_cancel: bool = False,
) -> None:
    """`trouble`: what the system suffers from while jobs are handed in."""
    for number in range(count):
        installation.ready()
        with trouble():
            began = time.monotonic()
            installation.submit(JOBS)
            installation.until(lambda: installation.journal_says(JOBS), "jobs on their way")
            if number % 2:
                time.sleep(seconds / 4)  # the server dies in the middle of the trouble
                installation.kill()
                installation.up()
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))  # how long the trouble lasts
        installation.settle()
        installation.check(system_may_cancel=system_may_cancel)
        print(
            f"round {number + 1}: {sum(installation.executions().values())} executions of {installation.submitted} jobs",
            flush=True,
        )


@pytest.mark.parametrize(
    ("way", "hangs"),
    [("commands", "slurmctld"), pytest.param("rest", "slurmctld", marks=MANY), ("rest", "restd")],
    ids=lambda word: word,
)
def test_a_slurm_that_hangs_runs_each_job_once(hasty_slurm, tmp_path, way, hangs):
    system = slurm(hasty_slurm, transport=way, rest=f"unix:{hasty_slurm.rest_socket}")
    with a_house(tmp_path, system) as installation:
        rounds(installation, lambda: hasty_slurm.hung(hangs), count=max(ROUNDS, 2 if way == "commands" else 1))


@contextlib.contextmanager
def crashing(cluster: SlurmCluster) -> Iterator[None]:
    """Killed with -9 while jobs come in: it may have accepted some, and forgotten them."""
    yield
    cluster.kill("slurmctld")
    cluster.start_ctld()
    cluster.wait(lambda: "UP" in cluster._quietly("scontrol", "ping"), "slurmctld")


def test_a_slurmctld_that_is_killed_runs_each_job_once(hasty_slurm, tmp_path):
    with a_house(tmp_path, slurm(hasty_slurm)) as installation:
        rounds(installation, lambda: crashing(hasty_slurm), 0.2, system_may_cancel=True)


@contextlib.contextmanager
def cutting(cutter: Cutter) -> Iterator[None]:
    cutter.on, before = True, cutter.lost
    yield
    cutter.on = False
    assert cutter.lost > before, "no answer was lost: this round shows nothing"


def test_an_answer_of_slurmctld_that_is_lost_on_the_way_runs_each_job_once(hasty_slurm, tmp_path):
    port = hasty_slurm.ports["ctld"]
    with Cutter(port, lambda request: b"_hodei_files" in request) as cutter:
        conf = tmp_path / "slurm.conf"
        conf.write_text(
            hasty_slurm.conf.read_text().replace(f"SlurmctldPort={port}", f"SlurmctldPort={cutter.address}")
        )
        for name in ("gres.conf", "cgroup.conf"):
            (tmp_path / name).write_bytes((hasty_slurm.home / name).read_bytes())
        with a_house(tmp_path, slurm(hasty_slurm, conf=str(conf))) as installation:
            rounds(installation, lambda: cutting(cutter), 1.0)


def test_an_answer_of_slurmrestd_that_is_lost_on_the_way_runs_each_job_once(hasty_slurm, tmp_path):
    with contextlib.ExitStack() as stack:
        to, path = str(hasty_slurm.rest_socket), tmp_path / "rest"
        cutter = stack.enter_context(Cutter(to, lambda request: request.startswith(b"POST"), path))
        installation = stack.enter_context(a_house(tmp_path, slurm(hasty_slurm, transport="rest", rest=cutter.address)))
        rounds(installation, lambda: cutting(cutter), 1.0)


@contextlib.contextmanager
def having(path: Path) -> Iterator[None]:
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@pytest.mark.parametrize("trouble", ["hung", "cut", pytest.param("down", marks=MANY)])
def test_a_pbs_in_trouble_runs_each_job_once(tmp_path, trouble):
    pbs = PbsStandIn(tmp_path / "pbs")
    # Each command of the stand-in is an interpreter that has to start.
    short = {**QUICK, "command_s": 6.0 if ROUNDS > 1 else 3.0}
    with a_house(tmp_path, {"kind": "pbs", "commands": str(pbs.home)}, short) as installation:
        rounds(installation, lambda: having(pbs.home / trouble), 3.5 * short["command_s"] if trouble == "hung" else 1.5)


@MANY
@pytest.mark.parametrize("way", ["commands", "rest"])
def test_a_slurm_that_hangs_for_40_seconds_runs_each_job_once_with_the_windows_of_real_life(own_slurm, tmp_path, way):
    system = slurm(own_slurm, transport=way, rest=f"unix:{own_slurm.rest_socket}", poll="2s")
    with a_house(tmp_path, system, {}) as installation:
        rounds(installation, lambda: own_slurm.hung("slurmctld"), 40.0, min(ROUNDS, 4))
