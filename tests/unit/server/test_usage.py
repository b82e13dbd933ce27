"""The usage of runs over HTTP: live ones in one sorted list, and that of a job with its efficiency."""

from __future__ import annotations

import pytest

from builders import NOW_MS, a_job, a_run
from hodei.model.usage import RunUsage
from hodei.runtime.run_usage import LiveUsage

USAGE = "/api/v1/usage"


def add(service, job: int, live: LiveUsage | None = None, **fields):
    service.store.by_id[job] = a_job(job, state="running", cpu=4, memory="1Gi", attempt=1, first_attempt=1)
    fields = {"state": "running", "started_ms": NOW_MS - 10_000} | fields
    service.store.run_list.append(a_run(job, **fields))
    if live is not None:
        service.live_usage[f"{job}.0.1"] = live


@pytest.fixture
def three(service):
    add(service, 1, LiveUsage(RunUsage(cpu_ms=9000, peak_memory=2**29, read_bytes=5, write_bytes=0), 500))
    add(service, 2)
    add(service, 3, LiveUsage(RunUsage(cpu_ms=1000, peak_memory=2**28), 3000))


def test_running_runs_are_listed_with_the_largest_cpu_usage_first_and_unknown_usage_last(call, three):
    response = call("GET", USAGE, role="viewer")
    assert response.status == 200
    rows = response.json["runs"]
    assert [row["job"] for row in rows] == [3, 1, 2]
    assert rows[1] == {
        "run": "1.0.1", "job": 1, "name": "job-1", "project": "default", "user": "", "node": "n1", "backend": "local",
        "started_at": rows[1]["started_at"], "cpu_milli": 500, "cpu_request": 4000, "cpu_percent": 12,
        "peak_memory": 2**29, "memory_request": 2**30, "memory_percent": 50, "cpu_ms": 9000, "read_bytes": 5,
        "write_bytes": 0,
    }  # fmt: skip
    assert (rows[2]["cpu_milli"], rows[2]["peak_memory"], rows[2]["cpu_percent"]) == (None, None, None)


def test_the_list_can_be_sorted_by_memory_and_read_in_pages(call, three):
    first = call("GET", f"{USAGE}?sort=memory&limit=2").json
    assert ([row["job"] for row in first["runs"]], first["next_after"]) == ([1, 3], 2)
    second = call("GET", f"{USAGE}?sort=memory&limit=2&after=2").json
    assert ([row["job"] for row in second["runs"]], second["next_after"]) == ([2], 0)


def test_filters_reach_the_service(call, service, three):
    call("GET", f"{USAGE}?project=lab&user=ada&node=n1")
    assert ("running", {"project": "lab", "user": "ada", "node": "n1"}) in service.calls


@pytest.mark.parametrize("query", ["sort=io", "limit=0", "limit=1001", "after=x"])
def test_invalid_parameters_are_refused(call, query):
    assert call("GET", f"{USAGE}?{query}").status == 422


def test_a_running_job_is_shown_with_its_live_usage(call, service, three):
    detail = call("GET", "/api/v1/jobs/1").json
    assert detail["runs"][0]["usage"] == {"cpu_ms": 9000, "peak_memory": 2**29, "read_bytes": 5, "write_bytes": 0}
    assert (detail["efficiency"]["runs"], detail["efficiency"]["cpu_request"]) == (1, 4000)
    unknown = call("GET", "/api/v1/jobs/2").json
    assert (unknown["runs"][0]["usage"], unknown["efficiency"]) == (None, None)


def test_an_ended_job_is_shown_with_its_stored_usage_and_a_hint(call, service):
    times = {"started_ms": NOW_MS - 200_000, "finished_ms": NOW_MS - 100_000}
    add(service, 1, state="succeeded", usage=RunUsage(cpu_ms=50_000, peak_memory=2**20), **times)
    detail = call("GET", "/api/v1/jobs/1").json
    assert detail["efficiency"] == {
        "runs": 1, "cpu_milli": 500, "cpu_request": 4000, "peak_memory": 2**20, "memory_request": 2**30,
        "hint": "it used 0.5 of 4 cores on average and at most 1 MiB of 1 GiB of memory; a smaller request can start sooner",
    }  # fmt: skip


def test_runs_of_an_earlier_attempt_do_not_count(call, service):
    add(service, 1, attempt=1, state="failed", finished_ms=NOW_MS, usage=RunUsage(cpu_ms=99_000))
    service.store.by_id[1] = a_job(1, state="running", cpu=4, attempt=2, first_attempt=2)
    assert call("GET", "/api/v1/jobs/1").json["efficiency"] is None
