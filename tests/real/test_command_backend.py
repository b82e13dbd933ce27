"""Kind `command` with a real server: four programs drive machines that are agents of this host."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_host import alive
from ports import free_port
from real.installation import DEADLINE_S, Installation, until, wait_for_file

pytestmark = pytest.mark.real
MACHINES = ("m1", "m2", "m3", "m4", "m5")
CONFIG = """
[backends.local]
kind = "local"
enabled = false

[backends.yard]
kind = "command"
list = ["{bin}/list"]
start = ["{bin}/start"]
stop = ["{bin}/stop"]
price = ["{bin}/price"]
url = "{url}"
timeout = "20s"
away_after = "3s"
lost_after = "60s"

[scheduling.capacity]
interval = "1s"
consolidate = 0

[scheduling.capacity.default]
idle = "2s"
boot_timeout = "60s"
"""
# Each is a whole program. `start` may be repeated while it runs: the lock and the pid make it idempotent.
PROGRAMS = {
    "list": """
        print(json.dumps([
            {"name": name, "state": "on" if pid_of(name) else "off", "cpu": 2, "memory": "1Gi", "startup": "1s"}
            for name in MACHINES
        ]))
    """,
    "start": """
        for machine in json.load(sys.stdin)["machines"]:
            home = YARD / machine["name"]
            home.mkdir(exist_ok=True)
            with open(home / "start.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if pid_of(machine["name"]):
                    continue
                with open(YARD / "starts", "a") as starts:
                    starts.write(machine["name"] + "\\n")
                boot = f"while [ -e {YARD}/no-boot ]; do sleep 0.05; done; exec "
                agent = [sys.executable, "-m", "hodei.agent", "join", machine["url"], "--home", str(home / "agent")]
                with open(YARD / (machine["name"] + ".log"), "a") as log:
                    started = subprocess.Popen(
                        ["sh", "-c", boot + '"$@"', "sh", *agent], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True, close_fds=True,
                        env={**os.environ, "HODEI_ENROL_TOKEN": machine["token"]},
                    )
                (home / "pid.part").write_text(str(started.pid))
                os.replace(home / "pid.part", home / "pid")
    """,
    "stop": """
        while (YARD / "no-stop").exists():
            time.sleep(0.05)
        for name in sys.argv[1:]:
            if pid := pid_of(name):
                os.kill(pid, 9)
                while pid_of(name):
                    time.sleep(0.01)
            shutil.rmtree(YARD / name, ignore_errors=True)  # the next machine of this name is a new one
    """,
    "price": """
        print(json.dumps({name: 0.5 for name in MACHINES}))
    """,
}
SHARED = """#!{python}
import fcntl, json, os, shutil, subprocess, sys, time
from pathlib import Path

YARD, MACHINES = Path({yard!r}), {machines!r}


def pid_of(name):
    try:
        pid = int((YARD / name / "pid").read_text())
        return pid if open(f"/proc/{{pid}}/stat").read().rsplit(")", 1)[1].split()[0] not in "ZX" else 0
    except (OSError, ValueError):
        return 0


"""


class Yard:
    def __init__(self, installation: Installation, home: Path) -> None:
        self.installation, self.home = installation, home
        self.bin = home / "bin"
        self.bin.mkdir(parents=True)
        shared = SHARED.format(python=sys.executable, yard=str(home), machines=MACHINES)
        for name, body in PROGRAMS.items():
            program = self.bin / name
            lines = [line[8:] for line in body.strip("\n").split("\n")]
            program.write_text(shared + "\n".join(lines))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def up(self) -> Installation:
        """The first start; the address of the server is known only then."""
        self.port = free_port()
        url = f"http://127.0.0.1:{self.port}"
        return self.installation.configure(CONFIG.format(bin=self.bin, url=url)).up(port=self.port)

    def restart(self) -> None:
        self.installation.kill()
        self.installation.up(port=self.port)

    def states(self) -> set[str]:
        return {node.state for node in self.installation.client().nodes()}

    def pids(self) -> list[int]:
        """Of the machines that are on."""
        found = [int(path.read_text()) for path in self.home.glob("*/pid")]
        return [pid for pid in found if alive(pid)]

    @property
    def starts(self) -> dict[str, int]:
        file = self.home / "starts"
        return dict(Counter(file.read_text().split())) if file.exists() else {}

    def submit(self, proof: Path, then: str = "true") -> int:
        script = f'echo "$HODEI_JOB_ID" >>{proof}; {then}'
        return self.installation.submit("sh", "-c", script, cpu="500m", restart="never")

    def check_once_and_off(self, proof: Path, jobs: list[int]) -> None:
        details = self.installation.ended(*jobs)
        assert [detail.job.state for detail in details] == ["succeeded"] * len(jobs)
        assert all(len(detail.runs) == 1 for detail in details)
        assert Counter(map(int, proof.read_text().split())) == dict.fromkeys(jobs, 1)
        until(lambda: not self.pids(), "all machines are off")
        until(lambda: self.states() == {"potential"}, "all nodes are potential")

    def close(self) -> None:
        for gate in ("no-boot", "no-stop"):
            (self.home / gate).unlink(missing_ok=True)
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not alive(pid), "the machine is off", DEADLINE_S)
        for log in self.home.glob("*.log"):
            assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture
def yard(installation: Installation, tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(installation, tmp_path / "yard")
    yield yard
    yard.close()


def test_machines_are_started_for_jobs_and_stopped_when_idle(yard: Yard, tmp_path: Path) -> None:
    installation = yard.up()
    assert yard.states() == {"potential"}
    assert {node.cost for node in installation.client().nodes()} == {0.5}
    proof, go = tmp_path / "proof", tmp_path / "go"
    jobs = [yard.submit(proof, wait_for_file(go)[2]) for _ in range(20)]
    until(lambda: len(yard.pids()) == len(MACHINES), "all machines are on")
    go.touch()
    yard.check_once_and_off(proof, jobs)
    assert yard.starts == dict.fromkeys(MACHINES, 1)
    # A machine of the same name is a new one, with a token of its own.
    more = [yard.submit(proof) for _ in range(2)]
    installation.ended(*more)
    yard.check_once_and_off(proof, [*jobs, *more])


def test_a_server_killed_in_each_phase_leaves_no_machine_on_and_repeats_no_job(yard: Yard, tmp_path: Path) -> None:
    installation = yard.up()
    proof, go = tmp_path / "proof", tmp_path / "go"
    no_boot, no_stop = yard.home / "no-boot", yard.home / "no-stop"
    no_boot.touch()
    jobs = [yard.submit(proof, wait_for_file(go)[2]) for _ in range(2)]
    until(lambda: "starting" in yard.states(), "a machine is ordered")
    yard.restart()  # the order may not have been sent
    until(yard.pids, "a machine is on")
    yard.restart()  # while it boots
    no_boot.unlink()
    for job in jobs:
        installation.until_state(job, "running")
    yard.restart()  # while the jobs run
    until(lambda: "ready" in yard.states(), "the agent is back")
    no_stop.touch()
    go.touch()
    installation.ended(*jobs)
    until(lambda: "stopping" in yard.states(), "the idle machine is to be stopped")
    yard.restart()  # while it is stopped
    no_stop.unlink()
    yard.check_once_and_off(proof, jobs)
    assert set(yard.starts.values()) == {1}


def test_a_program_that_fails_is_shown_and_the_next_try_succeeds(yard: Yard, tmp_path: Path) -> None:
    installation = yard.up()
    start = yard.bin / "start"
    program = start.read_text()
    start.write_text("#!/bin/sh\necho the rack is locked >&2\nexit 1\n")
    proof = tmp_path / "proof"
    job = yard.submit(proof)
    until(lambda: "the rack is locked" in installation.server_output(), "the log has the words of the program")
    assert not yard.pids()
    start.write_text(program)
    yard.check_once_and_off(proof, [job])
    token = json.dumps(installation.request("GET", "/api/v1/agent/tokens").json)
    assert "hode_" not in token
    assert "hode_" not in installation.server_output()
