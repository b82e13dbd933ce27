"""Arrays on the command line: `17[]` and `17[3]`, against a stub server."""

from __future__ import annotations

import pytest
from msgspec import structs

from hodei.api.views import ArrayView, JobDetail
from hodei.cli.documents import document_of
from hodei.cli.errors import UsageProblem
from hodei.cli.refs import reference_text, resolve_ids, resolve_job, resolve_targets, state_counts
from hodei.client import Client
from hodei.model.errors import NotFound
from unit.cli.stub import job

API = "/api/v1"
SWEEP = structs.replace(
    job(17, "running", name="sweep"), array=ArrayView(17, 10, 5, 2, 10, 2, {"pending": 3, "running": 1, "failed": 1})
)


@pytest.fixture
def client(stub):
    stub.on("GET", f"{API}/arrays/17", SWEEP)
    stub.on("GET", f"{API}/arrays/18", SWEEP)
    stub.on("GET", f"{API}/jobs", {"jobs": [SWEEP], "next_after": 0})
    with Client() as client:
        yield client


@pytest.mark.parametrize(
    ("reference", "ids"),
    [("17[10]", [17]), ("17[12-16:2]", [18, 19, 20]), ("17[10,18]", [17, 21]), ("sweep[18]", [21]), ("17[]", [17, 18, 19, 20, 21])],
)  # fmt: skip
def test_elements_are_found_by_their_index(client, reference: str, ids: list[int]):
    assert resolve_ids(client, [reference]) == ids


@pytest.mark.parametrize("reference", ["17[11]", "17[20]"])
def test_a_missing_element_is_not_found(client, reference: str):
    with pytest.raises(NotFound):
        resolve_ids(client, [reference])


@pytest.mark.parametrize("reference", ["17[]", "17", "1_7", "sweep", "last", "sweep[]", "last[]", "18[]"])
def test_a_bare_name_or_number_is_the_whole_array(client, reference: str):
    arrays, jobs = resolve_targets(client, [reference])
    assert ([array.id for array in arrays], jobs) == ([17], [])


def test_elements_ranges_and_other_jobs_are_not_arrays(client):
    assert resolve_targets(client, ["5", "18", "17[12]", "17-18"]) == ([], [5, 18, 17])


def test_a_command_for_one_job_takes_a_number_as_a_job_and_refuses_the_name_of_an_array(client):
    assert resolve_job(client, "17") == 17
    with pytest.raises(UsageProblem) as refused:
        resolve_job(client, "sweep")
    assert "array of 5 jobs" in refused.value.message
    assert refused.value.hint == "name an element: 'sweep[10]'"


def test_an_element_is_listed_with_its_own_reference():
    element = structs.replace(job(17), array=ArrayView(17, 10, 5, 2, 10, 2))
    assert reference_text(element) == "17[10]"
    assert reference_text(structs.replace(job(17), array=ArrayView(17, 0, 1))) == "17"
    assert (reference_text(SWEEP), reference_text(job(3))) == ("17[]", "3")


def test_an_element_is_shown_with_its_array_and_commands_for_that_element(stub, hodei):
    element = structs.replace(job(17, name="sweep"), array=ArrayView(17, 10, 5, 2, 10, 2))
    stub.on("GET", f"{API}/arrays/17", SWEEP)
    stub.on("GET", f"{API}/jobs/17", JobDetail(element, {}, []))
    shown = hodei("job", "show", "17[10]")
    assert "array      17[10], one of 5 elements\n" in shown.stdout
    assert "more: hodei why '17[10]', hodei logs '17[10]', hodei job show '17[10]' -o yaml" in shown.stdout
    assert hodei("job", "show", "17[10]", "-o", "name").stdout == "17[10]\n"


def test_states_are_counted_in_order_with_deleted_jobs_last():
    assert state_counts(ArrayView(1, 0, 9, states={"failed": 1, "running": 2, "pending": 3})) == (
        "2 running, 3 pending, 1 failed, 3 deleted"
    )


@pytest.mark.parametrize(
    ("text", "array"),
    [
        ("100", {"count": 100}),
        ("100%10", {"count": 100, "at_most": 10}),
        ("0-8:2%3", {"indices": "0-8:2", "at_most": 3}),
    ],
)
def test_the_array_option_has_the_syntax_of_slurm(text: str, array: dict):
    assert document_of(("true",), {"array": text}, local=False)["array"] == array


def test_an_invalid_array_limit_is_a_usage_error():
    with pytest.raises(UsageProblem):
        document_of(("true",), {"array": "5%x"}, local=False)
