from __future__ import annotations

import pytest

from hodei.cli.errors import UsageProblem
from hodei.cli.refs import numbers, resolve_ids, resolve_job
from hodei.client import Client
from hodei.model.errors import NotFound
from unit.cli.stub import job

API = "/api/v1"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("12", [12]),
        ("1-3", [1, 2, 3]),
        ("1,3,5-8", [1, 3, 5, 6, 7, 8]),
        ("2-10:2", [2, 4, 6, 8, 10]),
        ("1_000", [1000]),
        ("train", None),
        ("train-3", None),
        ("1-", None),
        ("1,,2", None),
        ("-1", None),
    ],
)
def test_ranges_of_numbers_are_parsed(text: str, ids: list[int] | None):
    assert numbers(text) == ids


@pytest.mark.parametrize("text", ["3-1", "1-9:0", "1-999999999999"])
def test_invalid_ranges_are_usage_errors(text: str):
    with pytest.raises(UsageProblem):
        numbers(text)


@pytest.fixture
def client(stub):
    def jobs(request):
        views = [job(9, "running"), job(8, "pending", name="train"), job(5, name="train")]
        if name := request.query.get("name"):
            views = [view for view in views if view.name == name]
        if states := request.query.get("state"):
            views = [view for view in views if view.state in states.split(",")]
        return {"jobs": views[: int(request.query["limit"])], "next_after": 0}

    stub.on("GET", f"{API}/jobs", jobs)
    with Client() as client:
        yield client


def test_last_a_name_and_all_are_resolved_by_the_server(client: Client):
    assert resolve_ids(client, ["last"]) == [9]
    assert resolve_ids(client, ["train"]) == [8]
    assert resolve_ids(client, ["all"]) == [8, 9]


def test_repeated_references_are_resolved_once_in_order(client: Client):
    assert resolve_ids(client, ["3", "last", "1-3", "9"]) == [3, 9, 1, 2]


def test_an_unknown_name_is_not_found(client: Client):
    with pytest.raises(NotFound, match="no job has the name 'nope'"):
        resolve_ids(client, ["nope"])


def test_a_command_for_one_job_refuses_several(client: Client):
    with pytest.raises(UsageProblem):
        resolve_job(client, "1-2")
