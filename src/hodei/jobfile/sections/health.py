"""Health checks and `retry_on`: from what was written to the model, and back again."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from hodei.jobfile.names import shown
from hodei.jobfile.types import Command, Duration, Form, about, text
from hodei.jobfile.values import Problems, absolute_path, command, duration, program, take
from hodei.model.errors import InvalidInput
from hodei.model.job import NODE_HOST, HealthCheck, JobSpec
from hodei.model.resources import format_duration

# --------------------------------------------------------------------------------------- health schema
# What may be written about the life of a job: how it is known to be well, and after which failures it is tried again.


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


# ----------------------------------------------------------------------------------------------------

NOBODY_LOOKS = HealthCheck()
_NOT_FOR_RETRY = {
    "preempted": "a preempted job always goes back into the line; leave it out",
    "idle": "a job that was idle for too long is never tried again; leave it out",
}


def health(form: HealthForm, at: str, problems: Problems) -> HealthCheck:
    if sum(way is not None for way in (form.command, form.http, form.file)) != 1:
        problems.append((at, "say how to look, in exactly one way: command, http or file"))
    if form.command is not None and not program(form.command):
        problems.append((f"{at}.command", "missing: give the program and its arguments"))
    times = {key: duration(getattr(form, key), f"{at}.{key}", problems) for key in ("every", "timeout", "after")}
    for key, least_ms in (("every", 1000), ("timeout", 1)):
        given = times[key]
        if given is not None and given < least_ms:
            problems.append((f"{at}.{key}", f"too short; give at least {format_duration(least_ms)}"))
    every, timeout, after = times["every"], times["timeout"], times["after"]
    return HealthCheck(
        () if form.command is None else command(form.command, f"{at}.command", problems),
        "" if form.http is None else take(problems, f"{at}.http", health_address, form.http, ""),
        "" if form.file is None else take(problems, f"{at}.file", absolute_path, form.file, ""),
        NOBODY_LOOKS.every_ms if every is None else every,
        NOBODY_LOOKS.timeout_ms if timeout is None else timeout,
        after or 0,
        NOBODY_LOOKS.failures if form.failures is None else form.failures,
    )


@lru_cache(maxsize=256)
def health_address(text: str) -> str:
    """An address on the node itself: nobody is to reach other hosts through the nodes."""
    hint = "for example http://localhost:8080/ready"
    if not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidInput(f"{shown(text)} is not an address", hint=hint)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise InvalidInput(f"{shown(text)} is not an address", hint=hint) from None
    if parts.scheme != "http" or not parts.hostname or parts.fragment:
        raise InvalidInput(f"{shown(text)} is not an http address", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("a health check takes no user name and no password", hint=hint)
    if port == 0:
        raise InvalidInput("there is no port 0", hint=hint)
    if parts.hostname not in ("localhost", NODE_HOST) and not _is_loopback(parts.hostname):
        raise InvalidInput(
            f"{shown(parts.hostname)} is not the node itself; a health check goes to localhost, a loopback address or"
            f" {NODE_HOST!r} (the node's own address)",
            hint=hint,
        )
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def retry_on(given: Sequence[str], at: str, problems: Problems) -> tuple[str, ...]:
    for i, name in enumerate(given):
        if name in _NOT_FOR_RETRY:
            problems.append((f"{at}[{i}]", f"{name}: {_NOT_FOR_RETRY[name]}"))
    return tuple(dict.fromkeys(given))


# --------------------------------------------------------------------------------------------- back again


def job_rules(spec: JobSpec) -> dict[str, Any]:
    """Keys that say nothing are empty."""
    return {"health": _health(spec.health), "retry_on": list(spec.retry_on)}


def _health(check: HealthCheck) -> dict[str, Any]:
    if not check.enabled:
        return {}
    out: dict[str, Any] = {"command": list(check.command), "http": check.http, "file": check.file}
    out = {key: value for key, value in out.items() if value}
    for key in ("every", "timeout", "after"):
        given = getattr(check, f"{key}_ms")
        if given != getattr(NOBODY_LOOKS, f"{key}_ms"):
            out[key] = format_duration(given)
    if check.failures != NOBODY_LOOKS.failures:
        out["failures"] = check.failures
    return out
