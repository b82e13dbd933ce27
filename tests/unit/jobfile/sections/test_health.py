"""`health`, `retry_on` and `checkpoint.every` in a job file: parsing and mistakes."""

from __future__ import annotations

import pytest

from hodei.jobfile.parse import parse_job
from hodei.jobfile.render import job_document
from hodei.model.errors import InvalidInput
from hodei.model.job import HealthCheck


def spec(**keys):
    return parse_job({"command": ["true"], "cpu": 1, "memory": "1Gi", **keys}, now_ms=0)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        pytest.param({"command": ["ping"]}, HealthCheck(("ping",)), id="a command, all else by default"),
        pytest.param({"command": "ping x"}, HealthCheck(("/bin/sh", "-c", "ping x")), id="a line for the shell"),
        pytest.param(
            {"http": "http://127.0.0.1:8080/ready", "every": "1m", "timeout": "2s", "after": "5m", "failures": 1},
            HealthCheck((), "http://127.0.0.1:8080/ready", "", 60_000, 2_000, 300_000, 1),
            id="an address, with everything",
        ),
        pytest.param({"http": "http://node/x"}, HealthCheck((), "http://node/x"), id="the node's own address"),
        pytest.param({"http": "http://[::1]:1/"}, HealthCheck((), "http://[::1]:1/"), id="the other loopback"),
        pytest.param({"file": "/srv/beat"}, HealthCheck((), "", "/srv/beat"), id="a heartbeat"),
    ],
)
def test_a_health_check_is_understood_and_written_back(given, meant):
    made = spec(health=given)
    assert made.health == meant
    assert parse_job(job_document(made), now_ms=0).health == meant


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        pytest.param({"health": {"every": "1m"}}, "health", id="no way to look"),
        pytest.param({"health": {"command": ["x"], "file": "/x"}}, "health", id="two ways"),
        pytest.param({"health": {"command": ""}}, "health.command", id="an empty command"),
        pytest.param({"health": {"http": "https://localhost/"}}, "health.http", id="not http"),
        pytest.param({"health": {"http": "http://example.com/"}}, "health.http", id="another host"),
        pytest.param({"health": {"http": "http://169.254.169.254/"}}, "health.http", id="the cloud's own"),
        pytest.param({"health": {"http": "http://10.0.0.1/"}}, "health.http", id="a neighbour"),
        pytest.param({"health": {"http": "http://127.1/"}}, "health.http", id="a short way to write loopback"),
        pytest.param({"health": {"http": "http://nodes/"}}, "health.http", id="nearly the node"),
        pytest.param({"health": {"http": "http://me:pw@localhost/"}}, "health.http", id="with a password"),
        pytest.param({"health": {"http": "http://localhost:0/"}}, "health.http", id="no port"),
        pytest.param({"health": {"http": "http://localhost/\r\nX: y"}}, "health.http", id="two lines"),
        pytest.param({"health": {"file": "beat"}}, "health.file", id="a file that depends on where"),
        pytest.param({"health": {"file": "/x", "every": "10ms"}}, "health.every", id="too often"),
        pytest.param({"health": {"file": "/x", "timeout": 0}}, "health.timeout", id="no time"),
        pytest.param({"health": {"file": "/x", "failures": 0}}, "health.failures", id="no failures"),
        pytest.param({"retry_on": ["preempted"]}, "retry_on[0]", id="preemption is not for it to say"),
        pytest.param({"retry_on": ["node_lost", "idle"]}, "retry_on[1]", id="nor is idleness"),
        pytest.param({"retry_on": ["everything"]}, "retry_on[0]", id="no such class"),
        pytest.param({"checkpoint": {"file": "/x", "every": "1m"}}, "checkpoint.every", id="no hook to save with"),
        pytest.param({"checkpoint": {"signal": "USR1", "every": "1ms"}}, "checkpoint.every", id="saved too often"),
    ],
)
def test_an_invalid_escalation_is_refused_with_its_path(keys, path):
    with pytest.raises(InvalidInput) as refused:
        spec(**keys)
    assert [where for where, _ in refused.value.problems] == [path]


def test_classes_and_times_are_understood_and_written_back():
    made = spec(retry_on=["node_lost", "out_of_memory", "node_lost"], checkpoint={"signal": "usr1", "every": "10m"})
    assert (made.retry_on, made.checkpoint.every_ms) == (("node_lost", "out_of_memory"), 600_000)
    again = parse_job(job_document(made), now_ms=0)
    assert (again.retry_on, again.checkpoint) == (made.retry_on, made.checkpoint)
