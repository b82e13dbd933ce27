"""What may be written about what a job waits for."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hodei.jobfile.types import Duration, Form, Line, about

MAX_AFTER = 10_000
# A line, as a list of indices may stand behind the name: sweep[1,3,7-9].
JobRef = Annotated[int, Meta(ge=1, le=2**53)] | Line
JobRefs = Annotated[list[JobRef], Meta(max_length=MAX_AFTER)] | JobRef


class AfterForm(Form, frozen=True):
    """What a job waits for before it may start: jobs by number or name, and data that is to appear."""

    succeeded: Annotated[JobRefs, about("These jobs have succeeded.", ["build", 17, "sweep[3]"])] | None = None
    completed: Annotated[JobRefs, about("These jobs have ended, in whatever way.", ["build"])] | None = None
    failed: Annotated[JobRefs, about("These jobs have failed.", ["train"])] | None = None
    checkpointed: (
        Annotated[JobRefs, about("These jobs have saved their work at least once, or succeeded.", ["train"])] | None
    ) = None
    exists: (
        Annotated[
            Annotated[list[Line], Meta(max_length=64)] | Line,
            about(
                "These files of the server's host, or addresses, are there; where is for the configuration to allow.",
                ["/data/x.csv", "https://data.example/x.csv"],
            ),
        ]
        | None
    ) = None
    need: (
        Annotated[int, Meta(ge=1, le=MAX_AFTER), about("So many of all these are enough. Default: all of them.")] | None
    ) = None
    timeout: Annotated[Duration, about("Fail the job if it waits longer for them.", "2h")] | None = None


AfterKey = Annotated[
    Annotated[list[JobRef], Meta(max_length=MAX_AFTER)] | JobRef | AfterForm,
    about(
        "What it waits for: jobs that must succeed, by number or name (of an array: all of it, `sweep[3]` is one element), or more in detail.",
        ["build", 17],
        {"succeeded": ["build"], "exists": ["/data/x.csv"], "timeout": "2h"},
    ),
]
