from __future__ import annotations

import msgspec
import pytest

from unit.cli.stub import job, problem

API = "/api/v1"


@pytest.mark.parametrize(
    ("verb", "state", "output"),
    [
        ("cancel", "cancelled", "job 4 (job-4) cancelled\n"),
        ("cancel", "running", "job 4 (job-4) cancel requested\n"),
        ("hold", "held", "job 4 (job-4) held\n"),
        ("release", "pending", "job 4 (job-4) released\n"),
        ("requeue", "pending", "job 4 (job-4) requeued\n"),
        ("suspend", "running", "job 4 (job-4) suspend requested\n"),
        ("suspend", "held", "job 4 (job-4) suspended\n"),
        ("resume", "pending", "job 4 (job-4) resumed\n"),
        ("checkpoint", "running", "job 4 (job-4) checkpoint requested\n"),
        ("migrate", "running", "job 4 (job-4) migration requested\n"),
    ],
)
def test_a_verb_is_sent_and_reported(hodei, stub, verb: str, state: str, output: str):
    stub.on("POST", f"{API}/jobs/4/{verb}", job(4, state))
    result = hodei(verb, "4")
    assert (result.exit_code, result.stdout) == (0, output)


def test_one_failure_does_not_stop_the_rest(hodei, stub):
    stub.on("POST", f"{API}/jobs/1/cancel", problem(409, "CONFLICT", "job 1 has ended"))
    stub.on("POST", f"{API}/jobs/3/cancel", job(3, "cancelled"))
    result = hodei("cancel", "1-3", "--reason", "not needed")
    assert result.exit_code == 8
    assert result.stdout == "job 3 (job-3) cancelled\n"
    assert "job 1 has ended" in result.stderr
    assert "[NOT_FOUND]" in result.stderr
    assert stub.requests[-1].json() == {"reason": "not needed"}


def test_cancelling_all_jobs_needs_a_confirmation(hodei, stub):
    stub.on("GET", f"{API}/jobs", {"jobs": [job(1, "running")], "next_after": 0})
    stub.on("POST", f"{API}/jobs/1/cancel", job(1, "running"))
    refused = hodei("cancel", "all")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert not stub.sent("POST", f"{API}/jobs/1/cancel")
    assert hodei("cancel", "all", "--yes").exit_code == 0
    assert stub.sent("POST", f"{API}/jobs/1/cancel")


def test_all_means_every_job_that_the_caller_may_change(hodei, stub):
    stub.on("GET", f"{API}/jobs", {"jobs": [job(2, "running"), job(1, "running")], "next_after": 0})
    for verb in ("cancel", "hold"):
        stub.on("POST", f"{API}/jobs/1/{verb}", problem(403, "NOT_OWNER", "job 1 belongs to ann"))
        stub.on("POST", f"{API}/jobs/2/{verb}", job(2, "running"))
        result = hodei(verb, "all", *(["--yes"] if verb == "cancel" else []))
        assert (result.exit_code, result.stdout) == (0, f"job 2 (job-2) {verb} requested\n")
        assert result.stderr == "skipped 1 job: job 1 belongs to ann [NOT_OWNER]\n"
        assert hodei(verb, "1").exit_code == 4


def test_the_exit_code_of_wait_is_the_outcome_of_the_jobs(hodei, stub):
    stub.on("GET", f"{API}/jobs/1/wait", job(1))
    stub.on("GET", f"{API}/jobs/2/wait", job(2, "failed", exit_code=3))
    assert hodei("wait", "1").exit_code == 0
    result = hodei("wait", "1", "2", "--progress", "-o", "json")
    assert result.exit_code == 10
    assert [view["state"] for view in msgspec.json.decode(result.stdout)] == ["succeeded", "failed"]
    assert result.stderr.splitlines() == ["1/2 ended", "2/2 ended"]


def test_wait_exits_with_6_after_its_timeout(hodei, stub):
    stub.on("GET", f"{API}/jobs/1/wait", job(1, "running"))
    result = hodei("wait", "1", "--timeout", "50ms")
    assert result.exit_code == 6
    assert "1 of 1 jobs not ended" in result.stderr


def test_jobs_are_printed_for_programs(hodei, stub):
    stub.on("POST", f"{API}/jobs/4/hold", job(4, "held"))
    assert msgspec.json.decode(hodei("hold", "4", "-o", "json").stdout)[0]["state"] == "held"
    assert hodei("hold", "4", "-o", "name").stdout == "4\n"
