"""Arrays: one job document that stands for many jobs, which differ by an index.

The `array` of a document has `first` 0; it is a template. `expand` creates the elements from it. Their ids are
consecutive, so the id of an element determines its index and vice versa.
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
    """Which element of which array a job is. `first` is the job id of the first element; indices begin with `start` and
    grow by `step`; at most `at_most` elements are placed or running at once (0: no limit). `listed`: the indices as
    written if they are not a range (`1,3,7-9`)."""

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


def shell_reference(job: JobId, element: ArrayElement | None) -> str:
    """How a command line refers to exactly this job: the bare id of the first element means the whole array."""
    first = element is not None and element.count > 1 and element.first == job
    return f"'{job}[{element.index}]'" if first and element is not None else str(job)


@lru_cache(maxsize=256)
def parse_indices(text: str) -> Sequence[int]:
    """`0-99`, `0-98:2`, `7`, and lists of these (`1,3,7-9`): each index once, ascending. A `range` if possible."""
    parts = [_parse_range(part, text) for part in text.replace("_", "").replace(" ", "").split(",")]
    if sum(map(len, parts)) > MAX_ELEMENTS:
        raise InvalidInput(f"{sum(map(len, parts))} indices, at most {MAX_ELEMENTS} in one array")
    found = sorted({index for part in parts for index in part}) if len(parts) > 1 else parts[0]
    # A single index has step 1, so that equal arrays compare equal.
    step = found[1] - found[0] if len(found) > 1 else 1
    as_range = range(found[0], found[-1] + 1, step)
    return as_range if list(as_range) == list(found) else tuple(found)


def _parse_range(part: str, text: str) -> range:
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
    """The number of jobs that a document stands for."""
    return spec.array.count if spec.array is not None and not spec.array.first else 1


def count_jobs(specs: Sequence[JobSpec]) -> int:
    """The number of jobs that these documents stand for; InvalidInput if it is above the limit."""
    total = sum(map(element_count, specs))
    if total > max(MAX_ELEMENTS, len(specs)):
        raise InvalidInput(f"{total} jobs at once, at most {MAX_ELEMENTS}", hint="submit smaller arrays")
    return total


def iter_expanded(specs: Iterable[JobSpec], first: JobId) -> Iterator[JobSpec]:
    """The jobs that these documents stand for; the first gets the id `first`. Elements share everything except `array`."""
    next_id = first
    for spec in specs:
        template = spec.array
        if template is None or template.first:
            yield spec
            next_id += 1
            continue
        for index in template.indices:
            yield structs.replace(spec, array=structs.replace(template, first=next_id, index=index))
        next_id += template.count


def first_ids(specs: Iterable[JobSpec], first: JobId) -> tuple[JobId, ...]:
    """For each document the id of its (first) job."""
    out = []
    for spec in specs:
        out.append(first)
        first += element_count(spec)
    return tuple(out)


def same_template(one: JobSpec, other: JobSpec) -> bool:
    """Whether two specs differ only in `array`. By identity: elements share their parts, a changed spec does not."""
    shared = _fields_except_array(type(one))
    return one is other or all(map(is_, shared(one), shared(other)))


@cache
def _fields_except_array(kind: type[JobSpec]) -> Callable[[JobSpec], tuple[object, ...]]:
    return attrgetter(*(field for field in kind.__struct_fields__ if field != "array"))


def array_environment(spec: JobSpec) -> dict[str, str]:
    """Environment variables of an element's runs."""
    element = spec.array
    if element is None:
        return {}
    return {
        "HODEI_ARRAY_INDEX": str(element.index),
        "HODEI_ARRAY_COUNT": str(element.count),
        "HODEI_ARRAY_JOB": str(element.first),
    }
