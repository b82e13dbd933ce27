"""Job references: `17`, `sweep`, `last`; for arrays `17[3]`, `17[0-9]`, `17[]`.

The name of an array, its number (that of its first job) and `last` refer to the whole array; an index in brackets refers
to an element.
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

_ELEMENTS = re.compile(r"(?P<job>[^\[\]]+)\[(?P<indices>[^\[\]]*)\]")


class JobHandle:
    """Returned by `Client.submit`. For an array `id` is an `ArrayId`, and views are rows of the whole array."""

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


class ArrayId(int):
    """The id of an array's first job, standing for the whole array."""


Reference: TypeAlias = "int | str | JobHandle | JobView | JobDetail"


class Resolved(NamedTuple):
    """A whole array, or jobs by id."""

    array: JobView | None
    ids: tuple[int, ...] = ()


def resolve(client: Client, reference: str) -> Resolved:
    """NotFound if there is no such job, array or element. A plain number is not looked up unless it may be an array."""
    match = _ELEMENTS.fullmatch(reference)
    if match is not None:
        word = match["job"]
        array = client.array(int(word) if word.isdecimal() else _newest(client, word).id)
        return Resolved(None, _element_ids(array, match["indices"])) if match["indices"] else Resolved(array)
    if reference.isdecimal():
        return _resolve_number(client, int(reference))
    newest = _newest(client, reference)
    return Resolved(newest) if is_array(newest) else Resolved(None, (newest.id,))


def normalize(reference: Any) -> int | str:
    """The reference as an id, an `ArrayId` or text. InvalidInput for a value that cannot be a reference."""
    if isinstance(reference, JobHandle):
        return reference.id
    if isinstance(reference, JobDetail):
        reference = reference.job
    if isinstance(reference, JobView):
        return ArrayId(reference.id) if is_array(reference) else reference.id
    if isinstance(reference, str) and reference:
        return reference
    # bool is a subclass of int.
    if isinstance(reference, int) and not isinstance(reference, bool) and reference > 0:
        return reference
    raise InvalidInput(
        f"{repr(reference)[:80]} is not a job reference", hint="use a number, a name, a handle or a view of a job"
    )


def document_ref(reference: Any) -> int | str:
    """The reference as a job file writes it: an array as `17[]`, an element as `18[1]`."""
    if isinstance(reference, JobDetail):
        reference = reference.job
    if isinstance(reference, JobView) and reference.array is not None and not is_array(reference):
        return f"{reference.id}[{reference.array.index}]"
    ref = normalize(reference)
    return f"{int(ref)}[]" if isinstance(ref, ArrayId) else ref


def as_list(references: Any) -> list[Any]:
    if isinstance(references, Iterable) and not isinstance(references, str | bytes | Mapping):
        return list(references)
    return [references]


def is_array(view: JobView) -> bool:
    """Whether the row stands for an array of more than one job."""
    return view.array is not None and bool(view.array.states) and view.array.count > 1


def array_place(view: ArrayView) -> ArrayElement:
    return ArrayElement(view.first, view.index, view.count, view.at_most, view.start, view.step, view.listed)


def _resolve_number(client: Client, id: int) -> Resolved:
    try:
        array = client.array(id)
    except NotFound:
        return Resolved(None, (id,))
    return Resolved(array) if array.id == id and is_array(array) else Resolved(None, (id,))


def _newest(client: Client, name: str) -> JobView:
    found = next(iter(client.jobs(limit=1, name="" if name == "last" else name, arrays="fold")), None)
    if found is None:
        what = "there is no job yet" if name == "last" else f"no job has the name {name[:80]!r}"
        raise NotFound(what, hint="hodei jobs -a")
    return found


def _element_ids(array: JobView, indices: str) -> tuple[int, ...]:
    assert array.array is not None
    place = array_place(array.array)
    try:
        return tuple(place.job_of(index) for part in indices.split(",") for index in parse_indices(part.strip()))
    except InvalidInput as error:
        raise NotFound(error.message, hint=error.hint) from None
