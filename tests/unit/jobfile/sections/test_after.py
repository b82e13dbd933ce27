"""The key `after`: short and long forms, mistakes, and rendering."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.jobfile.parse import decode_jobs, parse_job
from hodei.jobfile.render import job_document
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.errors import InvalidInput

BUILD, NUMBER = Dependency("succeeded", name="build"), Dependency("succeeded", job=17)


def after(value: Any) -> Dependencies:
    return parse_job({"command": ["true"], "after": value}).after


@pytest.mark.parametrize(
    ("value", "expected"),
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
            id="a file with a timeout",
        ),
        pytest.param(
            {"failed": ["a"], "completed": ["b"], "checkpointed": [3], "need": 2},
            Dependencies((Dependency("completed", name="b"), Dependency("failed", name="a"),
                          Dependency("checkpointed", job=3)), 2),
            id="two of three",
        ),
        pytest.param({"succeeded": ["build"], "need": 1}, Dependencies((BUILD,)), id="all of one"),
    ],
)  # fmt: skip
def test_dependencies_are_parsed_and_rendered_back(value: Any, expected: Dependencies) -> None:
    assert after(value) == expected
    spec = parse_job({"command": ["true"], "after": value})
    assert parse_job(job_document(spec)).after == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(["No Name"], "is not a job name", id="not a name"),
        pytest.param(["build[x]"], "is not a range of indices", id="not an index"),
        pytest.param(["build[3"], "is not a job name", id="half a bracket"),
        pytest.param(["0[3]"], "is not the number of a job", id="an element of no job"),
        pytest.param([0], "after[0]", id="not a number of a job"),
        pytest.param(True, "after", id="not a reference"),
        pytest.param({}, "has no dependencies", id="empty"),
        pytest.param({"need": 2, "succeeded": ["a"]}, "2 is more than the 1", id="more than there are"),
        pytest.param({"success": ["a"]}, "did you mean 'succeeded'", id="a misspelt key"),
        pytest.param({"exists": ["data/x"]}, "absolute path", id="a path that is not absolute"),
        pytest.param({"exists": ["/data/../etc/shadow"]}, "'..'", id="a path with parent directories"),
        pytest.param({"exists": ["https://host/%2e%2e/x"]}, "'..'", id="an address with parent directories"),
        pytest.param({"exists": ["https://me:secret@host/x"]}, "a user or a password", id="an address with a password"),
        pytest.param({"exists": ["ftp://host/x"]}, "neither", id="another protocol"),
        pytest.param({"exists": ["file:///etc/shadow"]}, "neither", id="a file as an address"),
        pytest.param({"succeeded": ["a"], "timeout": "0s"}, "too short", id="no time"),
    ],
)
def test_an_invalid_dependency_is_refused_with_a_reason(value: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        after(value)
    problems = str(refused.value.problems)
    assert message in problems
    assert "secret" not in problems


def test_the_fast_path_parses_dependencies_too() -> None:
    assert decode_jobs(b'{"jobs":[{"command":["true"],"after":[17,"build"]}]}')[0].after.of == (NUMBER, BUILD)
