"""Arrays: one job document that stands for many jobs, told apart by an index.

A document's own place has `first` 0: it is a mould. `expand` makes the elements from it, with ids that follow each other,
so that the id of an element tells its index and the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from operator import attrgetter, is_
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId

if TYPE_CHECKING:
    from hodei.model.job import JobSpec

MAX_ELEMENTS = 100_000
_INDICES = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")


class ArrayElement(Struct, frozen=True, omit_defaults=True, gc=False):
    """Which element of which array a job is. `first` is the job of the first element; indices begin with `start` and
    grow by `step`; no more than `at_most` elements are under way at once (0: as many as there is room for).
    `listed`: the indices as they were written, where they are no plain range (`1,3,7-9`)."""

    first: JobId
    index: int
    count: int
    at_most: int = 0
    start: int = 0
    step: int = 1
    listed: str = ""

    @property
    def last(self) -> JobId:
        return self.first + self.count - 1

    @property
    def indices(self) -> Sequence[int]:
        if self.listed:
            return parse_indices(self.listed)
        return range(self.start, self.start + self.count * self.step, self.step)

    def job_of(self, index: int) -> JobId:
        """InvalidInput if the array has no such element."""
        if index not in self.indices:
            raise InvalidInput(f"array {self.first} has no element {index}", hint=f"its indices are {self.index_text}")
        return self.first + self.indices.index(index)

    @property
    def index_text(self) -> str:
        """The indices for people."""
        if self.listed:
            return self.listed
        return f"{self.start} to {self.indices[-1]}" + (f" in steps of {self.step}" if self.step > 1 else "")


def shell_reference(job: JobId, place: ArrayElement | None) -> str:
    """How a command line names this very job: the bare number of an array's first element means the whole array."""
    first = place is not None and place.count > 1 and place.first == job
    return f"'{job}[{place.index}]'" if first and place is not None else str(job)


@lru_cache(maxsize=256)
def parse_indices(text: str) -> Sequence[int]:
    """`0-99`, `0-98:2`, `7`, and lists of these (`1,3,7-9`): each index once, in ascending order. A range if it is one."""
    parts = [_read_range(part, text) for part in text.replace("_", "").replace(" ", "").split(",")]
    if sum(map(len, parts)) > MAX_ELEMENTS:
        raise InvalidInput(f"{sum(map(len, parts))} indices, at most {MAX_ELEMENTS} in one array")
    found = sorted({index for part in parts for index in part}) if len(parts) > 1 else parts[0]
    # A step that is never taken is no step: equal arrays are written alike.
    step = found[1] - found[0] if len(found) > 1 else 1
    plain = range(found[0], found[-1] + 1, step)
    return plain if list(plain) == list(found) else tuple(found)


def _read_range(part: str, text: str) -> range:
    written = _INDICES.fullmatch(part)
    if written is None:
        raise InvalidInput(
            f"{text[:80]!r} is not a range of indices; write 0-99, 0-98:2 for every second one, or a list 1,3,7-9"
        )
    first, last, step = int(written[1]), int(written[2] or written[1]), int(written[3] or 1)
    if last < first or not step:
        raise InvalidInput(f"{text[:80]!r} names no index; write the lower one first, and a step of 1 or more")
    return range(first, last + 1, step)


def element_count(spec: JobSpec) -> int:
    """How many jobs a document stands for."""
    return spec.array.count if spec.array is not None and not spec.array.first else 1


def expand(specs: Sequence[JobSpec], first: JobId) -> Sequence[JobSpec]:
    """The jobs that these documents stand for, when the first of them will have the id `first`.

    Elements share all but their place; InvalidInput if they are more than anyone may ask for at once."""
    if all(spec.array is None for spec in specs):
        return specs
    count_jobs(specs)
    return list(iter_expanded(specs, first))


def count_jobs(specs: Sequence[JobSpec]) -> int:
    """How many jobs these documents stand for; InvalidInput if they are more than anyone may ask for at once."""
    total = sum(map(element_count, specs))
    if total > max(MAX_ELEMENTS, len(specs)):
        raise InvalidInput(f"{total} jobs at once, at most {MAX_ELEMENTS}", hint="submit smaller arrays")
    return total


def iter_expanded(specs: Iterable[JobSpec], first: JobId) -> Iterator[JobSpec]:
    """The same one by one."""
    own = first
    for spec in specs:
        mould = spec.array
        if mould is None or mould.first:
            yield spec
            own += 1
            continue
        for index in mould.indices:
            yield structs.replace(spec, array=structs.replace(mould, first=own, index=index))
        own += mould.count


def first_ids(specs: Iterable[JobSpec], first: JobId) -> tuple[JobId, ...]:
    """For each document the id of the (first) job that it stands for."""
    out = []
    for spec in specs:
        out.append(first)
        first += element_count(spec)
    return tuple(out)


def same_template(one: JobSpec, other: JobSpec) -> bool:
    """Whether two elements differ in their place alone. Elements share what they have in common, so it is told by
    identity; one that was changed since is another."""
    shared = _all_but_the_place(type(one))
    return one is other or all(map(is_, shared(one), shared(other)))


@cache
def _all_but_the_place(kind: type[JobSpec]) -> Callable[[JobSpec], tuple[object, ...]]:
    return attrgetter(*(field for field in kind.__struct_fields__ if field != "array"))


def array_environment(spec: JobSpec) -> dict[str, str]:
    """What an element's runs are told about it."""
    place = spec.array
    if place is None:
        return {}
    return {
        "HODEI_ARRAY_INDEX": str(place.index),
        "HODEI_ARRAY_COUNT": str(place.count),
        "HODEI_ARRAY_JOB": str(place.first),
    }
