"""Jobs are submitted while the batch system hangs or loses responses, or the server is killed with -9: each runs exactly once.

The commands themselves count. HODEI_ROUNDS is the number of rounds; in every second one the server is killed while it submits.
Slurm is real, PBS is the stand-in; time windows and timeouts are short, except in one test.
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
from real.slurm.lossy_proxy import LossyProxy
from slurm_cluster import SlurmCluster, running

pytestmark = [pytest.mark.real, pytest.mark.slow]
JOBS = 5
MANY = pytest.mark.skipif("HODEI_ROUNDS" not in os.environ, reason="takes long: asked for by HODEI_ROUNDS")
# A round hangs for longer than a command waits, and than the window takes.
HANG_S = 8.0


@pytest.fixture(scope="module")
def impatient_slurm(own_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """Its commands time out early. `own_slurm` skips the test if there is no Slurm."""
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
def an_installation_of(
    home: Path, system: dict[str, Any], short: dict[str, float] = QUICK
) -> Iterator[CountingInstallation]:
    installation = CountingInstallation(home, system, short)
    installation.up()
    try:
        yield installation
    finally:
        installation.kill()


def rounds(
    installation: CountingInstallation,
    fault: Any,
    seconds: float = HANG_S,
    count: int = ROUNDS,
    *,
    system_may_cancel: bool = False,
) -> None:
    """`fault`: the fault of the batch system while jobs are submitted."""
    for number in range(count):
        installation.ready()
        with fault():
            began = time.monotonic()
            installation.submit(JOBS)
            installation.until(lambda: installation.journal_has(JOBS), "jobs on their way")
            if number % 2:
                time.sleep(seconds / 4)  # the server dies in the middle of the fault
                installation.kill()
                installation.up()
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))  # how long the fault lasts
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
def test_each_job_runs_once_if_slurm_hangs(impatient_slurm, tmp_path, way, hangs):
    system = slurm(impatient_slurm, transport=way, rest=f"unix:{impatient_slurm.rest_socket}")
    with an_installation_of(tmp_path, system) as installation:
        rounds(installation, lambda: impatient_slurm.hung(hangs), count=max(ROUNDS, 2 if way == "commands" else 1))


@contextlib.contextmanager
def crashing(cluster: SlurmCluster) -> Iterator[None]:
    """Killed with -9 during submissions: it may have accepted and forgotten some."""
    yield
    cluster.kill("slurmctld")
    cluster.start_ctld()
    cluster.wait(lambda: "UP" in cluster._quietly("scontrol", "ping"), "slurmctld")


def test_each_job_runs_once_if_slurmctld_is_killed(impatient_slurm, tmp_path):
    with an_installation_of(tmp_path, slurm(impatient_slurm)) as installation:
        rounds(installation, lambda: crashing(impatient_slurm), 0.2, system_may_cancel=True)


@contextlib.contextmanager
def losing_responses(proxy: LossyProxy) -> Iterator[None]:
    proxy.on, before = True, proxy.lost
    yield
    proxy.on = False
    assert proxy.lost > before, "no answer was lost: this round shows nothing"


def test_each_job_runs_once_if_responses_of_slurmctld_are_lost(impatient_slurm, tmp_path):
    port = impatient_slurm.ports["ctld"]
    with LossyProxy(port, lambda request: b"_hodei_files" in request) as proxy:
        conf = tmp_path / "slurm.conf"
        conf.write_text(
            impatient_slurm.conf.read_text().replace(f"SlurmctldPort={port}", f"SlurmctldPort={proxy.address}")
        )
        for name in ("gres.conf", "cgroup.conf"):
            (tmp_path / name).write_bytes((impatient_slurm.home / name).read_bytes())
        with an_installation_of(tmp_path, slurm(impatient_slurm, conf=str(conf))) as installation:
            rounds(installation, lambda: losing_responses(proxy), 1.0)


def test_each_job_runs_once_if_responses_of_slurmrestd_are_lost(impatient_slurm, tmp_path):
    with contextlib.ExitStack() as stack:
        to, path = str(impatient_slurm.rest_socket), tmp_path / "rest"
        proxy = stack.enter_context(LossyProxy(to, lambda request: request.startswith(b"POST"), path))
        installation = stack.enter_context(
            an_installation_of(tmp_path, slurm(impatient_slurm, transport="rest", rest=proxy.address))
        )
        rounds(installation, lambda: losing_responses(proxy), 1.0)


@contextlib.contextmanager
def existing(path: Path) -> Iterator[None]:
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@pytest.mark.parametrize("fault", ["hung", "cut", pytest.param("down", marks=MANY)])
def test_each_job_runs_once_if_pbs_has_a_fault(tmp_path, fault):
    pbs = PbsStandIn(tmp_path / "pbs")
    # Each command of the stand-in is an interpreter that has to start.
    short = {**QUICK, "command_s": 6.0 if ROUNDS > 1 else 3.0}
    with an_installation_of(tmp_path, {"kind": "pbs", "commands": str(pbs.home)}, short) as installation:
        rounds(installation, lambda: existing(pbs.home / fault), 3.5 * short["command_s"] if fault == "hung" else 1.5)


@MANY
@pytest.mark.parametrize("way", ["commands", "rest"])
def test_each_job_runs_once_if_slurm_hangs_for_40_seconds_with_the_real_time_windows(own_slurm, tmp_path, way):
    system = slurm(own_slurm, transport=way, rest=f"unix:{own_slurm.rest_socket}", poll="2s")
    with an_installation_of(tmp_path, system, {}) as installation:
        rounds(installation, lambda: own_slurm.hung("slurmctld"), 40.0, min(ROUNDS, 4))
