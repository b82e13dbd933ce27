"""`hodei top`, and the usage of a job in `hodei job show`."""

from __future__ import annotations

import json

from msgspec import structs

from hodei.api.usage import RunUsageList, RunUsageRow
from hodei.model.usage import Efficiency
from unit.cli.stub import Stub, detail, job

GIB = 2**30
BUSY = RunUsageRow(
    "7.0.1", 7, "train", "lab", "ada", "n1", "local", "2025-12-31T23:00:00.000Z", cpu_milli=3100, cpu_request=4000,
    cpu_percent=78, peak_memory=19 * GIB // 10, memory_request=16 * GIB, memory_percent=12, cpu_ms=7_000_000,
    read_bytes=3 * GIB, write_bytes=120 << 20,
)  # fmt: skip
UNKNOWN = RunUsageRow("8.0.1", 8, "idle", "lab", "", "pod-1", "kube", "2025-12-31T23:00:00.000Z", cpu_request=500)
USAGE = "/api/v1/usage"


def test_top_is_one_table_of_the_running_runs(hodei, stub: Stub):
    stub.on("GET", USAGE, RunUsageList([BUSY, UNKNOWN]))
    result = hodei("top", "--project", "lab", "--node", "n1", "--sort", "memory")
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["RUN", "NAME", "PROJECT", "NODE", "CPU", "OF", "CPU%", "MEMORY", "OF", "MEM%", "RUNTIME"]
    assert lines[1][:12] == ["7.0.1", "train", "lab", "n1", "3.1", "4", "78", "1.9", "GiB", "16", "GiB", "12"]
    assert lines[2][:10] == ["8.0.1", "idle", "lab", "pod-1", "-", "0.5", "-", "-", "-", "-"]
    query = stub.sent("GET", USAGE)[0].query
    assert (query["project"], query["node"], query["sort"], query["limit"]) == ("lab", "n1", "memory", "50")


def test_top_for_programs_has_the_fields_of_the_api(hodei, stub: Stub):
    stub.on("GET", USAGE, RunUsageList([BUSY]))
    assert json.loads(hodei("job", "top", "-o", "json").stdout) == [structs.asdict(BUSY)]
    assert hodei("top", "-o", "name").stdout == "7.0.1\n"
    assert "READ" in hodei("top", "-o", "wide").stdout


def test_top_reads_pages_up_to_the_limit(hodei, stub: Stub):
    def page(request):
        first = int(request.query["after"])
        return RunUsageList([BUSY] * int(request.query["limit"]), first + int(request.query["limit"]))

    stub.on("GET", USAGE, page)
    assert len(hodei("top", "--limit", "1500", "-o", "name").stdout.splitlines()) == 1500
    assert [request.query["after"] for request in stub.sent("GET", USAGE)] == ["0", "500", "1000"]


def test_top_of_an_idle_cluster_says_so(hodei, stub: Stub):
    stub.on("GET", USAGE, RunUsageList([]))
    result = hodei("top")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "nothing is running\n")


def test_job_show_has_the_usage_and_what_to_request_instead(hodei, stub: Stub):
    used = Efficiency(1, 1100, 8000, 19 * GIB // 10, 16 * GIB, 32 * GIB // 10, 120 << 20, "it used little")
    stub.on("GET", "/api/v1/jobs/7", structs.replace(detail(job(7)), efficiency=used))
    shown = hodei("job", "show", "7").stdout
    assert "used 1.1 of 8 cores (14 %), peak 1.9 of 16 GiB (12 %), read 3.2 GiB, wrote 120 MiB" in shown
    assert "it used little" in shown
