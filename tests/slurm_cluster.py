"""A real Slurm on this machine, in one directory and on loopback: munged, slurmctld, four slurmd with more cores than the
machine has, and slurmrestd twice (unix socket as the caller, TCP with tokens).

It does not cover networks, shared file systems, other accounts, or real GPUs (these are copies of /dev/null).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ports import free_port

NODES = {
    "n1": "CPUs=4 RealMemory=4000 Gres=gpu:a100:2 Feature=gpu,fast",
    "n2": "CPUs=4 RealMemory=4000 Feature=fast",
    "n3": "CPUs=8 RealMemory=8000 Feature=slow",
    "n4": "CPUs=8 RealMemory=8000 Feature=slow",
}
PARTITIONS = (
    "PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE State=UP",
    "PartitionName=high Nodes=n[1-4] MaxTime=60 PriorityTier=10 PreemptMode=OFF State=UP",
    "PartitionName=gpu Nodes=n1 MaxTime=60 PriorityTier=5 PreemptMode=OFF State=UP",
)
NEEDED = ("munged", "slurmctld", "slurmd", "slurmrestd", "sbatch")
DEADLINE_S = 60.0


class SlurmCluster:
    def __init__(self, home: Path, *settings: str) -> None:
        self.home, self._settings = home, settings
        self._spawned: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = home / "slurm.conf"
        self.rest_socket = home / "run/restd.sock"
        self.ports = {name: free_port() for name in ("ctld", "rest", *NODES)}
        self.env = {"PATH": os.environ["PATH"], "SLURM_CONF": str(self.conf)}
        for name in ("state", "log", "run", "dev", "spool"):
            (home / name).mkdir(parents=True)
        for path in (home, *home.iterdir()):
            path.chmod(0o755)

    def start(self) -> None:
        for name, size in (("munge.key", 128), ("jwt.key", 32)):
            path = self.home / name
            path.write_bytes(os.urandom(size))
            path.chmod(0o600)
        for number in (0, 1):
            os.mknod(self.home / f"dev/gpu{number}", 0o020666, os.makedev(1, 3))
        self.conf.write_text(self._conf())
        (self.home / "gres.conf").write_text(f"NodeName=n1 Name=gpu Type=a100 File={self.home}/dev/gpu[0-1]\n")
        (self.home / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n")
        run, log = self.home / "run", self.home / "log"
        self._call(
            "munged", "--force", f"--key-file={self.home}/munge.key", f"--socket={run}/munge.sock",
            f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log", f"--seed-file={self.home}/state/munged.seed",
        )  # fmt: skip
        self.start_ctld()
        for node in NODES:
            self.start_slurmd(node)
        self._start_rest()
        self.wait_until_idle()

    def start_ctld(self) -> None:
        self._call("slurmctld", "-i", "-f", str(self.conf))

    def start_slurmd(self, node: str) -> None:
        self._call("slurmd", "-N", node, "-f", str(self.conf))

    def _start_rest(self) -> None:
        env = {**self.env, "SLURMRESTD_SECURITY": "disable_user_check"}
        self._spawn("restd", env, "slurmrestd", "-f", self.conf, "-s", "openapi/v0.0.38", "-a", "rest_auth/local",
                    f"unix:{self.rest_socket}")  # fmt: skip
        as_nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        self._spawn("restd-jwt", {**self.env, "SLURM_JWT": "daemon"}, *as_nobody, "slurmrestd", "-f", self.conf, "-s",
                    "openapi/v0.0.38", "-a", "rest_auth/jwt", f"127.0.0.1:{self.ports['rest']}")  # fmt: skip

    def _spawn(self, name: str, env: dict[str, str], *words: str | Path) -> None:
        with open(self.home / f"log/{name}.log", "wb") as log:
            # Stored, because dropping the handle of a running process is a ResourceWarning.
            process = self._spawned[name] = subprocess.Popen(
                [str(word) for word in words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.home / f"run/{name}.pid").write_text(str(process.pid))

    def _call(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def slurm(self, *words: str) -> str:
        """The output of a command of Slurm."""
        return self._call(*words)

    def wait_until_idle(self, nodes: int = len(NODES)) -> None:
        self.wait(
            lambda: self._quietly("sinfo", "-h", "-t", "idle", "-o", "%D", "-p", "main").strip() == str(nodes),
            "idle nodes",
        )
        self.wait(self.rest_socket.exists, "slurmrestd")

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s: {self._log_tail()}"
            time.sleep(0.05)

    def _quietly(self, *words: str) -> str:
        return subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=30, check=False).stdout

    def pid(self, name: str) -> int:
        return int((self.home / f"run/{name}.pid").read_text())

    def kill(self, name: str) -> None:
        """Kill with -9 and wait until it has exited."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda: _has_exited(pid), f"end of {name}")

    def stop_ctld(self) -> None:
        """SIGTERM; it saves its state. Returns when it has exited."""
        pid = self.pid("slurmctld")
        os.kill(pid, signal.SIGTERM)
        self.wait(lambda: _has_exited(pid), "end of slurmctld")

    def wait_for_ctld(self) -> None:
        self.wait(lambda: "UP" in self._quietly("scontrol", "ping"), "slurmctld")

    def wait_until_saved(self) -> None:
        """Slurm writes its state some seconds after a change: wait until a job submitted now is on disk."""
        name = f"hodei-mark-{time.monotonic_ns()}"
        self._call("sbatch", "--hold", f"--job-name={name}", "--output=/dev/null", "--wrap=true")
        saved = self.home / "state/job_state"
        self.wait(lambda: saved.exists() and name.encode() in saved.read_bytes(), "saved job state")

    @contextlib.contextmanager
    def hung(self, name: str) -> Iterator[None]:
        """The daemon is stopped by SIGSTOP; the kernel still accepts connections and data for it."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def token(self) -> str:
        return self._call("scontrol", "token", "lifespan=3600", "username=root").strip().partition("=")[2]

    def _log_tail(self) -> str:
        log = self.home / "log/slurmctld.log"
        return " / ".join(log.read_text().splitlines()[-4:]) if log.exists() else ""

    def clear(self) -> None:
        """Cancel all jobs, because they would outlive the daemons."""
        self._quietly("scancel", "--user=root")
        self.wait(lambda: not self._quietly("squeue", "-h", "-o", "%i").strip(), "end of all jobs")

    def stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.clear()
        names = ("restd", "restd-jwt", *NODES, "slurmctld", "munged")
        pids = []
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                pids.append(self.pid(name))
                os.kill(pids[-1], signal.SIGTERM)
        deadline = time.monotonic() + 15
        while not all(map(_has_exited, pids)):
            if time.monotonic() > deadline:
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.05)
        for process in self._spawned.values():
            process.wait(15)

    def _conf(self) -> str:
        here = socket.gethostname().partition(".")[0]
        lines = [
            "ClusterName=hodei",
            f"SlurmctldHost={here}(127.0.0.1)",
            f"SlurmctldPort={self.ports['ctld']}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.home}/run/munge.sock,cred_expire=5",
            "AuthAltTypes=auth/jwt",
            f"AuthAltParameters=jwt_key={self.home}/jwt.key",
            "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
            f"StateSaveLocation={self.home}/state",
            f"SlurmdSpoolDir={self.home}/spool/%n",
            f"SlurmctldPidFile={self.home}/run/slurmctld.pid",
            f"SlurmdPidFile={self.home}/run/%n.pid",
            f"SlurmctldLogFile={self.home}/log/slurmctld.log",
            f"SlurmdLogFile={self.home}/log/%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "MpiDefault=none",
            "SlurmdParameters=config_overrides",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU_Memory",
            "DefMemPerCPU=100",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,default_queue_depth=1000,bf_interval=1",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "JobRequeue=1",
            "GresTypes=gpu",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "KillWait=2",
            "MinJobAge=600",
            "MaxJobCount=50000",
            "MaxArraySize=20001",
            "AccountingStorageType=accounting_storage/none",
        ]
        lines += [
            f"NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={self.ports[name]} {what} State=UNKNOWN"
            for name, what in NODES.items()
        ]
        return "\n".join((*lines, *PARTITIONS, *self._settings, ""))


def _has_exited(pid: int) -> bool:
    try:
        os.waitpid(pid, os.WNOHANG)
    except OSError:
        pass
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def missing() -> str:
    """Why Slurm cannot be started here, or ""."""
    if os.getuid() != 0:
        return "only root can start a Slurm cluster"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (scripts/install-slurm.sh)" if absent else ""


@contextlib.contextmanager
def running(*settings: str) -> Iterator[SlurmCluster]:
    """`settings`: additional lines of slurm.conf."""
    home = Path(tempfile.mkdtemp(prefix="hodei-slurm-", dir="/run" if os.access("/run", os.W_OK) else None))
    cluster = SlurmCluster(home, *settings)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """One cluster for the whole session."""
    if problem := missing():
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    with running() as cluster:
        yield cluster


if __name__ == "__main__":  # python slurm_cluster.py COMMAND...: run it with a Slurm cluster
    if problem := missing():
        sys.exit(f"no Slurm: {problem}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with running() as made:
        env = {**os.environ, **made.env, "HODEI_SLURM_REST": f"unix:{made.rest_socket}"}
        code = subprocess.run(sys.argv[1:], env=env, check=False).returncode
    sys.exit(code)
