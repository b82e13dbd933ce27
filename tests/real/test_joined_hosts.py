"""Hosts that dial out to a real server: cut connections, killed and suspended processes, stolen credentials."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_host import alive
from cutting_proxy import CuttingProxy
from real.installation import DEADLINE_S, Installation, until

pytestmark = pytest.mark.real
CONFIG = """
[backends.local]
kind = "local"
enabled = false
[backends.lab]
kind = "hosts"
away_after = "3s"
lost_after = "{lost_after}"
"""


class Host:
    """An agent in its own directory, which connects to `port`."""

    def __init__(self, installation: Installation, node: str, port: int = 0, *options: str) -> None:
        self.installation, self.node = installation, node
        self.home = installation.home.parent / f"host-{node}"
        self.home.mkdir()
        self._port, self._options = port, options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}" if self._port else self.installation.address

    def start(self, token: str = "", home: Path | None = None) -> None:
        home = home or self.home
        env = self.installation.env({"HODEI_ENROL_TOKEN": token} if token else {})
        with (home / "agent.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hodei.agent", "join", self.url, "--home", str(home), *self._options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env,
            )  # fmt: skip

    def join(self) -> Host:
        self.start(new_token(self.installation, node=self.node))
        self.until_state("ready")
        return self

    def until_state(self, *states: str) -> None:
        until(lambda: node_state(self.installation, self.node) in states, f"{self.node} is {states}")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def log(self) -> str:
        return (self.home / "agent.log").read_text()

    def close(self) -> None:
        for path in self.home.glob("runs/*/*/status"):
            for line in path.read_text(errors="replace").splitlines():
                if " pid " in line and alive(pid := int(line.split()[-1])):
                    os.killpg(pid, signal.SIGKILL)
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait(DEADLINE_S)
        assert "Traceback" not in self.log, self.log


def new_token(installation: Installation, **fields: Any) -> str:
    body = json.dumps({"backend": "lab", **fields}).encode()
    answer = installation.request("POST", "/api/v1/agent/tokens", body)
    assert answer.status == 201, answer.body
    return str(answer.json["token"])


def node_state(installation: Installation, name: str) -> str:
    return next((node.state for node in installation.client().nodes() if node.name == name), "")


def audit(installation: Installation) -> list[tuple[str, str, str]]:
    entries = installation.request("GET", "/api/v1/audit?limit=200").json["entries"]
    return [(entry["who"], entry["verb"], entry["code"]) for entry in entries]


@pytest.fixture
def hosts(installation: Installation) -> Iterator[list[Host]]:
    """Closed at the end. The server is up."""
    installation.configure(CONFIG.format(lost_after="60s")).up()
    found: list[Host] = []
    yield found
    for host in found:
        host.close()


@pytest.mark.slow
def test_cut_connections_and_killed_agents_lose_and_repeat_nothing(
    installation: Installation, hosts: list[Host], tmp_path: Path
) -> None:
    proxy = CuttingProxy(int(installation.address.rsplit(":", 1)[1]), (0.01, 0.25))
    try:
        host = Host(installation, "edge-1", proxy.port)
        hosts.append(host)
        host.join()
        proof = tmp_path / "proof"
        script = (
            'echo "$HODEI_JOB_ID" >>"$1"; n=0; while [ $n -lt 50 ]; do n=$((n+1)); echo "line $n of $HODEI_JOB_ID"; done;'
            " sleep 0.2; exit $((HODEI_JOB_ID % 7))"
        )
        jobs = [installation.submit("sh", "-c", script, "sh", str(proof), restart="never") for _ in range(40)]
        for _ in range(10):
            time.sleep(0.5)  # the kills are spread over the jobs
            host.kill()
            host.start()
        details = installation.ended(*jobs)
        assert [detail.job.exit_code for detail in details] == [job % 7 for job in jobs]
        assert Counter(proof.read_text().split()) == {str(job): 1 for job in jobs}
        assert all(len(detail.runs) == 1 for detail in details)
        for job in jobs:
            assert installation.log_of(job) == "".join(f"line {n} of {job}\n" for n in range(1, 51))
        assert proxy.cuts > 20
    finally:
        for host in hosts:
            host.close()
        hosts.clear()
        proxy.close()


def test_jobs_continue_while_the_server_is_dead_and_report_their_ends(
    installation: Installation, hosts: list[Host], tmp_path: Path
) -> None:
    hosts.append(Host(installation, "edge-1", installation_port(installation)).join())
    go = tmp_path / "go"
    waiting = installation.submit("sh", "-c", f"while [ ! -e {go} ]; do sleep 0.02; done; echo done; exit 5")
    long = installation.submit("sleep", "300")
    for job in (waiting, long):
        installation.until_state(job, "running")
    installation.kill()
    go.touch()
    status = hosts[0].home / "runs"
    until(lambda: any(" exit " in p.read_text() for p in status.glob("*/*/status")), "the job has ended")
    installation.up(port=installation_port(installation))
    (ended,) = installation.ended(waiting)
    assert (ended.job.exit_code, len(ended.runs)) == (5, 1)
    assert installation.log_of(waiting) == "done\n"
    hosts[0].until_state("ready")
    assert installation.state(long) == "running"
    installation.ok("cancel", str(long))
    (stopped,) = installation.ended(long)
    assert (stopped.job.state, len(stopped.runs)) == ("cancelled", 1)


def installation_port(installation: Installation) -> int:
    return int(installation.address.rsplit(":", 1)[1])


def test_a_suspended_agent_is_offline_and_continues_afterwards(installation: Installation, hosts: list[Host]) -> None:
    host = Host(installation, "edge-1").join()
    hosts.append(host)
    job = installation.submit("sh", "-c", "sleep 1; exit 3")
    installation.until_state(job, "running")
    host.signal(signal.SIGSTOP)
    host.until_state("not-ready")
    pending = installation.submit("true")
    why = installation.ok("why", str(pending), "-o", "json").out
    assert "AGENT_OFFLINE" in why
    assert "out of reach since" in why
    host.signal(signal.SIGCONT)
    details = installation.ended(job, pending)
    assert [(d.job.exit_code, len(d.runs)) for d in details] == [(3, 1), (0, 1)]


def test_runs_of_a_host_that_stays_away_are_given_up_and_stopped_when_it_returns(
    installation: Installation, hosts: list[Host], tmp_path: Path
) -> None:
    installation.stop()
    installation.configure(CONFIG.format(lost_after="6s")).up()
    first, second = Host(installation, "edge-1").join(), Host(installation, "edge-2")
    hosts += [first, second]
    pids = tmp_path / "pids"
    job = installation.submit("sh", "-c", f"echo $$ >> {pids}; exec sleep 300")
    pid = until(lambda: int(pids.read_text() or 0) if pids.exists() else 0, "the job runs")
    installation.until_state(job, "running")
    second.join()
    first.signal(signal.SIGSTOP)
    until(lambda: len(pids.read_text().split()) == 2, "the job runs on the other host")
    assert alive(pid)
    runs = installation.job(job).runs
    assert (runs[0].node, runs[0].state) == ("edge-1", "lost")
    assert "out of reach since" in runs[0].reason
    first.signal(signal.SIGCONT)
    until(lambda: not alive(pid), "the old attempt is stopped")
    assert installation.state(job) == "running"


def test_a_stolen_token_and_a_copied_home_are_refused_and_recorded(
    installation: Installation, hosts: list[Host], tmp_path: Path
) -> None:
    token = new_token(installation, node="edge-1")
    host, thief, copy = Host(installation, "edge-1"), Host(installation, "thief"), Host(installation, "copy")
    hosts += [host, thief, copy]
    host.start(token)
    host.until_state("ready")
    thief.start(token)
    until(lambda: "used before" in thief.log, "the stolen token is refused")
    assert not node_state(installation, "thief")
    until(lambda: any(code == "ENROLMENT_USED" for _, _, code in audit(installation)), "the attempt is audited")
    shutil.copy(host.home / "joined.json", copy.home)
    copy.start()
    until(lambda: "another agent is connected" in copy.log, "the copy is refused")
    events = installation.request("GET", "/api/v1/events?limit=1000").json["events"]
    assert [event["node"] for event in events if event["kind"] == "node.credential_copied"] == ["edge-1"]
    until(lambda: ("node:edge-1", "agent.connect", "NODE_IN_USE") in audit(installation), "the copy is audited")
    assert installation.ended(installation.submit("true"))[0].runs[0].node == "edge-1"
    secrets = [token, json.loads((host.home / "joined.json").read_text())["credential"]]
    for path in [*installation.home.rglob("*"), host.home / "agent.log"]:
        if path.is_file() and not path.is_symlink():
            assert not any(secret.encode() in path.read_bytes() for secret in secrets), path


def test_a_revoked_host_is_disconnected_at_once(installation: Installation, hosts: list[Host]) -> None:
    host = Host(installation, "edge-1").join()
    hosts.append(host)
    assert installation.request("POST", "/api/v1/nodes/edge-1/revoke").status == 200
    assert node_state(installation, "edge-1") == "not-ready" or until(
        lambda: node_state(installation, "edge-1") == "not-ready", "not ready"
    )
    until(lambda: "revoked" in host.log, "the agent is refused")
    assert "was revoked" in installation.ok("node", "show", "edge-1").out
    assert ("admin", "nodes.revoke", "") in audit(installation)
    installation.kill()
    installation.up(port=installation_port(installation))
    installation.request("GET", "/api/v1/hosts")
    (found,) = installation.request("GET", "/api/v1/hosts").json["hosts"]
    assert found["state"] == "revoked"


def test_a_job_that_allows_it_waits_for_an_offline_device_until_its_deadline(
    installation: Installation, hosts: list[Host]
) -> None:
    device = Host(installation, "device", 0, "--offline-ok", "4h").join()
    hosts.append(device)
    device.kill()
    device.until_state("not-ready")
    ordinary = installation.submit("true")
    patient = installation.submit("true", backend={"offline": "1h"})
    cancelled = installation.submit("true", backend={"offline": "1h"})
    hasty = installation.submit("true", backend={"offline": "2s"})
    for job in (patient, cancelled, hasty):
        assert [run.node for run in installation.until_state(job, "scheduled").runs] == ["device"]
    installation.ok("cancel", str(cancelled))
    assert installation.ended(cancelled)[0].runs[0].state == "stopped"
    runs = until(lambda: [run for run in installation.job(hasty).runs if run.state == "failed"], "it is given back")
    assert "deadline" in runs[0].reason
    assert installation.job(hasty).job.state == "pending"
    assert installation.state(ordinary) == "pending"
    assert installation.state(patient) == "scheduled"
    device.start()
    details = installation.ended(patient, hasty, ordinary)
    assert [(detail.job.state, detail.runs[-1].node) for detail in details] == [("succeeded", "device")] * 3
    assert len(details[0].runs) == 1
