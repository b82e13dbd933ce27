"""The key `recovery` of a job, from what was written to the model and back."""

from __future__ import annotations

from typing import Any

from hodei.jobfile.names import did_you_mean, shown
from hodei.jobfile.sections.escalation_schema import RecoveryForm
from hodei.jobfile.values import Problems, duration, take
from hodei.model.errors import InvalidInput
from hodei.model.escalation import Escalation
from hodei.model.escalation_state import class_name
from hodei.model.job import PRIORITY_CLASSES, JobSpec
from hodei.model.quantity import format_duration

NOTHING = JobSpec("", ()).recovery  # the very same, so that one look tells that nothing was said


def recovery(form: RecoveryForm, at: str, problems: Problems) -> Escalation:
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
        name = class_name(found.promote_to)
        out["promote_to"] = found.promote_to if name.isdecimal() else name
    return out
