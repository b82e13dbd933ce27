"""Readers of processor traces: SWF with the irregularities of the archive, and CSV with published waits."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.traces import Arrival, open_workload
from unit.sim.traces.shared import TRACES, needs_traces

HEADER = "; Version: 2.2\n; MaxNodes: 50\n; MaxProcs: 100\n;\n"


def line(
    id: int = 1, submit: int = 0, run: int = 60, alloc: int = 4, req: int = 4, req_time: int = 120, rest: str = ""
) -> str:
    return f"{id:5d} {submit} -1 {run} {alloc} -1 -1 {req} {req_time} -1 1 {rest or '7 3 9 -1 -1 -1 -1'}\n"


def a_file(folder: Path, text: str, name: str = "a.swf") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_job_of_swf_is_one_member_with_all_its_processors(tmp_path: Path) -> None:
    workload = open_workload(a_file(tmp_path, HEADER + line(3, 10)))
    [job] = workload.arrivals
    assert (job.id, job.at_ms, job.run_ms, job.spec.estimate_ms) == (3, 10_000, 60_000, 120_000)
    assert (job.spec.user, job.spec.project, job.spec.name) == ("u7", "g3", "app9")
    [task] = job.spec.tasks
    assert (task.count, task.request) == (1, {"cpu": 4000})
    [node] = workload.nodes
    assert node.capacity == {"cpu": 100_000}
    assert workload.notes == ["100 processors, from MaxProcs of the header"]


def test_nodes_may_be_smaller_than_the_machine_and_then_large_jobs_are_gangs(tmp_path: Path) -> None:
    workload = open_workload(a_file(tmp_path, line(1, alloc=20, req=20)), procs=24, per_node=8)
    assert [node.capacity["cpu"] for node in workload.nodes] == [8000, 8000, 8000]
    [job] = workload.arrivals
    assert [(task.name, task.count, task.request["cpu"]) for task in job.spec.tasks] == [
        ("main", 2, 8000), ("rest", 1, 4000),
    ]  # fmt: skip


def test_equal_jobs_share_one_spec(tmp_path: Path) -> None:
    first, second, other = open_workload(a_file(tmp_path, line(1) + line(2) + line(3, req_time=90))).arrivals
    assert first.spec is second.spec
    assert first.spec.tasks is other.spec.tasks


@pytest.mark.parametrize(
    ("text", "kept", "note"),
    [
        pytest.param(line(1, req=101), 0, "larger than the machine", id="larger than the machine"),
        pytest.param(line(1, run=0), 0, "without a run time", id="no run time"),
        pytest.param(line(1, run=-1), 0, "without a run time", id="unknown run time"),
        pytest.param(line(1, submit=-1), 0, "before the start of the trace", id="unknown submit time"),
        pytest.param(line(1, req=-1, alloc=-1), 0, "without a number of processors", id="no processors"),
        pytest.param(line(1, req=-1), 1, "the allocated ones are used", id="requested processors copied"),
        pytest.param(line(1, alloc=-1), 1, "", id="allocated processors are not needed"),
        pytest.param(line(1, run=500), 1, "cut to the requested time", id="ran too long"),
        pytest.param(line(1, req_time=-1), 0, "where others have one: dropped", id="no requested time"),
        pytest.param("1 0 -1 60 4\n", 0, "fewer than 18 numbers", id="cut off after the processors"),
        pytest.param("1 0 -1\n", 0, "fewer than 5 numbers: skipped", id="cut off before that"),
        pytest.param("\n   \n; Note: late\n", 0, "", id="empty lines and late comments"),
    ],
)
def test_irregular_lines_are_handled_and_counted(tmp_path: Path, text: str, kept: int, note: str) -> None:
    workload = open_workload(a_file(tmp_path, HEADER + line(99) + text))
    assert len(workload.arrivals) == 1 + kept
    found = "\n".join(workload.notes)
    assert note in found
    assert bool(note) == (len(workload.notes) > 1), found


def test_without_any_requested_times_the_run_time_is_the_estimate(tmp_path: Path) -> None:
    workload = open_workload(a_file(tmp_path, line(1, req_time=-1) + line(2, req_time=-1)), procs=8)
    assert [job.spec.estimate_ms for job in workload.arrivals] == [60_000, 60_000]
    assert "no job has a requested time" in workload.notes[0]


def test_estimates_can_be_the_actual_run_times(tmp_path: Path) -> None:
    [job] = open_workload(a_file(tmp_path, line(1)), estimates="actual").arrivals
    assert job.spec.estimate_ms == job.run_ms == 60_000


def test_jobs_are_sorted_and_repeated_ids_replaced(tmp_path: Path) -> None:
    workload = open_workload(a_file(tmp_path, line(5, 20) + line(6, 10) + line(6, 10)))
    assert [(job.at_ms, job.id) for job in workload.arrivals] == [(10_000, 6), (10_000, 7), (20_000, 5)]
    assert "2 of 3 jobs not in order of submission: sorted" in workload.notes
    assert "1 of 3 jobs with the id of another job: a new id is assigned" in workload.notes


def test_fractions_of_seconds_are_kept(tmp_path: Path) -> None:
    [job] = open_workload(a_file(tmp_path, "1 0.5 -1 1.25 4.0 -1 -1 -1 -1 -1 1 1 1 1 1 1 -1 -1\n")).arrivals
    assert (job.at_ms, job.run_ms) == (500, 1250)


def test_an_invalid_number_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"a\.swf, line 6: column 4 is 'soon'") as found:
        open_workload(a_file(tmp_path, HEADER + line(1) + "2 0 -1 soon 4\n"))
    assert "18 numbers" in found.value.hint


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.swf.gz"
    path.write_bytes(gzip.compress("".join(line(id) for id in range(500)).encode())[:-40])
    with pytest.raises(InvalidInput, match="truncated or damaged"):
        open_workload(path)


def test_a_window_counts_from_zero_and_keeps_the_times(tmp_path: Path) -> None:
    path = a_file(tmp_path, "".join(line(id, id * 10) for id in range(1, 7)))
    workload = open_workload(f"{path}?first=2&jobs=3")
    assert [(job.id, job.at_ms) for job in workload.arrivals] == [(3, 30_000), (4, 40_000), (5, 50_000)]
    assert workload.notes[-1] == "only jobs 2 to 4 of 6, counted from 0"


GOLDEN = "id,submit_s,run_s,requested_s,procs,user,wait_easy_s,wait_easy_clairvoyant_s\n"


def test_published_waits_are_kept(tmp_path: Path) -> None:
    path = a_file(tmp_path, GOLDEN + "1,0,50,60,4,3,0,0\n2,5,10,60,8,4,45,40\n", "g.csv")
    workload = open_workload(path, procs=8)
    assert workload.extra == {"wait_easy_s": {1: 0, 2: 45}, "wait_easy_clairvoyant_s": {1: 0, 2: 40}}
    assert [(job.id, job.run_ms, job.spec.estimate_ms, job.spec.user) for job in workload.arrivals] == [
        (1, 50_000, 60_000, "u3"), (2, 10_000, 60_000, "u4"),
    ]  # fmt: skip
    assert workload.notes == []


def test_waits_and_users_may_be_missing(tmp_path: Path) -> None:
    workload = open_workload(a_file(tmp_path, "id,submit_s,run_s,requested_s,procs\n1,0,5,5,1\n", "g.csv"))
    assert workload.extra == {}
    assert workload.nodes == []
    assert "the size of the machine" in workload.notes[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param("1,0,x,60,4,3,0,0\n", "line 2: run_s is 'x'", id="not a number"),
        pytest.param("1,0,5\n", "line 2: 3 columns where 5 are needed", id="cut off"),
    ],
)
def test_an_invalid_row_is_reported_with_its_line(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        open_workload(a_file(tmp_path, GOLDEN + row, "g.csv"))


def facts(job: Arrival) -> tuple[int, int, int, int, int]:
    return job.id, job.at_ms, job.run_ms, job.spec.estimate_ms, job.spec.tasks[0].request["cpu"]


@needs_traces
def test_the_filtered_log_of_kth_is_the_published_one() -> None:
    raw = open_workload(TRACES / "kth-sp2" / "raw.swf.gz")
    golden = open_workload(TRACES / "kth-sp2" / "golden.csv.gz", procs=100)
    assert len(golden.arrivals) == 28_481
    assert [facts(job) for job in raw.arrivals] == [facts(job) for job in golden.arrivals]


@needs_traces
@pytest.mark.parametrize(
    ("trace", "jobs", "procs"),
    [
        pytest.param("nasa-ipsc/NASA-iPSC-1993-3.1-cln.swf.gz", 18_066, 128, id="NASA, without 173 jobs of no time"),
        pytest.param("lublin-256/lublin_256.swf.gz", 10_000, 256, id="Lublin, size by its nodes"),
    ],
)
def test_logs_without_requests_are_read(trace: str, jobs: int, procs: int) -> None:
    workload = open_workload(TRACES / trace)
    assert len(workload.arrivals) == jobs
    assert workload.nodes[0].capacity == {"cpu": procs * 1000}
