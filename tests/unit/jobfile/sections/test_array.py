"""The key `array`: parsing and rendering."""

from __future__ import annotations

import pytest
from msgspec import structs

from builders import a_job
from hodei.jobfile.parse import parse_job
from hodei.jobfile.render import folded_view, job_document, job_view
from hodei.model.array import ArrayElement, iter_expanded
from hodei.model.errors import InvalidInput

JOB = {"command": ["true"]}


@pytest.mark.parametrize(
    ("value", "expected", "canonical"),
    [
        pytest.param(100, ArrayElement(0, 0, 100), {"count": 100}, id="a count"),
        pytest.param({"count": 9, "at_most": 2}, ArrayElement(0, 0, 9, 2), {"count": 9, "at_most": 2}, id="with a limit"),
        pytest.param("0-98:2", ArrayElement(0, 0, 50, 0, 0, 2), {"indices": "0-98:2"}, id="every second"),
        pytest.param("0-99:2", ArrayElement(0, 0, 50, 0, 0, 2), {"indices": "0-98:2"}, id="an end that is not an index"),
        pytest.param("5-7", ArrayElement(0, 5, 3, 0, 5), {"indices": "5-7"}, id="from five"),
        pytest.param("7", ArrayElement(0, 7, 1, 0, 7), {"indices": "7"}, id="one"),
        pytest.param("0-9", ArrayElement(0, 0, 10), {"count": 10}, id="from zero is a count"),
        pytest.param({"indices": "1-4:3", "at_most": 1}, ArrayElement(0, 1, 2, 1, 1, 3), {"indices": "1-4:3", "at_most": 1}, id="all"),
        pytest.param("1,3,7-9", ArrayElement(0, 1, 5, 0, 1, 1, "1,3,7-9"), {"indices": "1,3,7-9"}, id="a list"),
        pytest.param("9, 3, 3,0-8:4", ArrayElement(0, 0, 5, 0, 0, 1, "9,3,3,0-8:4"), {"indices": "9,3,3,0-8:4"}, id="out of order"),
        pytest.param("1,2,3-5", ArrayElement(0, 1, 5, 0, 1), {"indices": "1-5"}, id="a list that is a range"),
    ],
)  # fmt: skip
def test_arrays_are_parsed_and_rendered_back(value, expected: ArrayElement, canonical):
    spec = parse_job(JOB | {"array": value})
    assert spec.array == expected
    document = job_document(spec)
    assert document["spec"]["array"] == canonical
    assert parse_job(document) == spec


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "out of range"), (100_001, "out of range"), ("x", "not a range"), ("5-3", "names no index"),
        ("1,,2", "not a range"), ("1,5-3", "names no index"), ("0-60000,1-60000", "at most 100000"),
        ("0-4:0", "names no index"), ("0-100000", "at most 100000"), ({"at_most": 3}, "either count or indices"),
        ({"count": 1, "indices": "1"}, "either count or indices"), ({"count": 1, "at_most": 0}, "out of range"),
    ],
)  # fmt: skip
def test_an_invalid_array_is_refused(value, message: str):
    with pytest.raises(InvalidInput, match=message):
        parse_job(JOB | {"array": value})


def test_elements_of_a_list_have_its_indices_and_are_found_by_them():
    elements = list(iter_expanded([parse_job(JOB | {"array": "9,1,3,7-9:2"})], 17))
    assert [spec.array.index for spec in elements] == [1, 3, 7, 9]
    assert elements[2].array.job_of(7) == 19
    with pytest.raises(InvalidInput, match="no element 2"):
        elements[0].array.job_of(2)
    assert parse_job(job_document(elements[2])).array == ArrayElement(0, 7, 1, 0, 7)


def test_the_document_of_an_element_parses_to_that_element():
    *_, spec, _ = iter_expanded([parse_job(JOB | {"array": "0-8:2"})], 17)
    parsed = parse_job(job_document(spec))
    assert parsed.array == ArrayElement(0, 6, 1, 0, 6)
    assert structs.replace(parsed, array=None) == structs.replace(spec, array=None)


def test_a_folded_array_has_the_id_of_its_first_job_and_its_most_active_state():
    *_, spec = iter_expanded([parse_job(JOB | {"array": 3})], 17)
    job = a_job(19, spec=spec)
    assert job_view(job).array.index == 2
    row = folded_view(job, {"running": 1, "pending": 1, "failed": 1})
    assert (row.id, row.state, row.array.states) == (17, "running", {"running": 1, "pending": 1, "failed": 1})
    assert folded_view(job, {"succeeded": 2, "failed": 1}).state == "failed"
