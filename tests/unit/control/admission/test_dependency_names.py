"""Dependency names are resolved to job ids: names, ids, array elements; unknown names and cycles are refused."""

from __future__ import annotations

import pytest

from builders import a_job_spec
from hodei.control.admission.dependency_names import ResolvedReferences, references, resolve_names
from hodei.model.array import ArrayElement
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec


def _dependency(written: str | int) -> Dependency:
    if isinstance(written, int):
        return Dependency(job=written)
    word, bracket, indices = written.partition("[")
    elements = bracket + indices
    return (
        Dependency(job=int(word), elements=elements) if word.isdecimal() else Dependency(name=word, elements=elements)
    )


def spec(name: str, *after: str | int, project: str = "default", array: ArrayElement | None = None) -> JobSpec:
    of = tuple(_dependency(one) for one in after)
    return a_job_spec(name, project=project, after=Dependencies(of), array=array)


def waits_for(specs: list[JobSpec], found: ResolvedReferences | None = None) -> list[list[int]]:
    return [[one.job for one in each.after.of] for each in resolve_names(specs, 100, found or ResolvedReferences())]


def test_a_name_means_a_document_of_the_same_submission_in_any_order() -> None:
    assert waits_for([spec("join", "left", "right"), spec("left", "start"), spec("right", "start"), spec("start")]) == [
        [101, 102], [103], [103], [],
    ]  # fmt: skip


def test_a_name_outside_the_submission_means_a_job_of_the_project() -> None:
    specs = [spec("a", "old", 7), spec("b", "a", project="other")]
    assert references(specs).names == {("default", "old"), ("other", "a")}
    assert references(specs).jobs == {7}
    found = ResolvedReferences({("default", "old"): [3], ("other", "a"): [4]}, {7: "seven"})
    assert waits_for(specs, found) == [[3, 7], [4]]
    assert resolve_names(specs, 100, found)[0].after.of[1].name == "seven"


def test_the_name_of_an_array_means_all_its_elements() -> None:
    many = spec("many", array=ArrayElement(0, 0, 3))
    assert waits_for([many, spec("sum", "many"), spec("then", "sum")]) == [[], [100, 101, 102], [103]]


ARRAY = ArrayElement(7, 0, 3, start=10, step=5)
IN_STORE = ResolvedReferences(
    {("default", "old"): range(7, 10), ("default", "one"): [5]},
    {5: "one", 7: "old", 8: "old"},
    arrays={7: ARRAY, 8: ArrayElement(7, 15, 3, start=10, step=5)},
)


@pytest.mark.parametrize(
    ("written", "means"),
    [
        pytest.param(7, [7, 8, 9], id="the id of its first job means all"),
        pytest.param("7[]", [7, 8, 9], id="brackets"),
        pytest.param("8[]", [7, 8, 9], id="brackets after the id of any element"),
        pytest.param("old[]", [7, 8, 9], id="the name with brackets"),
        pytest.param("old", [7, 8, 9], id="the name"),
        pytest.param(8, [8], id="the id of another element means that one"),
        pytest.param("7[10]", [7], id="its first element alone"),
        pytest.param("8[20]", [9], id="an index, not a position"),
        pytest.param("old[10,20]", [7, 9], id="several"),
    ],
)
def test_an_earlier_array_is_referred_to_as_a_whole_or_by_index(written: str | int, means: list[int]) -> None:
    assert waits_for([spec("next", written)], IN_STORE) == [means]


def test_an_element_of_the_same_submission_is_resolved_without_duplicates() -> None:
    many = spec("many", array=ArrayElement(0, 0, 3))
    assert waits_for([many, spec("sum", "many[1]", "many", "many[2]")]) == [[], [101, 100, 102]]
    (_, one) = resolve_names([many, spec("sum", "many[1]")], 100, ResolvedReferences())
    # The dependency still names this element, not the whole array.
    assert one.after.of == (Dependency(job=101, name="many", elements="[1]"),)
    assert str(one.after.of[0]) == "job 101 (many[1]) to succeed"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        pytest.param("7[3]", "array 7 has no element 3", id="no such index"),
        pytest.param("old[0-9]", "array 7 has no element 0", id="no such indices"),
        pytest.param("5[]", "5 is not an array", id="not an array"),
        pytest.param("one[0]", "one is not an array", id="not an array by name"),
    ],
)
def test_unknown_elements_are_refused(written: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        waits_for([spec("next", written)], IN_STORE)
    assert refusal.value.code == "UNKNOWN_DEPENDENCY"
    assert message in refusal.value.message


@pytest.mark.parametrize(
    ("specs", "code", "message"),
    [
        pytest.param([spec("a", "a")], "DEPENDENCY_CYCLE", "a -> a", id="itself"),
        pytest.param([spec("a", "b"), spec("b", "a")], "DEPENDENCY_CYCLE", "a -> b -> a", id="two"),
        pytest.param(
            [spec("x", "a"), spec("a", "b"), spec("b", "c"), spec("c", "a")],
            "DEPENDENCY_CYCLE", "a -> b -> c -> a", id="a cycle with a tail, which is left out",
        ),
        pytest.param(
            [spec("train", "biuld"), spec("build")],
            "UNKNOWN_DEPENDENCY", "document 1 (train): after: there is no job 'biuld' in project default (did you mean 'build'?)",
            id="a typo",
        ),
        pytest.param([spec("a", 9)], "UNKNOWN_DEPENDENCY", "a: after: there is no job 9", id="an unknown id"),
        pytest.param([spec("a", "b"), spec("b"), spec("b")], "INVALID", "2 documents are called 'b'", id="two of a name"),
    ],
)  # fmt: skip
def test_unknown_names_and_cycles_are_refused_with_a_message(specs: list[JobSpec], code: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        waits_for(specs)
    assert refusal.value.code == code
    assert message in refusal.value.message


def test_a_long_chain_is_accepted_and_a_long_cycle_is_shortened_in_the_message() -> None:
    chain = [spec(f"j{i}", f"j{i + 1}") for i in range(5000)] + [spec("j5000")]
    assert waits_for(chain)[0] == [101]
    with pytest.raises(InvalidInput) as refusal:
        waits_for([*chain[:-1], spec("j5000", "j0")])
    assert len(refusal.value.message) < 400
    assert "(4982 more)" in refusal.value.message
