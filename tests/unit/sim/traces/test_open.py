"""The choice of a reader, and the errors if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.traces import open_workload


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("hello, world\n", "not a known trace; it begins with 'hello, world'", id="some text"),
        pytest.param("", "it is empty", id="empty"),
        pytest.param("; only\n; comments\n", "has no job to run", id="only comments"),
        pytest.param("sn,cpu_milli,memory_mib,gpu,model\n", "lists nodes, not jobs", id="nodes without pods"),
        pytest.param('{"hodei_decision_log": 99}\n', "is of format 99", id="a log of a newer format"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_a_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=message) as found:
        open_workload(path)
    assert found.value.hint


def test_the_file_name_alone_does_not_decide_for_swf(tmp_path: Path) -> None:
    path = tmp_path / "page.swf"
    path.write_text("<html>not found</html>\n")
    with pytest.raises(InvalidInput, match="this is not SWF"):
        open_workload(path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param("no/such.swf", "there is no trace no/such.swf", id="no such file"),
        pytest.param("a.csv,b.csv,c.csv", "3 files are given, not 2", id="three files"),
        pytest.param("generate:weather", "no generator 'weather'", id="no such generator"),
        pytest.param("generate:ci?jbos=3", "has no option jbos", id="a misspelt option"),
        pytest.param("generate:ci?jobs=many", "jobs is 'many'", id="not a number"),
        pytest.param("generate:ci?jobs=0", "jobs is '0'", id="too few"),
        pytest.param("generate:ci?load=-1", "load is '-1'", id="a negative load"),
        pytest.param("generate:ci?jobs=1&jobs=2", "given twice", id="twice"),
        pytest.param("generate:ci?jobs", "cannot read 'jobs'", id="no value"),
        pytest.param("generate:lublin?types=three", "types is 'three'", id="not a choice"),
    ],
)
def test_an_unknown_trace_or_option_is_refused_with_a_hint(spec: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as found:
        open_workload(spec)
    assert found.value.hint


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a folder without openb_pod_list"):
        open_workload(tmp_path)


def test_the_machine_has_at_least_one_processor() -> None:
    with pytest.raises(InvalidInput, match="procs is 0"):
        open_workload("generate:lublin", procs=0)


def test_an_option_of_another_reader_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.swf"
    path.write_text("1 0 -1 60 4\n")
    with pytest.raises(InvalidInput, match="has no option days") as found:
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
    assert part.notes[-1] == "only jobs 1 to 1 of 2, counted from 0; 5 were requested"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param("id,submit_s,run_s,procs", "has no column requested_s", id="a table of jobs"),
        pytest.param("id,submit_s,run_time,requested_s,cores", "has no columns run_s, procs", id="two are missing"),
        pytest.param("timestamp,num_gpus,gpu_time,cluster", "has no column duration", id="Philly"),
        pytest.param("name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time", "no column deletion_time", id="pods"),
        pytest.param("sn,cpu_milli,gpu,model", "has no column memory_mib", id="nodes"),
        pytest.param("kind,repo,name,cpu_request,mem_request,interval,cron,timeout", "minimum_interval", id="Prow"),
    ],
)
def test_missing_columns_are_named(tmp_path: Path, columns: str, message: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"{columns}\n")
    with pytest.raises(InvalidInput, match=message) as found:
        open_workload(path, procs=10)
    assert columns.replace(",", ", ") in found.value.hint


def test_a_table_of_unknown_columns_is_not_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("name,kind,street,town\n")
    with pytest.raises(InvalidInput, match="not a known trace"):
        open_workload(path)
