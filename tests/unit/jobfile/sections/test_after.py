"""The key `after`: short and long forms, mistakes, and rendering."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.jobfile.parse import decode_jobs, parse_job
from hodei.jobfile.render import job_document
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.errors import InvalidInput

BUILD, NUMBER = Dependency("succeeded", name="build"), Dependency("succeeded", job=17)


def after(given: Any) -> Dependencies:
    return parse_job({"command": ["true"], "after": given}).after


@pytest.mark.parametrize(
    ("given", "means"),
    [
        pytest.param("build", Dependencies((BUILD,)), id="one name"),
        pytest.param(17, Dependencies((NUMBER,)), id="one number"),
        pytest.param([17, "build"], Dependencies((NUMBER, BUILD)), id="a list of jobs that must succeed"),
        pytest.param(["17", 17], Dependencies((NUMBER,)), id="a number in quotes is a number, and counts once"),
        pytest.param("17[]", Dependencies((Dependency(job=17, elements="[]"),)), id="a whole array by its number"),
        pytest.param(
            ["17[3]", "build[0-2, 5]"],
            Dependencies((Dependency(job=17, elements="[3]"), Dependency(name="build", elements="[0-2,5]"))),
            id="elements by their index",
        ),
        pytest.param({"succeeded": "build"}, Dependencies((BUILD,)), id="one name in the long form"),
        pytest.param(
            {"exists": "/data/x.csv", "timeout": "2h"},
            Dependencies((Dependency("exists", what="/data/x.csv"),), 0, 7_200_000),
            id="a file, with patience",
        ),
        pytest.param(
            {"failed": ["a"], "completed": ["b"], "checkpointed": [3], "need": 2},
            Dependencies((Dependency("completed", name="b"), Dependency("failed", name="a"),
                          Dependency("checkpointed", job=3)), 2),
            id="two of three",
        ),
        pytest.param({"succeeded": ["build"], "need": 1}, Dependencies((BUILD,)), id="all of one is all"),
    ],
)  # fmt: skip
def test_what_is_written_is_understood_and_written_back(given: Any, means: Dependencies) -> None:
    assert after(given) == means
    spec = parse_job({"command": ["true"], "after": given})
    assert parse_job(job_document(spec)).after == means


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param(["No Name"], "is not a job name", id="not a name"),
        pytest.param(["build[x]"], "is not a range of indices", id="not an index"),
        pytest.param(["build[3"], "is not a job name", id="half a bracket"),
        pytest.param(["0[3]"], "is not the number of a job", id="an element of no job"),
        pytest.param([0], "after[0]", id="not a number of a job"),
        pytest.param(True, "after", id="not a job at all"),
        pytest.param({}, "has no dependencies", id="nothing"),
        pytest.param({"need": 2, "succeeded": ["a"]}, "2 is more than the 1", id="more than there are"),
        pytest.param({"success": ["a"]}, "did you mean 'succeeded'", id="a slip of the key"),
        pytest.param({"exists": ["data/x"]}, "absolute path", id="a path that is not absolute"),
        pytest.param({"exists": ["/data/../etc/shadow"]}, "'..'", id="a path that climbs"),
        pytest.param({"exists": ["https://host/%2e%2e/x"]}, "'..'", id="an address that climbs"),
        pytest.param({"exists": ["https://me:secret@host/x"]}, "a user or a password", id="an address with a password"),
        pytest.param({"exists": ["ftp://host/x"]}, "neither", id="another protocol"),
        pytest.param({"exists": ["file:///etc/shadow"]}, "neither", id="a file as an address"),
        pytest.param({"succeeded": ["a"], "timeout": "0s"}, "too short", id="no time"),
    ],
)
def test_an_invalid_dependency_is_refused_with_a_reason(given: Any, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        after(given)
    hinted = str(refused.value.problems)
    assert says in hinted
    assert "secret" not in hinted


def test_the_fast_path_reads_it_too() -> None:
    assert decode_jobs(b'{"jobs":[{"command":["true"],"after":[17,"build"]}]}')[0].after.of == (NUMBER, BUILD)
