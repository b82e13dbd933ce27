"""The key `array` of a job file as types; its meaning is in `array`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hodei.jobfile.types import Form, Line, about
from hodei.model.array import MOST_ELEMENTS

Elements = Annotated[int, Meta(ge=1, le=MOST_ELEMENTS)]


class ArrayForm(Form, frozen=True):
    """Either `count` or `indices`."""

    count: Annotated[Elements, about("So many jobs, with the indices 0, 1, 2...")] | None = None
    indices: (
        Annotated[Line, about("The indices: first-last, first-last:step, or a list.", "1-10", "0-98:2", "1,3,7-9")]
        | None
    ) = None
    at_most: Annotated[Elements, about("No more of them under way at once. Default: no limit.")] | None = None


ArrayKey = Annotated[
    Elements | Line | ArrayForm,
    about(
        "Many jobs from this one file, told apart by HODEI_ARRAY_INDEX: how many, or which indices.",
        100, "0-98:2", {"count": 100, "at_most": 10},
    ),
]  # fmt: skip
