"""Who did what, when, from where, and what came of it. Never what was sent: bodies may hold secrets."""

from __future__ import annotations

from msgspec import Struct


class AuditEntry(Struct, frozen=True, omit_defaults=True):
    """`verb` is `things.act` (`jobs.cancel`), `target` what it was done to, `code` why it was refused ("" if it was not).
    `seq` is given by the store, in the order of writing."""

    at_ms: int
    who: str
    role: str
    verb: str
    target: str = ""
    code: str = ""
    request: str = ""
    remote: str = ""
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
