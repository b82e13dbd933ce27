"""One job file on one server runs on this machine, on Docker and on Slurm with the same result, messages and events. A
backend that hangs does not delay the others.

The file names no image, because this machine and Slurm use none; the Docker backend has a default image. Kubernetes is not
compared, because kwok, which simulates its kubelets, runs no commands (see kubernetes/test_backend_installation.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from docker_hosts import IMAGE, Daemon, DockerDaemons
from real.installation import DEADLINE_S, Installation, until
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.real
BACKENDS = ("local", "farm", "hpc")
JOB = """\
name: greet
command: [/bin/sh, -c, 'echo "hello $WHO"; echo "attempt $HODEI_ATTEMPT" >&2; echo "$1"; exit 7', sh, "it's $(no) shell"]
env: {WHO: everybody}
cpu: 1
memory: 64Mi
timeout: 10m
"""
DOCKER = """
[backends.farm]
kind = "docker"
image = "{image}"
network = "none"
hosts = [{{name = "{name}", url = "{url}"}}]
"""
SLURM = """
[backends.hpc]
kind = "slurm"
output = "{output}"
conf = "{conf}"
partitions = ["main"]
poll = "200ms"
"""
LOCAL_JOBS = 50
ROUNDS = 3
TIMES = 6


def docker(daemon: Daemon) -> str:
    return DOCKER.format(image=IMAGE, name=daemon.name, url=daemon.url)


def states(installation: Installation) -> dict[str, str]:
    with installation.client() as client:
        return {backend.name: backend.state for backend in client.backends()}


def enable_only(installation: Installation, name: str) -> None:
    """Disable the other backends, so that the job file need not name one."""
    for backend in BACKENDS:
        installation.ok("backend", "enable" if backend == name else "disable", backend)


@pytest.fixture
def all_three(
    installation: Installation, dockerd: DockerDaemons, slurm: SlurmCluster, tmp_path: Path
) -> Iterator[Installation]:
    hpc = SLURM.format(output=tmp_path / "shared", conf=slurm.conf)
    installation.configure(docker(dockerd()) + hpc).up()
    until(lambda: all(states(installation).get(name) == "ok" for name in BACKENDS), "all three backends are ok")
    yield installation
    slurm.clear()


def test_the_same_file_has_the_same_result_messages_and_events_on_every_backend(
    all_three: Installation, tmp_path: Path
):
    installation = all_three
    file = tmp_path / "greet.yaml"
    file.write_text(JOB)
    results: dict[str, Any] = {}
    for name in BACKENDS:
        enable_only(installation, name)
        id = int(installation.ok("submit", "-q", str(file)).out)
        (end,) = installation.ended(id)
        (run,) = end.runs
        assert run.backend == name
        why = installation.ok("why", str(id)).out
        assert f"main[0] run {run.id} on {run.node} (failed)" in why
        print(
            f"\n--- {name}",
            why,
            installation.ok("job", "history", str(id)).out,
            installation.ok("logs", str(id)).out,
            sep="\n",
        )
        with installation.client() as client:
            history = [event.kind for event in client.event_page(job=id).events]
        results[name] = {
            "end": (end.job.state, end.job.exit_code, end.job.reason_code, end.job.reason, end.job.failure),
            "run": (run.state, run.exit_code, run.reason_code, run.attempt),
            "why": why.splitlines()[0].replace(f"job {id} ", "job ID ").replace(run.node, "NODE"),
            "out": installation.ok("logs", str(id)).out,
            "err": installation.ok("logs", "--stderr", str(id)).out,
            "history": history,
        }
    assert results["local"]["end"][:3] == ("failed", 7, "EXIT_CODE")
    assert results["local"]["why"] == "job ID (greet) failed on NODE: exit code 7 [EXIT_CODE]"
    assert results["local"]["out"] == "hello everybody\nit's $(no) shell\n"
    assert results["local"]["err"] == "attempt 1\n"
    assert results["farm"] == results["local"]
    assert results["hpc"] == results["local"]


def jobs_per_second(installation: Installation) -> float:
    """Throughput of short jobs on this machine, from their submission until all have ended."""
    job = {"command": ["/bin/true"], "cpu": "10m", "memory": "1Mi", "backend": "local"}
    with installation.client() as client:
        began = time.monotonic()
        ids = client.submit_all([job] * LOCAL_JOBS)
        client.wait(ids, DEADLINE_S)
        took = time.monotonic() - began
        assert {client.job(id).job.state for id in ids} == {"succeeded"}
    return LOCAL_JOBS / took


def test_a_backend_that_hangs_does_not_delay_the_others(installation: Installation, dockerd: DockerDaemons):
    """The daemon is stopped by SIGSTOP while a run is active and others are being started. The throughput of the other
    backend is printed and not asserted, because it also depends on the machine."""
    daemon = dockerd("frozen")
    installation.configure('[health]\ninterval = "2s"\n' + docker(daemon)).up()
    until(lambda: states(installation).get("farm") == "ok", "Docker is ok")
    rates: dict[str, list[float]] = {"ok": [], "hung": []}
    jobs_per_second(installation)  # warm up
    for _ in range(ROUNDS):
        rates["ok"] += [jobs_per_second(installation) for _ in range(TIMES)]
        active = installation.submit("/bin/sh", "-c", "sleep 5; exit 4", backend="farm")
        installation.until_state(active, "running")
        daemon.freeze()
        try:
            ordered = [installation.submit("/bin/true", backend="farm") for _ in range(3)]
            rates["hung"] += [jobs_per_second(installation) for _ in range(TIMES)]  # each waits for its jobs to end
            assert {installation.state(id) for id in (active, *ordered)}.isdisjoint({"succeeded", "failed"})
        finally:
            daemon.thaw()
        ends = installation.ended(active, *ordered)
        assert [end.job.exit_code for end in ends] == [4, 0, 0, 0]
        assert [len(end.runs) for end in ends] == [1, 1, 1, 1]
    daemon.freeze()
    try:
        until(lambda: states(installation)["farm"] == "unhealthy", "the backend is unhealthy")
        jobs_per_second(installation)
        late = installation.submit("/bin/true", backend="farm")
        until(lambda: "BACKEND_UNHEALTHY" in installation.ok("why", str(late)).out, "why names the backend")
    finally:
        daemon.thaw()
    assert installation.ended(late)[0].job.state == "succeeded"
    ok, hung = (median(rates[state]) for state in ("ok", "hung"))
    print(f"\nlocal jobs/s: {ok:.1f} while Docker is ok, {hung:.1f} while it hangs")
    print(f"ratio {hung / ok:.2f}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print({state: [round(rate) for rate in found] for state, found in rates.items()})
