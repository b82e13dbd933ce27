"""The key `array`, from what was written to the model and back again."""

from __future__ import annotations

import re
from typing import Any

from hodei.model.array import MOST_ELEMENTS, ArrayPlace
from hodei.model.errors import InvalidInput
from hodei.wire.array_forms import ArrayForm
from hodei.wire.names import shown
from hodei.wire.reading import Problems, take

_INDICES = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")


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
        found = take(problems, f"{at}.indices" if form is not None else at, read_indices, indices, range(1))
        return ArrayPlace(0, found.start, len(found), at_most, found.start, found.step)
    assert isinstance(count, int)
    return ArrayPlace(0, 0, count, at_most)


def read_indices(text: str) -> range:
    """`0-99`, `0-98:2`, `7`."""
    written = _INDICES.fullmatch(text.replace("_", ""))
    if written is None:
        raise InvalidInput(f"{shown(text)} is not a range of indices; write 0-99, or 0-98:2 for every second one")
    first, last, step = int(written[1]), int(written[2] or written[1]), int(written[3] or 1)
    if last < first or not step:
        raise InvalidInput(f"{shown(text)} names no index; write the lower one first, and a step of 1 or more")
    found = range(first, last + 1, step)
    if len(found) > MOST_ELEMENTS:
        raise InvalidInput(f"{len(found)} indices, at most {MOST_ELEMENTS} in one array")
    # A step that is never taken is no step: equal arrays are written alike.
    return range(first, found[-1] + 1, step if len(found) > 1 else 1)


def array_document(place: ArrayPlace | None) -> Any:
    """What stands in the document. Of an element: that element alone, with its index."""
    if place is None:
        return ""
    if place.first:
        return {"indices": str(place.index)}
    limit = {"at_most": place.at_most} if place.at_most else {}
    if (place.start, place.step) == (0, 1):
        return {"count": place.count} | limit
    last = place.indices[-1]
    step = f":{place.step}" if place.step > 1 else ""
    return {"indices": f"{place.start}-{last}{step}" if last > place.start else str(place.start)} | limit
