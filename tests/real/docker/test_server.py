"""A whole Hodei with Docker hosts: the command line, the store and the scheduler, across the death of the server."""

from __future__ import annotations

import pytest

from docker_hosts import IMAGE, Farm
from real.house import House, until

pytestmark = pytest.mark.real


def configured(house: House, *daemons) -> House:
    hosts = "\n".join(
        f'[[backends.farm.hosts]]\nname = "{each.name}"\nurl = "{each.url}"\nmax_containers = 3' for each in daemons
    )
    return house.configure(
        f'[backends.local]\nkind = "local"\nenabled = false\n'
        f'[backends.farm]\nkind = "docker"\nimage = "{IMAGE}"\nnetwork = "none"\nanswer_within = "2s"\n{hosts}\n'
    )


def test_a_job_runs_in_a_container_and_is_told_of_like_any_other(house: House, dockerd: Farm):
    daemon = dockerd()
    configured(house, daemon).up()
    said = house.hodei("run", "--", "/bin/sh", "-c", "echo out; echo error >&2; exit 3")
    assert said.code == 3
    assert "out" in said.out
    (job,) = house.client().jobs()
    assert (job.state, job.exit_code, job.nodes) == ("failed", 3, ["h1"])
    assert house.ok("logs", str(job.id)).out == "out\n"
    until(lambda: daemon.containers() == [], "the container is gone")
    assert house.ok("logs", str(job.id)).out == "out\n"


def test_runs_outlive_a_killed_server_and_keep_their_exit_codes(house: House, dockerd: Farm):
    daemon = dockerd()
    configured(house, daemon).up()
    client = house.client()
    ends, stays = client.submit_all(
        [
            {"name": "ends", "command": ["/bin/sh", "-c", "sleep 2; exit 4"], "cpu": "10m", "memory": "8Mi"},
            {"name": "stays", "command": ["/bin/sleep", "300"], "cpu": "10m", "memory": "8Mi", "grace": "0s"},
        ]
    )
    until(lambda: client.job(ends).job.state == client.job(stays).job.state == "running", "both run")
    house.kill()
    house.up()
    client = house.client()
    until(lambda: client.job(ends).job.state == "failed", "the end was found")
    assert client.job(ends).job.exit_code == 4
    assert client.job(stays).job.state == "running"
    house.ok("cancel", str(stays))
    until(lambda: client.job(stays).job.state == "cancelled", "it was cancelled")
    until(lambda: daemon.containers() == [], "the containers are gone")
