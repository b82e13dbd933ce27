"""What may be written about the life of a job: how it is known to be well, and after which failures it is tried again."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hodei.jobfile.types import Command, Duration, Form, about, text


class HealthForm(Form, frozen=True):
    """How it is known that a run which lives is also well: exactly one of `command`, `http` and `file`."""

    command: Command | None = None
    http: (
        Annotated[
            Annotated[str, text(2000)],
            about(
                "Asked with GET; well from 200 to 399. `localhost`, a loopback address, or `node`.",
                "http://localhost:8080/ready",
                "http://node:8080/ready",
            ),
        ]
        | None
    ) = None
    file: (
        Annotated[
            Annotated[str, text(4096)], about("A heartbeat: well if it has changed since the last look.", "/tmp/beat")
        ]
        | None
    ) = None
    every: Annotated[Duration, about("Time between two looks. Default `30s`.", "1m")] | None = None
    timeout: Annotated[Duration, about("A look that takes longer has failed. Default `5s`.", "10s")] | None = None
    after: Annotated[Duration, about("Begin this long after the start. Default at once.", "2m")] | None = None
    failures: (
        Annotated[int, Meta(ge=1, le=1000), about("So many failed looks in a row, and the run is stopped. Default 3.")]
        | None
    ) = None


HealthKey = Annotated[
    HealthForm, about("How it is known that a run is well.", {"http": "http://localhost:8080/ready", "every": "30s"})
]
RetryOnKey = Annotated[
    list[
        Literal["job_error", "node_lost", "out_of_memory", "timeout", "preempted", "backend_error", "unhealthy", "idle"]
    ],
    Meta(min_length=1, max_length=8),
    about(
        "Only after these failures is it tried again. Default: after all that `restart` allows.",
        ["node_lost", "out_of_memory"],
    ),
]
