"""The key `escalation` of a job, from what was written to the model and back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from hodei.jobfile.names import did_you_mean, shown
from hodei.jobfile.types import Duration, Form, about
from hodei.jobfile.values import Problems, duration, take
from hodei.model.errors import InvalidInput
from hodei.model.escalation_state import priority_class_name
from hodei.model.job import PRIORITY_CLASSES, Escalation, JobSpec
from hodei.model.resources import format_duration

# ----------------------------------------------------------------------------------- escalation schema
# What a job says for the case that it waits too long, as people write it.


class EscalationForm(Form, frozen=True):
    """What may be done about a job that waits too long. What is not said is as the server's configuration says."""

    relax: (
        Annotated[
            list[Literal["spread", "topology", "backend"]],
            Meta(max_length=3),
            about("Rules of it that may count as wishes then.", ["spread", "topology"]),
        ]
        | None
    ) = None
    relax_after: Annotated[Duration, about("How long it waits before they do.", "10m")] | None = None
    promote_after: Annotated[Duration, about("How long it waits for each step up in priority.", "30m")] | None = None
    promote_to: Annotated[str | int, about("The highest priority that it goes up to.", "high")] | None = None


EscalationKey = Annotated[
    EscalationForm,
    about(
        "What may be done if it waits too long.", {"relax": ["spread"], "relax_after": "10m", "promote_after": "30m"}
    ),
]


# ----------------------------------------------------------------------------------------------------

NOTHING = JobSpec("", ()).escalation  # the very same, so that one look tells that nothing was said


def escalation(form: EscalationForm, at: str, problems: Problems) -> Escalation:
    relax = tuple(dict.fromkeys(form.relax or ()))
    if form.relax_after is not None and not relax:
        problems.append((f"{at}.relax", "missing: name the rules that may count as wishes: spread, topology, backend"))
    found = Escalation(
        relax,
        duration(form.relax_after, f"{at}.relax_after", problems) or 0,
        duration(form.promote_after, f"{at}.promote_after", problems) or 0,
        0 if form.promote_to is None else take(problems, f"{at}.promote_to", _priority, form.promote_to, 0),
    )
    if found.promote_to and not found.promote_after_ms and form.promote_after is not None:
        problems.append((f"{at}.promote_after", "no time at all; give at least 1s"))
    return found


def _priority(value: int | str) -> int:
    if isinstance(value, int):
        if not 0 <= value <= 1_000_000:
            raise InvalidInput(f"a priority of {value}: from 0 to 1000000")
        return value
    if value not in PRIORITY_CLASSES:
        near = did_you_mean(value, PRIORITY_CLASSES)
        raise InvalidInput(f"unknown priority {shown(value)}: {', '.join(PRIORITY_CLASSES)} or a whole number{near}")
    return PRIORITY_CLASSES[value]


def document(found: Escalation) -> dict[str, Any]:
    """As people write it; what says nothing is left out."""
    out: dict[str, Any] = {}
    if found.relax:
        out["relax"] = list(found.relax)
    if found.relax_after_ms:
        out["relax_after"] = format_duration(found.relax_after_ms)
    if found.promote_after_ms:
        out["promote_after"] = format_duration(found.promote_after_ms)
    if found.promote_to:
        name = priority_class_name(found.promote_to)
        out["promote_to"] = found.promote_to if name.isdecimal() else name
    return out
