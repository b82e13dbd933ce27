"""What a job says for the case that it waits too long, as people write it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hodei.jobfile.types import Duration, Form, about


class RecoveryForm(Form, frozen=True):
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


RecoveryKey = Annotated[
    RecoveryForm,
    about(
        "What may be done if it waits too long.", {"relax": ["spread"], "relax_after": "10m", "promote_after": "30m"}
    ),
]
