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
    ("value", "expected"),
    [
        pytest.param({"command": ["ping"]}, HealthCheck(("ping",)), id="a command with defaults"),
        pytest.param({"command": "ping x"}, HealthCheck(("/bin/sh", "-c", "ping x")), id="a shell command"),
        pytest.param(
            {"http": "http://127.0.0.1:8080/ready", "every": "1m", "timeout": "2s", "after": "5m", "failures": 1},
            HealthCheck((), "http://127.0.0.1:8080/ready", "", 60_000, 2_000, 300_000, 1),
            id="an address with all options",
        ),
        pytest.param({"http": "http://node/x"}, HealthCheck((), "http://node/x"), id="the address of the node"),
        pytest.param({"http": "http://[::1]:1/"}, HealthCheck((), "http://[::1]:1/"), id="IPv6 loopback"),
        pytest.param({"file": "/srv/beat"}, HealthCheck((), "", "/srv/beat"), id="a heartbeat"),
    ],
)
def test_a_health_check_is_parsed_and_rendered_back(value, expected):
    parsed = spec(health=value)
    assert parsed.health == expected
    assert parse_job(job_document(parsed), now_ms=0).health == expected


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        pytest.param({"health": {"every": "1m"}}, "health", id="no check"),
        pytest.param({"health": {"command": ["x"], "file": "/x"}}, "health", id="two checks"),
        pytest.param({"health": {"command": ""}}, "health.command", id="an empty command"),
        pytest.param({"health": {"http": "https://localhost/"}}, "health.http", id="not http"),
        pytest.param({"health": {"http": "http://example.com/"}}, "health.http", id="another host"),
        pytest.param({"health": {"http": "http://169.254.169.254/"}}, "health.http", id="cloud metadata"),
        pytest.param({"health": {"http": "http://10.0.0.1/"}}, "health.http", id="another machine"),
        pytest.param({"health": {"http": "http://127.1/"}}, "health.http", id="a short way to write loopback"),
        pytest.param({"health": {"http": "http://nodes/"}}, "health.http", id="an unknown name"),
        pytest.param({"health": {"http": "http://me:pw@localhost/"}}, "health.http", id="with a password"),
        pytest.param({"health": {"http": "http://localhost:0/"}}, "health.http", id="no port"),
        pytest.param({"health": {"http": "http://localhost/\r\nX: y"}}, "health.http", id="two lines"),
        pytest.param({"health": {"file": "beat"}}, "health.file", id="a relative file"),
        pytest.param({"health": {"file": "/x", "every": "10ms"}}, "health.every", id="too often"),
        pytest.param({"health": {"file": "/x", "timeout": 0}}, "health.timeout", id="no time"),
        pytest.param({"health": {"file": "/x", "failures": 0}}, "health.failures", id="no failures"),
        pytest.param({"retry_on": ["preempted"]}, "retry_on[0]", id="preemption is not a failure"),
        pytest.param({"retry_on": ["node_lost", "idle"]}, "retry_on[1]", id="idleness is not a failure"),
        pytest.param({"retry_on": ["everything"]}, "retry_on[0]", id="an unknown class"),
        pytest.param({"checkpoint": {"file": "/x", "every": "1m"}}, "checkpoint.every", id="no hook"),
        pytest.param({"checkpoint": {"signal": "USR1", "every": "1ms"}}, "checkpoint.every", id="too many checkpoints"),
    ],
)
def test_an_invalid_health_check_or_retry_is_refused_with_its_path(keys, path):
    with pytest.raises(InvalidInput) as refused:
        spec(**keys)
    assert [where for where, _ in refused.value.problems] == [path]


def test_retry_classes_and_checkpoint_intervals_are_parsed_and_rendered_back():
    parsed = spec(retry_on=["node_lost", "out_of_memory", "node_lost"], checkpoint={"signal": "usr1", "every": "10m"})
    assert (parsed.retry_on, parsed.checkpoint.every_ms) == (("node_lost", "out_of_memory"), 600_000)
    rendered = parse_job(job_document(parsed), now_ms=0)
    assert (rendered.retry_on, rendered.checkpoint) == (parsed.retry_on, parsed.checkpoint)
