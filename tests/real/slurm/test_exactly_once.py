"""Jobs are submitted while the batch system hangs or loses responses, or the server is killed with -9: each runs exactly once.

The commands count their executions. HODEI_ROUNDS is the number of rounds; in every second one the server is killed while it
submits. Slurm is real, PBS is the stand-in; time windows and timeouts are short, except in one test.
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
from real.installation import until
from real.slurm.counting_installation import QUICK, ROUNDS, CountingInstallation
from real.slurm.lossy_proxy import LossyProxy
from slurm_cluster import SlurmCluster, running

pytestmark = [pytest.mark.real, pytest.mark.slow]
JOBS = 5
MANY = pytest.mark.skipif("HODEI_ROUNDS" not in os.environ, reason="takes long; set HODEI_ROUNDS to run it")


def hang_s(windows: dict[str, float]) -> float:
    """A hang in which a submission and a query time out and the confirmation window passes."""
    return 2 * windows["command_s"] + windows["window_s"] + 1


@pytest.fixture(scope="module")
def quick_slurm(own_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """A Slurm whose commands time out early. `own_slurm` skips the test if there is no Slurm."""
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
def counting_installation(
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
    seconds: float = hang_s(QUICK),
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
            installation.until(lambda: installation.journal_has(JOBS), "journalled jobs")
            if number % 2:
                time.sleep(seconds / 4)  # the server is killed in the middle of the fault
                installation.kill()
                installation.up()
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))  # the rest of the fault
        installation.settle()
        installation.check(system_may_cancel=system_may_cancel)
        print(
            f"round {number + 1}: {sum(installation.executions().values())} executions of {installation.submitted} jobs",
            flush=True,
        )


@pytest.mark.parametrize(
    ("transport", "daemon"),
    [("commands", "slurmctld"), pytest.param("rest", "slurmctld", marks=MANY), ("rest", "restd")],
    ids=str,
)
def test_each_job_runs_once_if_slurm_hangs(quick_slurm, tmp_path, transport, daemon):
    system = slurm(quick_slurm, transport=transport, rest=f"unix:{quick_slurm.rest_socket}")
    with counting_installation(tmp_path, system) as installation:
        rounds(installation, lambda: quick_slurm.hung(daemon), count=max(ROUNDS, 2 if transport == "commands" else 1))


@contextlib.contextmanager
def crashing(cluster: SlurmCluster) -> Iterator[None]:
    """slurmctld is killed with -9 after submissions, and may forget accepted ones."""
    yield
    cluster.kill("slurmctld")
    cluster.start_ctld()
    cluster.wait(lambda: "UP" in cluster._quietly("scontrol", "ping"), "slurmctld")


def test_each_job_runs_once_if_slurmctld_is_killed(quick_slurm, tmp_path):
    with counting_installation(tmp_path, slurm(quick_slurm)) as installation:
        rounds(installation, lambda: crashing(quick_slurm), 0.2, system_may_cancel=True)


@contextlib.contextmanager
def losing_responses(proxy: LossyProxy) -> Iterator[None]:
    proxy.on, before = True, proxy.lost
    yield
    until(lambda: proxy.lost > before, "a lost response")
    proxy.on = False


def test_each_job_runs_once_if_responses_of_slurmctld_are_lost(quick_slurm, tmp_path):
    port = quick_slurm.ports["ctld"]
    with LossyProxy(port, lambda request: b"_hodei_files" in request) as proxy:
        conf = tmp_path / "slurm.conf"
        conf.write_text(quick_slurm.conf.read_text().replace(f"SlurmctldPort={port}", f"SlurmctldPort={proxy.address}"))
        for name in ("gres.conf", "cgroup.conf"):
            (tmp_path / name).write_bytes((quick_slurm.home / name).read_bytes())
        with counting_installation(tmp_path, slurm(quick_slurm, conf=str(conf))) as installation:
            rounds(installation, lambda: losing_responses(proxy), 0)


def test_each_job_runs_once_if_responses_of_slurmrestd_are_lost(quick_slurm, tmp_path):
    with contextlib.ExitStack() as stack:
        to, path = str(quick_slurm.rest_socket), tmp_path / "rest"
        proxy = stack.enter_context(LossyProxy(to, lambda request: request.startswith(b"POST"), path))
        installation = stack.enter_context(
            counting_installation(tmp_path, slurm(quick_slurm, transport="rest", rest=proxy.address))
        )
        rounds(installation, lambda: losing_responses(proxy), 0)


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
    # Each command of the stand-in is an interpreter that must start.
    short = {**QUICK, "command_s": 6.0 if ROUNDS > 1 else 3.0}
    with counting_installation(tmp_path, {"kind": "pbs", "commands": str(pbs.home)}, short) as installation:
        rounds(installation, lambda: existing(pbs.home / fault), hang_s(short) if fault == "hung" else 1.5)


@MANY
@pytest.mark.parametrize("transport", ["commands", "rest"])
def test_each_job_runs_once_if_slurm_hangs_for_40_seconds_with_the_real_time_windows(own_slurm, tmp_path, transport):
    system = slurm(own_slurm, transport=transport, rest=f"unix:{own_slurm.rest_socket}", poll="2s")
    with counting_installation(tmp_path, system, {}) as installation:
        rounds(installation, lambda: own_slurm.hung("slurmctld"), 40.0, min(ROUNDS, 4))
