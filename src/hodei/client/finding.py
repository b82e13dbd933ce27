"""Which job or which array a word means: `17`, `sweep`, `last`; of an array `17[3]`, `17[0-9]`, `17[]`.

What was submitted as an array is meant as one: its name, its number (that of its first job) and `last` stand for the
whole of it, an index in brackets for an element.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from hodei.model.array import ArrayPlace, read_indices
from hodei.model.errors import InvalidInput, NotFound
from hodei.wire.views import ArrayView, JobView

if TYPE_CHECKING:
    from hodei.client.api import Client

_REFERENCE = re.compile(r"(?P<job>[^\[\]]+)\[(?P<indices>[^\[\]]*)\]")


class ArrayId(int):
    """The number of an array's first job where the whole array is meant: what `submit` gives for an array."""


class Found(NamedTuple):
    """What a word means: an array as a whole, or else jobs by their numbers."""

    array: JobView | None
    ids: tuple[int, ...] = ()


def find(client: Client, reference: str) -> Found:
    """NotFound if there is no such job, array or element; of a number, only if it is said to be an array's."""
    written = _REFERENCE.fullmatch(reference)
    if written is not None:
        array = client.array(_any_job(client, written["job"]))
        return Found(None, _elements(array, written["indices"])) if written["indices"] else Found(array)
    if reference.isdecimal():
        return _by_number(client, int(reference))
    newest = _newest(client, reference)
    return Found(newest) if is_whole(newest) else Found(None, (newest.id,))


def is_whole(view: JobView) -> bool:
    """Whether the row stands for an array of more than one job."""
    return view.array is not None and bool(view.array.states) and view.array.count > 1


def _by_number(client: Client, id: int) -> Found:
    try:
        array = client.array(id)
    except NotFound:
        return Found(None, (id,))
    return Found(array) if array.id == id and is_whole(array) else Found(None, (id,))


def _any_job(client: Client, word: str) -> int:
    return int(word) if word.isdecimal() else _newest(client, word).id


def _newest(client: Client, word: str) -> JobView:
    found = next(iter(client.jobs(limit=1, name="" if word == "last" else word, arrays="fold")), None)
    if found is None:
        what = "there is no job yet" if word == "last" else f"no job is called {word[:80]!r}"
        raise NotFound(what, hint="see: hodei jobs -a")
    return found


def place_of(view: ArrayView) -> ArrayPlace:
    return ArrayPlace(view.first, view.index, view.count, view.at_most, view.start, view.step, view.listed)


def _elements(array: JobView, indices: str) -> tuple[int, ...]:
    assert array.array is not None
    place = place_of(array.array)
    try:
        return tuple(place.job_of(index) for part in indices.split(",") for index in read_indices(part.strip()))
    except InvalidInput as error:
        raise NotFound(error.message, hint=error.hint) from None
