"""From names to numbers: what a name means, what is refused, and how a ring is named."""

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


def test_else_it_means_what_was_found_in_the_project() -> None:
    specs = [spec("a", "old", 7), spec("b", "a", project="other")]
    assert references(specs).names == {("default", "old"), ("other", "a")}
    assert references(specs).jobs == {7}
    found = ResolvedReferences({("default", "old"): [3], ("other", "a"): [4]}, {7: "seven"})
    assert waits_for(specs, found) == [[3, 7], [4]]
    assert resolve_names(specs, 100, found)[0].after.of[1].name == "seven"


def test_an_array_is_waited_for_as_a_whole() -> None:
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
        pytest.param(7, [7, 8, 9], id="the number of its first job is the whole"),
        pytest.param("7[]", [7, 8, 9], id="brackets"),
        pytest.param("8[]", [7, 8, 9], id="any number before the brackets"),
        pytest.param("old[]", [7, 8, 9], id="the name with brackets"),
        pytest.param("old", [7, 8, 9], id="the name"),
        pytest.param(8, [8], id="the number of another element is that one"),
        pytest.param("7[10]", [7], id="its first element alone"),
        pytest.param("8[20]", [9], id="an index, not a place"),
        pytest.param("old[10,20]", [7, 9], id="several"),
    ],
)
def test_an_array_of_the_past_is_meant_as_a_whole_or_by_index(written: str | int, means: list[int]) -> None:
    assert waits_for([spec("next", written)], IN_STORE) == [means]


def test_an_element_of_the_same_submission_and_nothing_twice() -> None:
    many = spec("many", array=ArrayElement(0, 0, 3))
    assert waits_for([many, spec("sum", "many[1]", "many", "many[2]")]) == [[], [101, 100, 102]]
    (_, one) = resolve_names([many, spec("sum", "many[1]")], 100, ResolvedReferences())
    # It is written back as this element, not as the whole array or as another one.
    assert one.after.of == (Dependency(job=101, name="many", elements="[1]"),)
    assert str(one.after.of[0]) == "job 101 (many[1]) to succeed"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        pytest.param("7[3]", "array 7 has no element 3", id="no such index"),
        pytest.param("old[0-9]", "array 7 has no element 0", id="no such indices"),
        pytest.param("5[]", "5 is not an array", id="not an array"),
        pytest.param("one[0]", "one is not an array", id="not an array by name"),
    ],
)
def test_elements_that_are_not_there_are_refused(written: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        waits_for([spec("next", written)], IN_STORE)
    assert refused.value.code == "UNKNOWN_DEPENDENCY"
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("specs", "code", "says"),
    [
        pytest.param([spec("a", "a")], "DEPENDENCY_CYCLE", "a -> a", id="itself"),
        pytest.param([spec("a", "b"), spec("b", "a")], "DEPENDENCY_CYCLE", "a -> b -> a", id="two"),
        pytest.param(
            [spec("x", "a"), spec("a", "b"), spec("b", "c"), spec("c", "a")],
            "DEPENDENCY_CYCLE", "a -> b -> c -> a", id="a ring with a tail, which is left out",
        ),
        pytest.param(
            [spec("train", "biuld"), spec("build")],
            "UNKNOWN_DEPENDENCY", "document 1 (train): after: there is no job 'biuld' in project default (did you mean 'build'?)",
            id="a slip",
        ),
        pytest.param([spec("a", 9)], "UNKNOWN_DEPENDENCY", "a: after: there is no job 9", id="a number that nobody has"),
        pytest.param([spec("a", "b"), spec("b"), spec("b")], "INVALID", "2 documents are called 'b'", id="two of a name"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_named(specs: list[JobSpec], code: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        waits_for(specs)
    assert refused.value.code == code
    assert says in refused.value.message


def test_a_long_chain_is_no_ring_and_a_long_ring_is_named_in_short() -> None:
    chain = [spec(f"j{i}", f"j{i + 1}") for i in range(5000)] + [spec("j5000")]
    assert waits_for(chain)[0] == [101]
    with pytest.raises(InvalidInput) as refused:
        waits_for([*chain[:-1], spec("j5000", "j0")])
    assert len(refused.value.message) < 400
    assert "(4982 more)" in refused.value.message
