"""The key `array`, from what was written to the model and back again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hodei.jobfile.sections.array_schema import ArrayForm
from hodei.jobfile.values import Problems, take
from hodei.model.array import ArrayPlace, read_indices


def array_of(given: int | str | ArrayForm, at: str, problems: Problems) -> ArrayPlace | None:
    """The mould of an array; its `first` is not known yet."""
    form = given if isinstance(given, ArrayForm) else None
    count, indices = (given, None) if isinstance(given, int) else (None, given)
    if form is not None:
        count, indices = form.count, form.indices
        if (count is None) == (indices is None):
            problems.append((at, "give either count or indices"))
            return None
    at_most = form.at_most or 0 if form is not None else 0
    if isinstance(indices, str):
        nothing: Sequence[int] = range(1)
        found = take(problems, f"{at}.indices" if form is not None else at, read_indices, indices, nothing)
        if isinstance(found, range):
            return ArrayPlace(0, found.start, len(found), at_most, found.start, found.step)
        listed = indices.replace("_", "").replace(" ", "")
        return ArrayPlace(0, found[0], len(found), at_most, found[0], listed=listed)
    assert isinstance(count, int)
    return ArrayPlace(0, 0, count, at_most)


def array_document(place: ArrayPlace | None) -> Any:
    """What stands in the document. Of an element: that element alone, with its index."""
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
