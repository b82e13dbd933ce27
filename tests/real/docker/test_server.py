"""A complete server with Docker hosts: command line, store and scheduler, also after the server was killed."""

from __future__ import annotations

import pytest

from docker_hosts import IMAGE, DockerDaemons
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


def test_a_job_runs_in_a_container_and_is_reported_like_any_other(installation: Installation, dockerd: DockerDaemons):
    daemon = dockerd()
    configured(installation, daemon).up()
    said = installation.hodei("run", "--", "/bin/sh", "-c", "echo out; echo error >&2; exit 3")
    assert said.code == 3
    assert "out" in said.out
    (job,) = installation.client().jobs()
    assert (job.state, job.exit_code, job.nodes) == ("failed", 3, ["h1"])
    assert installation.ok("logs", str(job.id)).out == "out\n"
    until(lambda: daemon.containers() == [], "the container is gone")
    assert installation.ok("logs", str(job.id)).out == "out\n"


def test_runs_outlive_a_killed_server_and_keep_their_exit_codes(installation: Installation, dockerd: DockerDaemons):
    daemon = dockerd()
    configured(installation, daemon).up()
    client = installation.client()
    ends, stays = client.submit_all(
        [
            {"name": "ends", "command": ["/bin/sh", "-c", "sleep 2; exit 4"], "cpu": "10m", "memory": "8Mi"},
            {"name": "stays", "command": ["/bin/sleep", "300"], "cpu": "10m", "memory": "8Mi", "grace": "0s"},
        ]
    )
    until(lambda: client.job(ends).job.state == client.job(stays).job.state == "running", "both run")
    installation.kill()
    installation.up()
    client = installation.client()
    until(lambda: client.job(ends).job.state == "failed", "the end was found")
    assert client.job(ends).job.exit_code == 4
    assert client.job(stays).job.state == "running"
    installation.ok("cancel", str(stays))
    until(lambda: client.job(stays).job.state == "cancelled", "it was cancelled")
    until(lambda: daemon.containers() == [], "the containers are gone")
