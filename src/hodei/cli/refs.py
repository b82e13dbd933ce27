"""Which jobs are meant: `12`, `last`, a name, `1-3`, `1,3,5-8`, `2-10:2`, `all`; of an array `17[3]`, `17[0-9]`, `17[]`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hodei.cli.arrays import elements
from hodei.cli.errors import UsageProblem
from hodei.model.errors import NotFound
from hodei.model.lifecycle import JOB_ENDED, JOB_STEPS

if TYPE_CHECKING:
    from hodei.client import Client

ACTIVE = tuple(state for state in JOB_STEPS if state not in JOB_ENDED)
_MOST = 100_000
_PART = r"\d[\d_]{0,18}(?:-\d[\d_]{0,18}(?::\d{1,9})?)?"
_NUMBERS = re.compile(rf"{_PART}(?:,{_PART})*")


def resolve(client: Client, references: Iterable[str]) -> list[int]:
    """The ids, each once, in the order given. NotFound for a name that no job has, or `last` without any job."""
    ids: dict[int, None] = {}
    for reference in references:
        for id in _resolve_one(client, reference):
            ids[id] = None
    return list(ids)


def resolve_job(client: Client, reference: str) -> int:
    """The one job that is meant."""
    ids = resolve(client, [reference])
    if len(ids) != 1:
        raise UsageProblem(f"{reference!r} names {len(ids)} jobs, this command takes one", hint="see: hodei jobs")
    return ids[0]


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


def _resolve_one(client: Client, reference: str) -> list[int]:
    found = numbers(reference)
    if found is not None:
        return found
    of_array = elements(client, reference, resolve_job)
    if of_array is not None:
        return of_array
    if reference == "all":
        return sorted(view.id for view in client.jobs(state=ACTIVE))
    newest = next(iter(client.jobs(limit=1, name="" if reference == "last" else reference)), None)
    if newest is None:
        what = "there is no job yet" if reference == "last" else f"no job is called {reference[:80]!r}"
        raise NotFound(what, hint="see: hodei jobs -a")
    return [newest.id]
