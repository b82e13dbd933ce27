"""Job references on the command line: `12`, `last`, a name, `1-3`, `1,3,5-8`, `2-10:2`, `all`; for arrays `17[3]`,
`17[0-9]`, `17[]`. And the text of jobs, arrays and elements in output.

The name or number of an array refers to the whole array, see `hodei.client.job_refs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from hodei.cli.errors import UsageProblem
from hodei.cli.output import clean, counted, fields
from hodei.model.array import parse_indices
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.job import JOB_ENDED, JOB_TRANSITIONS

if TYPE_CHECKING:
    from hodei.api.views import ArrayView, JobView
    from hodei.client import Client

ACTIVE = tuple(state for state in JOB_TRANSITIONS if state not in JOB_ENDED)
_MAX_IDS = 100_000
_RANGE = r"\d[\d_]{0,18}(?:-\d[\d_]{0,18}(?::\d{1,9})?)?"
_NUMBERS = re.compile(rf"{_RANGE}(?:,{_RANGE})*")


class Targets(NamedTuple):
    """The arrays and jobs that references refer to, each once, in the order given."""

    arrays: list[JobView]
    jobs: list[int]


def resolve_targets(client: Client, references: Iterable[str]) -> Targets:
    """NotFound for an unknown name, or for `last` without any job."""
    arrays: dict[int, JobView] = {}
    jobs: dict[int, None] = {}
    for reference in references:
        array, ids = _resolve(client, reference)
        if array is not None:
            arrays[array.id] = array
        jobs |= dict.fromkeys(ids)
    return Targets(list(arrays.values()), list(jobs))


def resolve_ids(client: Client, references: Iterable[str], state: tuple[str, ...] = ()) -> list[int]:
    """Job ids, with every element of an array, or only the elements in one of these states."""
    arrays, jobs = resolve_targets(client, references)
    ids = dict.fromkeys(jobs)
    for array in arrays:
        assert array.array is not None
        every = range(array.array.first, array.array.first + array.array.count)
        ids |= dict.fromkeys(sorted(view.id for view in client.elements(array, state)) if state else every)
    return list(ids)


def resolve_job(client: Client, reference: str) -> int:
    """One job, for commands that do not take an array. A number is always a job."""
    ids = numbers(reference)
    if ids is None:
        array, found = _resolve(client, reference)
        if array is not None and array.array is not None:
            what = f"{reference!r} is an array of {array.array.count} jobs, this command takes one"
            raise UsageProblem(what, hint=f"name an element: '{reference.partition('[')[0]}[{array.array.start}]'")
        ids = list(found)
    return single_job(Targets([], ids), reference)


def single_job(targets: Targets, reference: str) -> int:
    if len(targets.jobs) != 1:
        what = f"{reference!r} names {len(targets.jobs)} jobs, this command takes one"
        raise UsageProblem(what, hint="hodei jobs")
    return targets.jobs[0]


def numbers(text: str) -> list[int] | None:
    """The ids in `1,3,5-8`; None if `text` has another form."""
    if not _NUMBERS.fullmatch(text):
        return None
    out: list[int] = []
    for part in text.replace("_", "").split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        if not int(first):
            raise NotFound("there is no job 0", hint="ids start at 1; hodei jobs -a lists all jobs")
        if last and int(last) < int(first):
            raise UsageProblem(f"{part!r} counts backwards", hint=f"write {last}-{first}")
        if step and int(step) == 0:
            raise UsageProblem(f"{part!r} has a step of 0", hint="the step after the colon is 1 or more")
        ids = range(int(first), int(last or first) + 1, int(step or 1))
        if len(out) + len(ids) > _MAX_IDS:
            hint = "use filters, see: hodei jobs --help"
            raise UsageProblem(f"{text[:60]!r} names more than {_MAX_IDS:,} jobs", hint=hint)
        out.extend(ids)
    return out


def _check_indices(reference: str) -> None:
    """`mix[a]` is a usage mistake, not an unknown element."""
    word, bracket, rest = reference.partition("[")
    if not word or not bracket or not rest.endswith("]") or rest == "]":
        return
    try:
        for part in rest[:-1].split(","):
            parse_indices(part.strip())
    except InvalidInput as error:
        raise UsageProblem(f"{reference[:80]!r}: {error.message}", hint=error.hint) from None


def _resolve(client: Client, reference: str) -> tuple[JobView | None, tuple[int, ...]]:
    from hodei.client.job_refs import resolve

    _check_indices(reference)
    found = numbers(reference)
    if found is not None and len(found) != 1:
        return None, tuple(found)
    if reference == "all":
        return None, tuple(sorted(view.id for view in client.jobs(state=ACTIVE)))
    return resolve(client, str(found[0]) if found else reference)


def is_array_row(view: JobView) -> bool:
    return view.array is not None and bool(view.array.states)


def id_text(view: JobView) -> str:
    return f"{view.id}[]" if is_array_row(view) else str(view.id)


def reference_text(view: JobView) -> str:
    """A reference to just this row: `17` alone would refer to the whole array."""
    if view.array is not None and not is_array_row(view) and view.array.count > 1:
        return f"{view.array.first}[{view.array.index}]"
    return id_text(view)


def quoted_reference(view: JobView) -> str:
    """`reference_text` for a shell: brackets are quoted."""
    text = reference_text(view)
    return f"'{text}'" if "[" in text else text


def name_text(view: JobView) -> str:
    if view.array is not None and not is_array_row(view):
        return f"{view.name}[{view.array.index}]"
    return view.name or "-"


def name_in_brackets(view: JobView) -> str:
    return f" ({clean(name_text(view))})" if view.name else ""


def element_text(view: JobView) -> str:
    """The array and index of an element."""
    if view.array is None or is_array_row(view):
        return ""
    return f"{view.array.first}[{view.array.index}], one of {view.array.count} elements"


def elements_text(view: JobView) -> str:
    """The states of the elements, for the row of an array."""
    if view.array is None or not is_array_row(view):
        return ""
    return f"{counted(view.array.count, 'element')}: {state_counts(view.array)}"


def state_counts(array: ArrayView) -> str:
    """`10 running, 80 pending, 10 succeeded`"""
    order = ("running", "scheduled", "suspended", "pending", "held", "succeeded", "failed", "cancelled")
    ranked = sorted(array.states.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    parts = [f"{count} {state}" for state, count in ranked if count]
    deleted = array.count - sum(array.states.values())
    return ", ".join([*parts, f"{deleted} deleted"] if deleted > 0 else parts)


def describe_array(view: JobView) -> str:
    from hodei.client.job_refs import array_place

    assert view.array is not None
    array = view.array
    text = fields([
        ("array", f"{view.id}[]"),
        ("name", view.name),
        ("state", view.state),
        ("elements", f"{array.count}, indices {array_place(array).index_text}"),
        ("at once", f"at most {array.at_most}" if array.at_most else ""),
        ("now", state_counts(array)),
        ("project", view.project),
        ("user", view.user),
        ("submitted", view.submitted_at),
    ])  # fmt: skip
    return f"{text}\n\nmore: hodei jobs --elements --name {view.name}, hodei job show '{view.id}[{array.start}]'"
