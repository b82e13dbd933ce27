"""A complete server with Docker hosts: command line, store and scheduler, also after the server was killed."""

from __future__ import annotations

import pytest

from docker_hosts import IMAGE, DockerDaemons
from real.docker.test_faults import ends_on_term, exits_on_term, process_of
from real.installation import Installation, until

pytestmark = pytest.mark.real


def configured(installation: Installation, *daemons) -> Installation:
    hosts = "\n".join(
        f'[[backends.farm.hosts]]\nname = "{each.name}"\nurl = "{each.url}"\nmax_containers = 3' for each in daemons
    )
    return installation.configure(
        f'[backends.local]\nkind = "local"\nenabled = false\n'
        f'[backends.farm]\nkind = "docker"\nimage = "{IMAGE}"\nnetwork = "none"\nanswer_within = "2s"\n{hosts}\n'
    )


def test_a_job_runs_in_a_container_with_its_log_and_exit_code(installation: Installation, dockerd: DockerDaemons):
    daemon = dockerd()
    configured(installation, daemon).up()
    result = installation.hodei("run", "--", "/bin/sh", "-c", "echo out; echo error >&2; exit 3")
    assert result.code == 3
    assert "out" in result.out
    (job,) = installation.client().jobs()
    assert (job.state, job.exit_code, job.nodes) == ("failed", 3, ["h1"])
    assert installation.ok("logs", str(job.id)).out == "out\n"
    until(lambda: daemon.containers() == [], "the container is removed")
    assert installation.ok("logs", str(job.id)).out == "out\n"


def test_runs_outlive_a_killed_server_and_keep_their_exit_codes(installation: Installation, dockerd: DockerDaemons):
    daemon = dockerd()
    configured(installation, daemon).up()
    client = installation.client()
    short, long = client.submit_all(
        [
            {"name": "short", "command": [*exits_on_term(4)], "cpu": "10m", "memory": "8Mi"},
            {"name": "long", "command": ["/bin/sleep", "300"], "cpu": "10m", "memory": "8Mi", "grace": "0s"},
        ]
    )
    until(lambda: client.job(short).job.state == client.job(long).job.state == "running", "both run")
    pid = process_of(daemon, f"{short}.0.1")
    installation.kill()
    until(lambda: ends_on_term(pid), "the run ends while the server is down")
    installation.up()
    client = installation.client()
    until(lambda: client.job(short).job.state == "failed", "the end was observed")
    assert client.job(short).job.exit_code == 4
    assert client.job(long).job.state == "running"
    installation.ok("cancel", str(long))
    until(lambda: client.job(long).job.state == "cancelled", "it was cancelled")
    until(lambda: daemon.containers() == [], "the containers are removed")
