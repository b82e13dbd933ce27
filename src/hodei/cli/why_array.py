"""`hodei why` of a whole array: how its elements stand, and for each reason that some of them wait or failed, one of them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from hodei.cli import arrays
from hodei.cli.output import clean, emit_one, indent, paint
from hodei.cli.why import render

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client
    from hodei.model.explanation import Explanation

# So many elements of a state are looked at, and so many reasons are explained.
_LOOKED_AT = 1000
_REASONS = 3
_HOW = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}
_STATES = ("pending", "held", "failed")


def explain_array(server: Client, array: JobView, node: str, output: str) -> None:
    assert array.array is not None
    groups = _groups(server, array)
    told: list[tuple[str, list[JobView], Explanation]] = []
    for (_, code), members in list(groups.items())[:_REASONS]:
        told.append((code, members, server.why(members[0].id, node)))
    if not told:
        told.append(("", [], server.why(array.array.first, node)))
    if output not in ("table", "wide"):
        answer: dict[str, Any] = {
            "array": array,
            "reasons": [{"code": code, "jobs": [view.id for view in of], "why": why} for code, of, why in told],
        }
        emit_one(answer, output, name=lambda a: arrays.id_text(a["array"]), text=str)
        return
    state = paint(_HOW.get(array.state, f"is {array.state}"), array.state)
    head = f"array {array.id}[] ({clean(array.name)}) {state}: {arrays.counts(array.array)}"
    parts = [head]
    for code, members, why in told:
        if members:
            named = ", ".join(clean(arrays.name_text(view)) for view in members[:4])
            more = f" and {len(members) - 4} more" if len(members) > 4 else ""
            parts.append(f"{len(members)} {members[0].state}{f' [{clean(code)}]' if code else ''}: {named}{more}")
        parts.append(indent(render(why, wide=output == "wide")))
    if len(groups) > len(told):
        parts.append(f"… and {len(groups) - len(told)} more reasons; ask about one element: hodei why '{array.id}[…]'")
    click.echo("\n\n".join(parts))


def _groups(server: Client, array: JobView) -> dict[tuple[str, str], list[JobView]]:
    """The elements that wait or failed, by state and reason, the first element first."""
    assert array.array is not None
    groups: dict[tuple[str, str], list[JobView]] = {}
    for state in _STATES:
        if array.array.states.get(state):
            for view in sorted(islice(server.elements(array, state), _LOOKED_AT), key=lambda view: view.id):
                groups.setdefault((state, view.reason_code), []).append(view)
    return groups
