"""Why a run has to stop, as a value: controllers match on the code, people read the text."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

StopCode = Literal[
    "cancelled", "requeued", "suspended", "migrated", "drained", "tainted", "preempted", "reclaimed", "assembly", "overran",
    "cleared", "outstayed", "sibling_ended", "member_ended", "not_wanted",
]  # fmt: skip
# The run is not to blame: its work is saved first if it can be, and its job is queued again.
MOVED: frozenset[StopCode] = frozenset(
    {
        "requeued", "suspended", "migrated", "drained", "tainted", "preempted", "reclaimed", "assembly", "overran",
        "cleared", "outstayed",
    }
)  # fmt: skip


class StopReason(Struct, frozen=True, omit_defaults=True, gc=False):
    """`detail` continues the code to a text for people. `gang`: a gang outlives the stop of this member, which is replaced
    ("repair") or left out ("shrink"); "": the stop is the end of the attempt.

    Codes that need a word: `assembly` (the gang did not get all its members in time), `overran` (its estimate),
    `cleared` (off nodes of a reservation that began), `outstayed` (a reservation that is over), `member_ended` (the run
    ended by itself; nothing was stopped), `not_wanted` (no job has this run).
    """

    code: StopCode
    detail: str = ""
    gang: Literal["", "repair", "shrink"] = ""

    @property
    def text(self) -> str:
        return f"{self.code.replace('_', ' ')} {self.detail}".rstrip()

    @property
    def moves_job(self) -> bool:
        """Whether the job is queued again when the run has stopped."""
        return not self.gang and self.code in MOVED
