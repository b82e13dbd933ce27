"""Arrays at the terminal: `17[]` is the whole of one, `17[3]` its element 3. What both look like in tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from hodei.cli import errors
from hodei.cli.output import clean, emit_list, fields, note
from hodei.model.errors import HodeiError, InvalidInput, NotFound
from hodei.model.lifecycle import JOB_ENDED

if TYPE_CHECKING:
    from hodei.client import Client
    from hodei.wire.views import ArrayView, JobView

_REFERENCE = re.compile(r"(?P<job>[^\[\]]+)\[(?P<indices>[^\[\]]*)\]")


def is_array(reference: str) -> bool:
    """`17[]`, `sweep[]`, `last[]`."""
    found = _REFERENCE.fullmatch(reference)
    return found is not None and not found["indices"]


def split(references: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those that mean a whole array, and the others."""
    given = list(references)
    return [one for one in given if is_array(one)], [one for one in given if not is_array(one)]


def array_of(client: Client, reference: str, resolve: Callable[[Client, str], int]) -> JobView:
    """The array that is meant, as one row."""
    return client.array(resolve(client, reference.partition("[")[0]))


def elements(client: Client, reference: str, resolve: Callable[[Client, str], int]) -> list[int] | None:
    """The jobs that `17[3]`, `17[0-9]` or `17[]` stand for; None if it is not written so."""
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        return None
    from hodei.model.array import ArrayPlace
    from hodei.wire.array import read_indices

    view = array_of(client, reference, resolve).array
    if view is None:
        raise NotFound(f"{found['job']!r} is not an array", hint="see: hodei jobs")
    place = ArrayPlace(view.first, view.index, view.count, view.at_most, view.start, view.step)
    if not found["indices"]:
        return list(range(place.first, place.last + 1))
    try:
        return [place.job_of(index) for part in found["indices"].split(",") for index in read_indices(part.strip())]
    except InvalidInput as error:
        raise NotFound(error.message, hint=error.hint) from None


# ---------------------------------------------------------------------------------------------- in words


def folded(view: JobView) -> bool:
    return view.array is not None and bool(view.array.states)


def id_text(view: JobView) -> str:
    return f"{view.id}[]" if folded(view) else str(view.id)


def name_text(view: JobView) -> str:
    if view.array is not None and not folded(view):
        return f"{view.name}[{view.array.index}]"
    return view.name or "-"


def elements_text(view: JobView) -> str:
    """Of a row that stands for an array, how its elements are doing."""
    return f"{view.array.count} elements: {counts(view.array)}" if view.array is not None and folded(view) else ""


def counts(array: ArrayView) -> str:
    """`10 running, 80 pending, 10 succeeded`, the liveliest first."""
    order = ("running", "scheduled", "suspended", "pending", "held", "succeeded", "failed", "cancelled")
    ranked = sorted(array.states.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    known = sum(array.states.values())
    told = [f"{many} {state}" for state, many in ranked if many]
    if known < array.count:
        told.append(f"{array.count - known} forgotten")
    return ", ".join(told)


def describe(view: JobView) -> str:
    assert view.array is not None
    array = view.array
    last = array.start + (array.count - 1) * array.step
    step = f" in steps of {array.step}" if array.step > 1 else ""
    text = fields([
        ("array", f"{view.id}[]"),
        ("name", view.name),
        ("state", view.state),
        ("elements", f"{array.count}, indices {array.start} to {last}{step}"),
        ("at once", f"at most {array.at_most}" if array.at_most else ""),
        ("now", counts(array)),
        ("project", view.project),
        ("user", view.user),
        ("submitted", view.submitted_at),
    ])  # fmt: skip
    return f"{text}\n\nmore: hodei jobs --elements --name {view.name}, hodei job show '{view.id}[{array.start}]'"


# ----------------------------------------------------------------------------------------------- doing


def each_array(
    client: Client,
    references: list[str],
    resolve: Callable[[Client, str], int],
    act: Callable[[int], JobView],
    output: str,
    done: str,
) -> int:
    """One verb to whole arrays; the exit code of the first failure."""
    views, code = list["JobView"](), errors.OK
    for reference in references:
        try:
            views.append(act(array_of(client, reference, resolve).id))
        except HodeiError as error:
            code = code or errors.exit_code_of(error)
            if code == errors.UNREACHABLE:
                raise
            errors.report(error)
    if output in ("table", "wide"):
        for view in views:
            name = f" ({clean(view.name)})" if view.name else ""
            click.echo(f"array {view.id}[]{name} {done}: {counts(view.array) if view.array else ''}")
    elif views:
        emit_list(views, output, (), name=id_text)
    return code


def wait_for_arrays(client: Client, ids: Iterable[int], timeout_s: float | None, *, quiet: bool = False) -> int:
    """Exit code 6 if the time was up, 10 if an element did not succeed."""
    import time

    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    code = errors.OK
    for id in ids:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        view = client.wait_array(id, left_s)
        states = view.array.states if view.array else {}
        if not quiet:
            note(f"array {view.id}[] {view.name}: {counts(view.array) if view.array else ''}")
        if not all(state in JOB_ENDED for state in states):
            return errors.TIMED_OUT
        if any(many for state, many in states.items() if state != "succeeded"):
            code = errors.JOB_FAILED
    return code
