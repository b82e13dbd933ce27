"""`17[]` and `17[3]` at the terminal. The server here says what the test tells it to."""

from __future__ import annotations

import pytest
from msgspec import structs

from hodei.cli.arrays import counts, split
from hodei.cli.documents import document_of
from hodei.cli.errors import UsageProblem
from hodei.cli.refs import resolve
from hodei.client import Client
from hodei.model.errors import NotFound
from hodei.wire.views import ArrayView
from unit.cli.stub import job

API = "/api/v1"
SWEEP = structs.replace(
    job(17, "running", name="sweep"), array=ArrayView(17, 10, 5, 2, 10, 2, {"pending": 3, "running": 1, "failed": 1})
)


@pytest.fixture
def client(stub):
    stub.on("GET", f"{API}/arrays/17", SWEEP)
    stub.on("GET", f"{API}/jobs", {"jobs": [SWEEP], "next_after": 0})
    with Client() as made:
        yield made


@pytest.mark.parametrize(
    ("reference", "ids"),
    [("17[10]", [17]), ("17[12-16:2]", [18, 19, 20]), ("17[10,18]", [17, 21]), ("sweep[18]", [21]), ("17[]", [17, 18, 19, 20, 21])],
)  # fmt: skip
def test_elements_are_found_by_their_index(client, reference: str, ids: list[int]):
    assert resolve(client, [reference]) == ids


@pytest.mark.parametrize("reference", ["17[11]", "17[20]", "17[x]"])
def test_an_element_that_is_not_there_is_not_found(client, reference: str):
    with pytest.raises(NotFound):
        resolve(client, [reference])


def test_whole_arrays_are_told_from_single_jobs():
    assert split(["17[]", "5", "17[3]", "last[]"]) == (["17[]", "last[]"], ["5", "17[3]"])


def test_the_liveliest_come_first_and_the_forgotten_last():
    assert counts(ArrayView(1, 0, 9, states={"failed": 1, "running": 2, "pending": 3})) == (
        "2 running, 3 pending, 1 failed, 3 forgotten"
    )


@pytest.mark.parametrize(
    ("text", "array"),
    [
        ("100", {"count": 100}),
        ("100%10", {"count": 100, "at_most": 10}),
        ("0-8:2%3", {"indices": "0-8:2", "at_most": 3}),
    ],
)
def test_the_option_is_written_as_slurms_users_know_it(text: str, array: dict):
    assert document_of(("true",), {"array": text}, local=False)["array"] == array


def test_a_limit_that_is_no_number_is_a_usage_error():
    with pytest.raises(UsageProblem):
        document_of(("true",), {"array": "5%x"}, local=False)
