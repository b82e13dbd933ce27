"""Who did what, when, from where, and what came of it. Never what was sent: bodies may hold secrets. The one exception are
commands on machines: what was run there is the act itself.
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
    """`verb` is `things.act` (`jobs.cancel`), `target` what it was done to, `code` why it was refused ("" if it was not).
    `detail` is the command, if one was run on a machine. `seq` is given by the store, in the order of writing."""

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
    """Newest first, below `before`; or oldest first, above `after`, if that is given (0 is "from the beginning").

    `what` is a whole verb, the things (`jobs`) or the act (`cancel`)."""

    who: str = ""
    what: str = ""
    target: str = ""
    since_ms: int = 0
    before: int = 0
    after: int | None = None
    limit: int = 100


def command_text(command: Sequence[str]) -> str:
    """A command for the audit: of bounded length, and without the values of words such as `API_TOKEN=...`."""
    text = shlex.join(_without_secret(word[: 2 * COMMAND_LIMIT]) for word in command[:COMMAND_LIMIT])
    return text if len(text) <= COMMAND_LIMIT else text[: COMMAND_LIMIT - 1] + "…"


def _without_secret(word: str) -> str:
    found = _ASSIGNMENT.fullmatch(word)
    return found[1] + MASK if found and looks_secret(found[2]) else word


def matches_query(entry: AuditEntry, query: AuditQuery) -> bool:
    things, _, act = entry.verb.partition(".")
    return (
        (not query.who or entry.who == query.who)
        and (not query.what or query.what in (entry.verb, things, act))
        and (not query.target or entry.target == query.target)
        and entry.at_ms >= query.since_ms
        and (not query.before or entry.seq < query.before)
        and (query.after is None or entry.seq > query.after)
    )


MASK = "***"
_ANYWHERE = ("TOKEN", "PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "CREDENTIAL", "PRIVATE")
_AT_THE_END = ("KEY", "PWD", "PASS", "DSN")
# All values, those of variables that do not look secret, or only the names.
EnvVisibility = Literal["all", "plain", "names"]


def looks_secret(name: str) -> bool:
    upper = name.upper()
    return upper.endswith(_AT_THE_END) or any(word in upper for word in _ANYWHERE)


def mask_env(env: Mapping[str, str], shown: EnvVisibility) -> dict[str, str]:
    if shown == "all":
        return dict(env)
    return {name: MASK if shown == "names" or looks_secret(name) else value for name, value in env.items()}


def without_env_values(spec: JobSpec) -> JobSpec:
    """The same job as far as any decision goes, with no value of a variable in it."""
    for task in spec.tasks:  # faster than `any`, and asked of every job
        if task.env:
            break
    else:
        return spec
    return structs.replace(
        spec, tasks=tuple(structs.replace(task, env=mask_env(task.env, "names")) for task in spec.tasks)
    )


def mask_settings(settings: Mapping[str, Any], *, env: EnvVisibility = "plain") -> dict[str, Any]:
    """The same settings for every eye, however deep a secret is in them. What ends in `_file` names a place, not a secret.
    `env`: what to show of tables of that name, which are variables."""
    return {
        name: MASK if looks_secret(name) and not name.endswith("_file") and value else _shown(name, value, env)
        for name, value in settings.items()
    }


def _shown(name: str, value: Any, env: EnvVisibility) -> Any:
    if isinstance(value, Mapping):
        return mask_env(value, env) if name == "env" else mask_settings(value, env=env)
    return [_shown(name, each, env) for each in value] if isinstance(value, list | tuple) else value


RECORD_DAMAGED = "RECORD_DAMAGED"


class DamagedRecord(Struct, frozen=True):
    """A record of one `kind` (job, run, event, ...) by its name, found damaged at `at_ms`: what is wrong with it, and what
    was done (`outcome`). It is kept as it was in the store's table `quarantine`."""

    at_ms: int
    kind: str
    name: str
    job: JobId
    reason: str
    outcome: str

    @property
    def text(self) -> str:
        return f"the record of {self.kind} {self.name} is damaged since {format_time(self.at_ms)} ({self.reason}): {self.outcome}"
