"""One job file, unchanged, through one real server to this machine, to Docker and to Slurm: the same end, the same words, the
same history. And a backend that hangs holds up none of the others.

The file names no image, since this machine and Slurm run none: the Docker backend has one for such jobs in its settings. A
pod ends as its job does in kubernetes/test_backend_installation.py; kwok, which plays the kubelets there, runs no commands, so that
it can not be part of the comparison here.
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
from real.installation import Installation, until
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.real
EVERYWHERE = ("local", "farm", "hpc")
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


def only(installation: Installation, name: str) -> None:
    """Nothing starts anywhere else, so that the file need not say where it goes."""
    for other in EVERYWHERE:
        installation.ok("backend", "enable" if other == name else "disable", other)


@pytest.fixture
def all_three(
    installation: Installation, dockerd: DockerDaemons, slurm: SlurmCluster, tmp_path: Path
) -> Iterator[Installation]:
    hpc = SLURM.format(output=tmp_path / "shared", conf=slurm.conf)
    installation.configure(docker(dockerd()) + hpc).up()
    until(lambda: all(states(installation).get(name) == "ok" for name in EVERYWHERE), "all three backends are well")
    yield installation
    slurm.clear()


def test_the_same_file_has_the_same_result_messages_and_events_on_every_backend(
    all_three: Installation, tmp_path: Path
):
    installation = all_three
    file = tmp_path / "greet.yaml"
    file.write_text(JOB)
    told: dict[str, Any] = {}
    for name in EVERYWHERE:
        only(installation, name)
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
        told[name] = {
            "end": (end.job.state, end.job.exit_code, end.job.reason_code, end.job.reason, end.job.failure),
            "run": (run.state, run.exit_code, run.reason_code, run.attempt),
            "why": why.splitlines()[0].replace(f"job {id} ", "job ID ").replace(run.node, "NODE"),
            "out": installation.ok("logs", str(id)).out,
            "err": installation.ok("logs", "--stderr", str(id)).out,
            "history": history,
        }
    assert told["local"]["end"][:3] == ("failed", 7, "EXIT_CODE")
    assert told["local"]["why"] == "job ID (greet) failed on NODE: exit code 7 [EXIT_CODE]"
    assert told["local"]["out"] == "hello everybody\nit's $(no) shell\n"
    assert told["local"]["err"] == "attempt 1\n"
    assert told["farm"] == told["local"]
    assert told["hpc"] == told["local"]


def jobs_per_second(installation: Installation) -> float:
    """Of short jobs on this machine, from their submission until all have ended."""
    job = {"command": ["/bin/true"], "cpu": "10m", "memory": "1Mi", "backend": "local"}
    with installation.client() as client:
        began = time.monotonic()
        ids = client.submit_all([job] * LOCAL_JOBS)
        client.wait(ids, 120)
        took = time.monotonic() - began
        assert {client.job(id).job.state for id in ids} == {"succeeded"}
    return LOCAL_JOBS / took


def test_a_backend_that_hangs_does_not_delay_the_others(installation: Installation, dockerd: DockerDaemons):
    """The daemon is stopped, so that its socket takes every question and answers none, with a run under way there and more
    on their way. How fast the others are meanwhile is printed, not asserted: that is the machine's doing too."""
    sick = dockerd("frozen")
    installation.configure('[health]\ninterval = "2s"\n' + docker(sick)).up()
    until(lambda: states(installation).get("farm") == "ok", "Docker is well")
    rates: dict[str, list[float]] = {"well": [], "hung": []}
    jobs_per_second(installation)  # the first ones pay for what is done once
    for _ in range(ROUNDS):
        rates["well"] += [jobs_per_second(installation) for _ in range(TIMES)]
        there = installation.submit("/bin/sh", "-c", "sleep 5; exit 4", backend="farm")
        installation.until_state(there, "running")
        sick.freeze()
        try:
            ordered = [installation.submit("/bin/true", backend="farm") for _ in range(3)]
            rates["hung"] += [jobs_per_second(installation) for _ in range(TIMES)]  # all of them ended
            assert {installation.state(id) for id in (there, *ordered)}.isdisjoint({"succeeded", "failed"})
        finally:
            sick.thaw()
        ends = installation.ended(there, *ordered, timeout_s=120)
        assert [end.job.exit_code for end in ends] == [4, 0, 0, 0]
        assert [len(end.runs) for end in ends] == [1, 1, 1, 1]
    sick.freeze()
    try:
        until(lambda: states(installation)["farm"] == "unhealthy", "it is noticed", 60)
        jobs_per_second(installation)
        late = installation.submit("/bin/true", backend="farm")
        until(lambda: "BACKEND_UNHEALTHY" in installation.ok("why", str(late)).out, "why says what it waits for")
    finally:
        sick.thaw()
    assert installation.ended(late, timeout_s=120)[0].job.state == "succeeded"
    well, hung = (median(rates[which]) for which in ("well", "hung"))
    print(f"\nlocal jobs/s: {well:.1f} beside a Docker that is well, {hung:.1f} beside one that hangs")
    print(f"ratio {hung / well:.2f}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print({which: [round(rate) for rate in found] for which, found in rates.items()})
