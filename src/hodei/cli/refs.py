"""Which jobs are meant: `12`, `last`, a name, `1-3`, `1,3,5-8`, `2-10:2`, `all`; of an array `17[3]`, `17[0-9]`, `17[]`.

The bare name or number of an array means the whole of it, as `hodei.client.job_refs` tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from hodei.cli.errors import UsageProblem
from hodei.model.array import parse_indices
from hodei.model.errors import InvalidInput
from hodei.model.job import JOB_ENDED, JOB_TRANSITIONS

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client

ACTIVE = tuple(state for state in JOB_TRANSITIONS if state not in JOB_ENDED)
_MOST = 100_000
_PART = r"\d[\d_]{0,18}(?:-\d[\d_]{0,18}(?::\d{1,9})?)?"
_NUMBERS = re.compile(rf"{_PART}(?:,{_PART})*")


class Meant(NamedTuple):
    """What the references on a command line stand for, each once, in the order given."""

    arrays: list[JobView]
    jobs: list[int]


def look_up(client: Client, references: Iterable[str]) -> Meant:
    """NotFound for a name that no job has, or `last` without any job."""
    arrays: dict[int, JobView] = {}
    jobs: dict[int, None] = {}
    for reference in references:
        array, ids = _look_up(client, reference)
        if array is not None:
            arrays[array.id] = array
        jobs |= dict.fromkeys(ids)
    return Meant(list(arrays.values()), list(jobs))


def resolve(client: Client, references: Iterable[str], state: tuple[str, ...] = ()) -> list[int]:
    """The same job by job: of an array every element, or every element in one of these states."""
    arrays, jobs = look_up(client, references)
    ids = dict.fromkeys(jobs)
    for array in arrays:
        place = array.array
        assert place is not None
        every = range(place.first, place.first + place.count)
        ids |= dict.fromkeys(sorted(view.id for view in client.elements(array, state)) if state else every)
    return list(ids)


def resolve_job(client: Client, reference: str) -> int:
    """The one job that is meant, for a command that cannot take a whole array. A number is that very job."""
    ids = numbers(reference)
    if ids is None:
        array, found = _look_up(client, reference)
        if array is not None and array.array is not None:
            what = f"{reference!r} is an array of {array.array.count} jobs, this command takes one"
            raise UsageProblem(what, hint=f"name an element: '{reference.partition('[')[0]}[{array.array.start}]'")
        ids = list(found)
    return only(Meant([], ids), reference)


def only(meant: Meant, reference: str) -> int:
    if len(meant.jobs) != 1:
        what = f"{reference!r} names {len(meant.jobs)} jobs, this command takes one"
        raise UsageProblem(what, hint="see: hodei jobs")
    return meant.jobs[0]


def numbers(text: str) -> list[int] | None:
    """The ids in `1,3,5-8`; None if `text` is not written so."""
    if not _NUMBERS.fullmatch(text):
        return None
    out: list[int] = []
    for part in text.replace("_", "").split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        if last and int(last) < int(first):
            raise UsageProblem(f"{part!r} counts backwards", hint=f"write {last}-{first}")
        if step and int(step) == 0:
            raise UsageProblem(f"{part!r} never gets on", hint="the step after the colon is 1 or more")
        span = range(int(first), int(last or first) + 1, int(step or 1))
        if len(out) + len(span) > _MOST:
            raise UsageProblem(
                f"{text[:60]!r} names more than {_MOST:,} jobs", hint="use filters, see: hodei jobs --help"
            )
        out.extend(span)
    return out


def _check_indices(reference: str) -> None:
    """`mix[a]` can name no element of any array, so that is a mistake in writing and nothing to look for."""
    word, bracket, rest = reference.partition("[")
    if not word or not bracket or not rest.endswith("]") or rest == "]":
        return
    try:
        for part in rest[:-1].split(","):
            parse_indices(part.strip())
    except InvalidInput as error:
        raise UsageProblem(f"{reference[:80]!r}: {error.message}", hint=error.hint) from None


def _look_up(client: Client, reference: str) -> tuple[JobView | None, tuple[int, ...]]:
    from hodei.client.job_refs import resolve as resolve_reference

    _check_indices(reference)
    found = numbers(reference)
    if found is not None and len(found) != 1:
        return None, tuple(found)
    if reference == "all":
        return None, tuple(sorted(view.id for view in client.jobs(state=ACTIVE)))
    return resolve_reference(client, str(found[0]) if found else reference)
