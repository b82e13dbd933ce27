"""Which job or which array a word means: `17`, `sweep`, `last`; of an array `17[3]`, `17[0-9]`, `17[]`.

What was submitted as an array is meant as one: its name, its number (that of its first job) and `last` stand for the
whole of it, an index in brackets for an element.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hodei.api.views import ArrayView, JobDetail, JobView
from hodei.model.array import ArrayElement, parse_indices
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.explanation import Explanation

if TYPE_CHECKING:
    from hodei.client.api import Client


# ---------------------------------------------------------------------------------------------- handle
# A job or an array that was handed in, and what one does with it next.


class JobHandle:
    """Made by `Client.submit`; every method is one or more requests. What was submitted as an array is meant as a whole:
    `id` is an `ArrayId` then, and the views are those of the array."""

    def __init__(self, client: Client, id: int, name: str = "") -> None:
        self._client = client
        self.id = id
        self.name = name

    def __repr__(self) -> str:
        what = f"array {self.id}[]" if isinstance(self.id, ArrayId) else f"job {self.id}"
        return f"<{what}{f' ({self.name})' if self.name else ''} on {self._client.address}>"

    def wait(self, timeout_s: float | None = None) -> JobView:
        return self._client.wait(self.id, timeout_s)[0]

    def logs(self, follow: bool = False, stream: str = "stdout", member: int = 0) -> Iterator[bytes]:
        return self._client.logs(self.id, follow, stream, member)

    def cancel(self, reason: str = "") -> JobView:
        return self._client.cancel(self.id, reason)

    def why(self, node: str = "") -> Explanation:
        return self._client.why(self.id, node)

    def refresh(self) -> JobView:
        return self._client.job(self.id).job


# ----------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from hodei.client.api import Client

_REFERENCE = re.compile(r"(?P<job>[^\[\]]+)\[(?P<indices>[^\[\]]*)\]")


class ArrayId(int):
    """The number of an array's first job where the whole array is meant: what `submit` gives for an array."""


# A number is one job; what `submit` gave for an array is the array; a word is what the command line takes it for; a handle
# or a view is the job or the array that it is of.
Reference: TypeAlias = "int | str | JobHandle | JobView | JobDetail"
_TAKEN = "a number, a name, what `submit` gave, or a view of a job"


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


def plain(reference: Any) -> int | str:
    """The same reference as a number, an `ArrayId` or a word. InvalidInput for what can mean no job."""

    if isinstance(reference, JobHandle):
        return reference.id
    if isinstance(reference, JobDetail):
        reference = reference.job
    if isinstance(reference, JobView):
        return ArrayId(reference.id) if is_whole(reference) else reference.id
    if isinstance(reference, str) and reference:
        return reference
    # True and False are numbers to Python.
    if isinstance(reference, int) and not isinstance(reference, bool) and reference > 0:
        return reference
    shown = repr(reference)[:80]
    raise InvalidInput(f"{shown} means no job", hint=f"a job is {_TAKEN}")


def written(reference: Any) -> int | str:
    """How a document tells of it: a whole array as `17[]`, the view of an element as `18[1]`."""
    if isinstance(reference, JobDetail):
        reference = reference.job
    if isinstance(reference, JobView) and reference.array is not None and not is_whole(reference):
        return f"{reference.id}[{reference.array.index}]"
    found = plain(reference)
    return f"{int(found)}[]" if isinstance(found, ArrayId) else found


def several(references: Any) -> list[Any]:
    """One reference or many, as a list."""
    if isinstance(references, Iterable) and not isinstance(references, str | bytes | Mapping):
        return list(references)
    return [references]


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


def place_of(view: ArrayView) -> ArrayElement:
    return ArrayElement(view.first, view.index, view.count, view.at_most, view.start, view.step, view.listed)


def _elements(array: JobView, indices: str) -> tuple[int, ...]:
    assert array.array is not None
    place = place_of(array.array)
    try:
        return tuple(place.job_of(index) for part in indices.split(",") for index in parse_indices(part.strip()))
    except InvalidInput as error:
        raise NotFound(error.message, hint=error.hint) from None
