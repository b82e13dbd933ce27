"""The audit on the wire."""

from __future__ import annotations

from msgspec import Struct

from hodei.jobfile.render import iso
from hodei.model.audit import AuditEntry


class AuditView(Struct, frozen=True):
    """`outcome`: ok, or refused with a `code`. `detail`: the command, if one was run on a machine."""

    seq: int
    at: str
    who: str
    role: str
    verb: str
    target: str
    outcome: str
    code: str
    request: str
    remote: str
    detail: str = ""


class AuditList(Struct, frozen=True):
    entries: list[AuditView]


def audit_view(entry: AuditEntry) -> AuditView:
    return AuditView(
        entry.seq, iso(entry.at_ms), entry.who, entry.role, entry.verb, entry.target,
        "refused" if entry.code else "ok", entry.code, entry.request, entry.remote, entry.detail,
    )  # fmt: skip
