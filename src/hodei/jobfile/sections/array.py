"""The key `array`: schema, parser and renderer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from hodei.jobfile.values import Form, Line, Problems, about, try_parse
from hodei.model.array import MAX_ELEMENTS, ArrayElement, parse_indices

Elements = Annotated[int, Meta(ge=1, le=MAX_ELEMENTS)]


class ArrayForm(Form, frozen=True):
    """Either `count` or `indices`."""

    count: Annotated[Elements, about("Number of jobs, with the indices 0, 1, 2...")] | None = None
    indices: (
        Annotated[Line, about("The indices: first-last, first-last:step, or a list.", "1-10", "0-98:2", "1,3,7-9")]
        | None
    ) = None
    at_most: Annotated[Elements, about("Maximum number that are active at once. Default: no limit.")] | None = None


ArrayKey = Annotated[
    Elements | Line | ArrayForm,
    about(
        "Many jobs from one file, which differ by HODEI_ARRAY_INDEX: their number, or their indices.",
        100, "0-98:2", {"count": 100, "at_most": 10},
    ),
]  # fmt: skip


def array_of(given: int | str | ArrayForm, at: str, problems: Problems) -> ArrayElement | None:
    """The template of an array; its `first` is set when the jobs are created."""
    form = given if isinstance(given, ArrayForm) else None
    count, indices = (given, None) if isinstance(given, int) else (None, given)
    if form is not None:
        count, indices = form.count, form.indices
        if (count is None) == (indices is None):
            problems.append((at, "give either count or indices"))
            return None
    at_most = form.at_most or 0 if form is not None else 0
    if isinstance(indices, str):
        default: Sequence[int] = range(1)
        found = try_parse(problems, f"{at}.indices" if form is not None else at, parse_indices, indices, default)
        if isinstance(found, range):
            return ArrayElement(0, found.start, len(found), at_most, found.start, found.step)
        listed = indices.replace("_", "").replace(" ", "")
        return ArrayElement(0, found[0], len(found), at_most, found[0], listed=listed)
    assert isinstance(count, int)
    return ArrayElement(0, 0, count, at_most)


def array_document(place: ArrayElement | None) -> Any:
    """The value of the key. For an element: only its own index."""
    if place is None:
        return ""
    if place.first:
        return {"indices": str(place.index)}
    limit = {"at_most": place.at_most} if place.at_most else {}
    if place.listed:
        return {"indices": place.listed} | limit
    if (place.start, place.step) == (0, 1):
        return {"count": place.count} | limit
    last = place.indices[-1]
    step = f":{place.step}" if place.step > 1 else ""
    return {"indices": f"{place.start}-{last}{step}" if last > place.start else str(place.start)} | limit
