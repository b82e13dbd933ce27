"""Which reader a trace gets, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.traces import open_workload


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("hello, world\n", "not a trace that is known; it begins with 'hello, world'", id="some text"),
        pytest.param("", "it is empty", id="nothing"),
        pytest.param("; only\n; comments\n", "has no job that can be run", id="only comments"),
        pytest.param("sn,cpu_milli,memory_mib,gpu,model\n", "lists nodes, not jobs", id="nodes without pods"),
        pytest.param('{"hodei_decision_log": 99}\n', "is of format 99", id="a log from the future"),
    ],
)
def test_a_file_that_cannot_be_replayed_says_why(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=told) as found:
        open_workload(path)
    assert found.value.hint


def test_a_name_alone_does_not_make_swf_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "page.swf"
    path.write_text("<html>not found</html>\n")
    with pytest.raises(InvalidInput, match="this is not SWF"):
        open_workload(path)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        pytest.param("no/such.swf", "there is no trace no/such.swf", id="no such file"),
        pytest.param("a.csv,b.csv,c.csv", "3 files are given", id="three files"),
        pytest.param("generate:weather", "no generator 'weather'", id="no such generator"),
        pytest.param("generate:ci?jbos=3", "does not know the option jbos", id="a slip in an option"),
        pytest.param("generate:ci?jobs=many", "jobs is 'many'", id="not a number"),
        pytest.param("generate:ci?jobs=0", "jobs is '0'", id="too few"),
        pytest.param("generate:ci?load=-1", "load is '-1'", id="a load below nothing"),
        pytest.param("generate:ci?jobs=1&jobs=2", "given twice", id="twice"),
        pytest.param("generate:ci?jobs", "cannot read 'jobs'", id="no value"),
        pytest.param("generate:lublin?types=three", "types is 'three'", id="not a choice"),
    ],
)
def test_a_wrong_name_says_what_is_wrong_and_what_would_be_right(spec: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told) as found:
        open_workload(spec)
    assert found.value.hint


def test_a_folder_without_traces_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a folder without openb_pod_list"):
        open_workload(tmp_path)


def test_the_machine_has_at_least_one_processor() -> None:
    with pytest.raises(InvalidInput, match="procs is 0"):
        open_workload("generate:lublin", procs=0)


def test_options_of_one_reader_are_not_those_of_another(tmp_path: Path) -> None:
    path = tmp_path / "a.swf"
    path.write_text("1 0 -1 60 4\n")
    with pytest.raises(InvalidInput, match="does not know the option days") as found:
        open_workload(f"{path}?days=3")
    assert "first, jobs" in found.value.hint


def test_a_window_past_the_end_of_a_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.swf"
    path.write_text("1 0 -1 60 4\n2 5 -1 60 4\n")
    with pytest.raises(InvalidInput, match="has 2 jobs, counted from 0: there is no job 2") as found:
        open_workload(f"{path}?first=2&jobs=5")
    assert "0 to 1" in found.value.hint
    part = open_workload(f"{path}?first=1&jobs=5")
    assert [job.id for job in part.arrivals] == [2]
    assert part.notes[-1] == "only jobs 1 to 1 of 2, counted from 0; 5 were asked for"


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        pytest.param("id,submit_s,run_s,procs", "has no column requested_s", id="a table of jobs"),
        pytest.param("id,submit_s,run_time,requested_s,cores", "has no columns run_s, procs", id="two are missing"),
        pytest.param("timestamp,num_gpus,gpu_time,cluster", "has no column duration", id="Philly"),
        pytest.param("name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time", "no column deletion_time", id="pods"),
        pytest.param("sn,cpu_milli,gpu,model", "has no column memory_mib", id="nodes"),
        pytest.param("kind,repo,name,cpu_request,mem_request,interval,cron,timeout", "minimum_interval", id="Prow"),
    ],
)
def test_a_column_that_is_missing_is_named(tmp_path: Path, columns: str, told: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"{columns}\n")
    with pytest.raises(InvalidInput, match=told) as found:
        open_workload(path, procs=10)
    assert columns.replace(",", ", ") in found.value.hint


def test_a_table_that_is_like_none_is_not_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("name,kind,street,town\n")
    with pytest.raises(InvalidInput, match="not a trace that is known"):
        open_workload(path)
