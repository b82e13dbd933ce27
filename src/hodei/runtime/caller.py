"""On whose behalf something is done. Whoever lets a caller in says so here; the loop signs the caller's facts with the
name, and puts the audit row into the very commit that carries the act.

So no verb needs a word about it: what has no caller (recovery, backends, timers) is nobody's act.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from msgspec import structs

from hodei.model.audit import AuditEntry
from hodei.model.effects import Save, SaveAudit, SavePeriodic
from hodei.model.facts import Fact, JobSubmitted, Noted, ReservationMade


class Caller:
    """One call of somebody. `entry` says who and what; its target is completed by what the call brings about."""

    def __init__(self, entry: AuditEntry) -> None:
        self.entry = entry
        self.recorded = False
        self._begun = False

    def sign(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        # Jobs carry the name of their user already, and come by the hundred thousand.
        if all(fact.by or type(fact) is JobSubmitted for fact in facts):
            return facts
        return [fact if fact.by else structs.replace(fact, by=self.entry.who) for fact in facts]

    def record(self, facts: Sequence[Fact], saves: Sequence[Save]) -> Sequence[Save]:
        """The audit row, once, to be committed together with these."""
        if self.recorded:
            return ()
        self.recorded = True
        if not self.entry.target:
            self.entry = structs.replace(self.entry, target=_made(facts, saves))
        return (SaveAudit(self.entry),)

    def begin(self, detail: str) -> None:
        """The row is about to be written before its act. If that then comes to nothing, a second row says so."""
        self.entry = structs.replace(self.entry, detail=detail)
        self._begun = True

    def refused(self, code: str) -> SaveAudit | None:
        """The row of a call that came to nothing; None if its act had been committed before."""
        if self.recorded and not (self._begun and code):
            return None
        self.recorded = True
        self.entry = structs.replace(self.entry, code=code)
        return SaveAudit(self.entry)


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def _made(facts: Sequence[Fact], saves: Sequence[Save]) -> str:
    """What has come into being, for calls that do not name it in their path."""
    ids = [fact.job.id for fact in facts if isinstance(fact, JobSubmitted)]
    if ids:
        return str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
    names = [fact.booking.name for fact in facts if isinstance(fact, ReservationMade)]
    names += [save.periodic.name for save in saves if isinstance(save, SavePeriodic)]
    names += [fact.detail["backend"] for fact in facts if isinstance(fact, Noted) and fact.kind == "backend.added"]
    return ", ".join(names)
