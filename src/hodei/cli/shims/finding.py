"""Which jobs are meant: by number as Slurm writes them (`17`, `17_5`, `17_[1-3]`), or by user, name, state and such."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING

from hodei.cli.shims.rows import LIVE, STATES, Given, Refused, Row
from hodei.model.array import parse_indices
from hodei.model.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client

_JOB = re.compile(r"(\d+)(?:_(?:(\d+)|\*|\[([\d,:%-]+)\]))?(?:\.\w+)?")
# Hodei's states that can be one of Slurm's.
_ASKED = {
    "PENDING": ("pending", "held"), "CONFIGURING": ("scheduled",), "RUNNING": ("running",), "SUSPENDED": ("held",),
    "COMPLETING": ("running",), "COMPLETED": ("succeeded",), "CANCELLED": ("cancelled",),
}  # fmt: skip
FILTERS = "u/user= me n/name= t/state= p/partition= A/account="


def ids_of(client: Client, text: str) -> list[int]:
    """An array by its number is all its elements. NotFound if there is no such job, Refused if it is no number."""
    found = _JOB.fullmatch(text)
    if found is None:
        raise Refused(f"error: Invalid job id {text[:80]}")
    view = client.job(int(found[1])).job
    if "_" not in text and (view.array is None or view.array.first != view.id):
        return [view.id]
    if view.array is None:
        raise NotFound(f"job {found[1]} is not an array")
    from hodei.client.job_refs import array_place

    place = array_place(view.array)
    if not found[2] and not found[3]:
        return list(range(place.first, place.last + 1))
    try:
        return [place.job_of(index) for index in parse_indices((found[2] or found[3]).partition("%")[0])]
    except InvalidInput as error:
        raise NotFound(error.message, hint=error.hint) from None


def jobs_of(client: Client, text: str) -> list[JobView]:
    """The same as they are now; elements that are forgotten already are left out."""
    ids = ids_of(client, text)
    if len(ids) == 1:
        return [client.job(ids[0]).job]
    wanted, last = set(ids), max(ids)
    # Newest first from the last on, page by page: thousands of elements are a few questions.
    views = takewhile(lambda view: view.id >= min(ids), client.jobs(after=last + 1))
    return [view for view in views if view.id in wanted][::-1]


def whole_array(client: Client, text: str) -> int:
    """The array that a bare number, or `17_*`, stands for; 0 if it is no array."""
    found = re.fullmatch(r"(\d+)(?:_\*)?", text)
    if found is None:
        return 0
    array = client.job(int(found[1])).job.array
    return array.first if array is not None and (array.first == int(found[1]) or "_" in text) else 0


def states_of(given: Given, default: Iterable[str] = LIVE, option: str = "states") -> set[str]:
    """`PD,running`, `all`."""
    asked = [one.upper() for one in given.several(option)]
    if "ALL" in asked:
        return set(STATES)
    by_letters = {short: long for long, short in STATES.items()}
    states = {by_letters.get(one, one) for one in asked}
    if unknown := states - set(STATES):
        raise Refused(f"error: Invalid job state specified: {', '.join(sorted(unknown))}")
    return states or set(default)


def rows(client: Client, given: Given, states: set[str], since: str = "") -> Iterator[Row]:
    """Those that the filters of the command line let through, newest first."""
    asked = {state for one in states for state in _ASKED.get(one, ("failed",))}
    if states >= set(STATES):
        asked = set()
    names, accounts, partitions = given.several("name"), given.several("account"), given.several("partition")
    users = [*given.several("user"), *([getpass.getuser()] if "me" in given else [])]
    for view in client.jobs(state=sorted(asked), since=since):
        row = Row(view, client)
        if (
            row.state in states
            and (not users or row.user in users or view.user in users)
            and (not names or view.name in names)
            and (not accounts or view.project in accounts)
            and (not partitions or row.partition in partitions)
        ):
            yield row
