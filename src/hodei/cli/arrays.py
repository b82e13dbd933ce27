"""What arrays and their elements look like at the terminal. Which of them is meant is told by `refs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hodei.cli.output import fields

if TYPE_CHECKING:
    from hodei.api.views import ArrayView, JobView

# ---------------------------------------------------------------------------------------------- in words


def folded(view: JobView) -> bool:
    return view.array is not None and bool(view.array.states)


def id_text(view: JobView) -> str:
    return f"{view.id}[]" if folded(view) else str(view.id)


def reference_text(view: JobView) -> str:
    """What to write on a command line to mean just this row: a bare `17` would mean the whole array."""
    if view.array is not None and not folded(view) and view.array.count > 1:
        return f"{view.array.first}[{view.array.index}]"
    return id_text(view)


def name_text(view: JobView) -> str:
    if view.array is not None and not folded(view):
        return f"{view.name}[{view.array.index}]"
    return view.name or "-"


def place_text(view: JobView) -> str:
    """Of an element, which one of which array it is."""
    if view.array is None or folded(view):
        return ""
    return f"{view.array.first}[{view.array.index}], one of {view.array.count} elements"


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
    from hodei.client.job_refs import array_place

    assert view.array is not None
    array = view.array
    text = fields([
        ("array", f"{view.id}[]"),
        ("name", view.name),
        ("state", view.state),
        ("elements", f"{array.count}, indices {array_place(array).index_text}"),
        ("at once", f"at most {array.at_most}" if array.at_most else ""),
        ("now", counts(array)),
        ("project", view.project),
        ("user", view.user),
        ("submitted", view.submitted_at),
    ])  # fmt: skip
    return f"{text}\n\nmore: hodei jobs --elements --name {view.name}, hodei job show '{view.id}[{array.start}]'"
