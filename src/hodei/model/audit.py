"""Audit entries, masking of secrets, and records of damaged data.

Audit entries never contain request bodies, which may hold secrets. The exception is a command run on a machine, because
the command is the action.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, structs

from hodei.model.ids import JobId
from hodei.model.job import JobSpec
from hodei.model.resources import format_time

COMMAND_LIMIT = 500
_ASSIGNMENT = re.compile(r"(-{0,2}([A-Za-z_][\w.-]*)=)(.+)", re.DOTALL)


class AuditEntry(Struct, frozen=True, omit_defaults=True):
    """`verb` is `resource.action` (`jobs.cancel`), `target` the object, `code` the reason of a refusal ("" if allowed).
    `detail` is the command, if one was run on a machine. The store assigns `seq` in the order of writing."""

    at_ms: int
    who: str
    role: str
    verb: str
    target: str = ""
    code: str = ""
    request: str = ""
    remote: str = ""
    detail: str = ""
    seq: int = 0


class AuditQuery(Struct, frozen=True):
    """Newest first, below `before`; or, if `after` is given, oldest first above it (0: from the start).

    `what` is a full verb, a resource (`jobs`) or an action (`cancel`).
    """

    who: str = ""
    what: str = ""
    target: str = ""
    since_ms: int = 0
    before: int = 0
    after: int | None = None
    limit: int = 100


def command_text(command: Sequence[str]) -> str:
    """A command for the audit log: bounded in length, with values such as that of `API_TOKEN=...` masked."""
    text = shlex.join(_without_secret(word[: 2 * COMMAND_LIMIT]) for word in command[:COMMAND_LIMIT])
    return text if len(text) <= COMMAND_LIMIT else text[: COMMAND_LIMIT - 1] + "…"


def _without_secret(word: str) -> str:
    found = _ASSIGNMENT.fullmatch(word)
    return found[1] + MASK if found and looks_secret(found[2]) else word


def matches_query(entry: AuditEntry, query: AuditQuery) -> bool:
    resource, _, action = entry.verb.partition(".")
    return (
        (not query.who or entry.who == query.who)
        and (not query.what or query.what in (entry.verb, resource, action))
        and (not query.target or entry.target == query.target)
        and entry.at_ms >= query.since_ms
        and (not query.before or entry.seq < query.before)
        and (query.after is None or entry.seq > query.after)
    )


# Everyone who may read jobs sees the names of environment variables. The job's owner and administrators see the values;
# values with secret-looking names only on request. Others see no values at all, so no guess by name protects them.

MASK = "***"
_ANYWHERE = ("TOKEN", "PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "CREDENTIAL", "PRIVATE")
_AT_THE_END = ("KEY", "PWD", "PASS", "DSN")
# All values; all but those with secret-looking names; or only the names.
EnvVisibility = Literal["all", "plain", "names"]


def looks_secret(name: str) -> bool:
    upper = name.upper()
    return upper.endswith(_AT_THE_END) or any(word in upper for word in _ANYWHERE)


def mask_env(env: Mapping[str, str], shown: EnvVisibility) -> dict[str, str]:
    if shown == "all":
        return dict(env)
    return {name: MASK if shown == "names" or looks_secret(name) else value for name, value in env.items()}


def without_env_values(spec: JobSpec) -> JobSpec:
    """The same job for every scheduling decision, without values of environment variables."""
    for task in spec.tasks:  # faster than `any`; runs for every job
        if task.env:
            break
    else:
        return spec
    return structs.replace(
        spec, tasks=tuple(structs.replace(task, env=mask_env(task.env, "names")) for task in spec.tasks)
    )


def mask_settings(settings: Mapping[str, Any], *, env: EnvVisibility = "plain") -> dict[str, Any]:
    """The settings with secrets masked at any depth. A name that ends in `_file` is a path, not a secret. `env`: what
    to show of tables with that name."""
    return {
        name: MASK if looks_secret(name) and not name.endswith("_file") and value else _mask_value(name, value, env)
        for name, value in settings.items()
    }


def _mask_value(name: str, value: Any, env: EnvVisibility) -> Any:
    if isinstance(value, Mapping):
        return mask_env(value, env) if name == "env" else mask_settings(value, env=env)
    return [_mask_value(name, each, env) for each in value] if isinstance(value, list | tuple) else value


RECORD_DAMAGED = "RECORD_DAMAGED"


class DamagedRecord(Struct, frozen=True):
    """An unreadable record (job, run, event, ...), found at `at_ms`: what is wrong (`reason`) and what was done
    (`outcome`). The store keeps the original bytes in its table `quarantine`."""

    at_ms: int
    kind: str
    name: str
    job: JobId
    reason: str
    outcome: str

    @property
    def text(self) -> str:
        return f"the record of {self.kind} {self.name} is damaged since {format_time(self.at_ms)} ({self.reason}): {self.outcome}"
