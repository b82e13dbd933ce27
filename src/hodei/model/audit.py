"""Who did what, when, from where, and what came of it. Never what was sent: bodies may hold secrets. The one exception are
commands on machines: what was run there is the act itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from msgspec import Struct

from hodei.model.secrets import MASK, looks_secret

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


def matches(entry: AuditEntry, query: AuditQuery) -> bool:
    things, _, act = entry.verb.partition(".")
    return (
        (not query.who or entry.who == query.who)
        and (not query.what or query.what in (entry.verb, things, act))
        and (not query.target or entry.target == query.target)
        and entry.at_ms >= query.since_ms
        and (not query.before or entry.seq < query.before)
        and (query.after is None or entry.seq > query.after)
    )
