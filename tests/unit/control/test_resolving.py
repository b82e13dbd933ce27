"""From names to numbers: what a name means, what is refused, and how a ring is named."""

from __future__ import annotations

import pytest

from builders import a_job_spec
from hodei.control.resolving import Found, asked, resolved
from hodei.model.array import ArrayPlace
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec


def spec(name: str, *after: str | int, project: str = "default", array: ArrayPlace | None = None) -> JobSpec:
    of = tuple(Dependency(job=one) if isinstance(one, int) else Dependency(name=one) for one in after)
    return a_job_spec(name, project=project, after=Dependencies(of), array=array)


def waits_for(specs: list[JobSpec], found: Found | None = None) -> list[list[int]]:
    return [[one.job for one in each.after.of] for each in resolved(specs, 100, found or Found())]


def test_a_name_means_a_document_of_the_same_submission_in_any_order() -> None:
    assert waits_for([spec("join", "left", "right"), spec("left", "start"), spec("right", "start"), spec("start")]) == [
        [101, 102], [103], [103], [],
    ]  # fmt: skip


def test_else_it_means_what_was_found_in_the_project() -> None:
    specs = [spec("a", "old", 7), spec("b", "a", project="other")]
    assert asked(specs).names == {("default", "old"), ("other", "a")}
    assert asked(specs).jobs == {7}
    found = Found({("default", "old"): [3], ("other", "a"): [4]}, {7: "seven"})
    assert waits_for(specs, found) == [[3, 7], [4]]
    assert resolved(specs, 100, found)[0].after.of[1].name == "seven"


def test_an_array_is_waited_for_as_a_whole() -> None:
    many = spec("many", array=ArrayPlace(0, 0, 3))
    assert waits_for([many, spec("sum", "many"), spec("then", "sum")]) == [[], [100, 101, 102], [103]]


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
