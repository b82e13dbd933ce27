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
