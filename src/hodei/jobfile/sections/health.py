"""The keys `health` and `retry_on`: schema, parser and renderer."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from hodei.jobfile.values import (
    Command,
    Duration,
    Form,
    Problems,
    about,
    absolute_path,
    command,
    duration,
    program,
    text,
    try_parse,
)
from hodei.model.errors import InvalidInput
from hodei.model.job import NODE_HOST, HealthCheck, JobSpec
from hodei.model.names import safe_repr
from hodei.model.resources import format_duration


class HealthForm(Form, frozen=True):
    """A health check of a run: exactly one of `command`, `http` and `file`."""

    command: Command | None = None
    http: (
        Annotated[
            Annotated[str, text(2000)],
            about(
                "Sends GET; healthy if the status is 200 to 399. `localhost`, a loopback address, or `node`.",
                "http://localhost:8080/ready",
                "http://node:8080/ready",
            ),
        ]
        | None
    ) = None
    file: (
        Annotated[
            Annotated[str, text(4096)],
            about("A heartbeat: healthy if it has changed since the last check.", "/tmp/beat"),
        ]
        | None
    ) = None
    every: Annotated[Duration, about("Time between two checks. Default `30s`.", "1m")] | None = None
    timeout: Annotated[Duration, about("A check that takes longer has failed. Default `5s`.", "10s")] | None = None
    after: Annotated[Duration, about("Delay of the first check after the start. Default none.", "2m")] | None = None
    failures: (
        Annotated[int, Meta(ge=1, le=1000), about("Stop the run after this many failed checks in a row. Default 3.")]
        | None
    ) = None


HealthKey = Annotated[
    HealthForm, about("A health check of each run.", {"http": "http://localhost:8080/ready", "every": "30s"})
]
RetryOnKey = Annotated[
    list[
        Literal["job_error", "node_lost", "out_of_memory", "timeout", "preempted", "backend_error", "unhealthy", "idle"]
    ],
    Meta(min_length=1, max_length=8),
    about(
        "Retry only after these failures. Default: all that `restart` allows.",
        ["node_lost", "out_of_memory"],
    ),
]


NO_CHECK = HealthCheck()
_NOT_FOR_RETRY = {
    "preempted": "a preempted job is always queued again; remove it",
    "idle": "a job that was idle for too long is never retried; remove it",
}


def health(form: HealthForm, at: str, problems: Problems) -> HealthCheck:
    if sum(way is not None for way in (form.command, form.http, form.file)) != 1:
        problems.append((at, "give exactly one of command, http and file"))
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
        "" if form.http is None else try_parse(problems, f"{at}.http", health_address, form.http, ""),
        "" if form.file is None else try_parse(problems, f"{at}.file", absolute_path, form.file, ""),
        NO_CHECK.every_ms if every is None else every,
        NO_CHECK.timeout_ms if timeout is None else timeout,
        after or 0,
        NO_CHECK.failures if form.failures is None else form.failures,
    )


@lru_cache(maxsize=256)
def health_address(text: str) -> str:
    """A URL on the node itself, so that a job cannot reach other hosts through health checks."""
    hint = "for example http://localhost:8080/ready"
    if not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidInput(f"{safe_repr(text)} is not an address", hint=hint)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise InvalidInput(f"{safe_repr(text)} is not an address", hint=hint) from None
    if parts.scheme != "http" or not parts.hostname or parts.fragment:
        raise InvalidInput(f"{safe_repr(text)} is not an http address", hint=hint)
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("a health check takes no user name and no password", hint=hint)
    if port == 0:
        raise InvalidInput("there is no port 0", hint=hint)
    if parts.hostname not in ("localhost", NODE_HOST) and not _is_loopback(parts.hostname):
        raise InvalidInput(
            f"{safe_repr(parts.hostname)} is not the node; a health check uses localhost, a loopback address or"
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


def render_job_rules(spec: JobSpec) -> dict[str, Any]:
    """Empty values are omitted by the caller."""
    return {"health": _health(spec.health), "retry_on": list(spec.retry_on)}


def _health(check: HealthCheck) -> dict[str, Any]:
    if not check.enabled:
        return {}
    out: dict[str, Any] = {"command": list(check.command), "http": check.http, "file": check.file}
    out = {key: value for key, value in out.items() if value}
    for key in ("every", "timeout", "after"):
        given = getattr(check, f"{key}_ms")
        if given != getattr(NO_CHECK, f"{key}_ms"):
            out[key] = format_duration(given)
    if check.failures != NO_CHECK.failures:
        out["failures"] = check.failures
    return out
