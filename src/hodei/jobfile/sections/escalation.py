"""The key `escalation`: schema, parser and renderer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from hodei.jobfile.values import (
    Duration,
    Form,
    Problems,
    about,
    duration,
    duration_value,
    non_empty,
    priority,
    try_parse,
)
from hodei.model.errors import InvalidInput
from hodei.model.escalation_state import priority_class_name
from hodei.model.job import Escalation, JobSpec


class EscalationForm(Form, frozen=True):
    """Measures for a job that waits too long. Defaults come from the server's configuration."""

    relax: (
        Annotated[
            list[Literal["spread", "topology", "backend"]],
            Meta(max_length=3),
            about("Rules that become preferences then.", ["spread", "topology"]),
        ]
        | None
    ) = None
    relax_after: Annotated[Duration, about("How long it waits before that.", "10m")] | None = None
    promote_after: Annotated[Duration, about("How long it waits for each step up in priority.", "30m")] | None = None
    promote_to: Annotated[str | int, about("The highest priority that it reaches.", "high")] | None = None


EscalationKey = Annotated[
    EscalationForm,
    about("Measures if it waits too long.", {"relax": ["spread"], "relax_after": "10m", "promote_after": "30m"}),
]


NO_ESCALATION = JobSpec(name="", tasks=()).escalation  # the same object, so that an identity check is enough


def escalation(form: EscalationForm, at: str, problems: Problems) -> Escalation:
    relax = tuple(dict.fromkeys(form.relax or ()))
    if form.relax_after is not None and not relax:
        problems.append((f"{at}.relax", "missing: list the rules to relax: spread, topology, backend"))
    found = Escalation(
        relax,
        duration(form.relax_after, f"{at}.relax_after", problems) or 0,
        duration(form.promote_after, f"{at}.promote_after", problems) or 0,
        0 if form.promote_to is None else try_parse(problems, f"{at}.promote_to", _priority, form.promote_to, 0),
    )
    if found.promote_to and not found.promote_after_ms and form.promote_after is not None:
        problems.append((f"{at}.promote_after", "too short; give at least 1s"))
    return found


def _priority(value: int | str) -> int:
    if isinstance(value, int) and not 0 <= value <= 1_000_000:
        raise InvalidInput(f"the priority {value} is out of range: from 0 to 1000000")
    return priority(value)


def document(found: Escalation) -> dict[str, Any]:
    """The value of the key, without defaults."""
    name = priority_class_name(found.promote_to) if found.promote_to else ""
    return non_empty(
        {
            "relax": list(found.relax),
            "relax_after": duration_value(found.relax_after_ms),
            "promote_after": duration_value(found.promote_after_ms),
            "promote_to": found.promote_to if name.isdecimal() else name,
        }
    )
