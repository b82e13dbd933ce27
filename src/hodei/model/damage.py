"""Records that cannot be read any more, and what was done about each."""

from __future__ import annotations

from msgspec import Struct

from hodei.model.ids import JobId
from hodei.model.text import moment

CODE = "RECORD_DAMAGED"


class Damage(Struct, frozen=True):
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
        return f"the record of {self.kind} {self.name} is damaged since {moment(self.at_ms)} ({self.reason}): {self.outcome}"
