"""What a job waits for before it may stand in line: other jobs, and data that is to appear.

Names are how people write it; before a job is let in each name has become the number of a job (`control.admission.dependency_names`).
"""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from hodei.model.ids import JobId

On = Literal["completed", "succeeded", "failed", "checkpointed", "exists"]
ONS: tuple[On, ...] = get_args(On)
_OF_A_JOB = {"completed": "to end", "succeeded": "to succeed", "failed": "to fail", "checkpointed": "to save its work"}


class Dependency(Struct, frozen=True, omit_defaults=True):
    """One thing to wait for. `completed`: the job has ended, in whatever way; `succeeded` and `failed`: in that one;
    `checkpointed`: it has saved its work once, or has succeeded. `exists`: a file or an address, which is `what`.
    `elements`: which elements of an array, in brackets as written: `[3]`, `[0-9]`, or `[]` for all of them."""

    on: On = "succeeded"
    job: JobId = 0
    name: str = ""
    what: str = ""
    elements: str = ""

    @property
    def subject(self) -> str:
        if self.on == "exists":
            return self.what
        if not self.job:
            return f"job {self.name}{self.elements}"
        return f"job {self.job} ({self.name}{self.elements})" if self.name else f"job {self.job}"

    def __str__(self) -> str:
        return f"{self.subject} {'to appear' if self.on == 'exists' else _OF_A_JOB[self.on]}"

    def met_by(self, state: str, *, saved: bool) -> bool | None:
        """What the job's end in this state comes to: met, never to be met, or (None) it has not ended."""
        if self.on == "checkpointed" and (saved or state == "succeeded"):
            return True
        if state not in ("succeeded", "failed", "cancelled"):
            return None
        return self.on == "completed" or self.on == state


class Dependencies(Struct, frozen=True, omit_defaults=True):
    """All of them, or `need` of them (0: all). `timeout_ms`: so long after it was submitted a job still waits."""

    of: tuple[Dependency, ...] = ()
    need: int = 0
    timeout_ms: int = 0

    @property
    def needed(self) -> int:
        return self.need or len(self.of)


class DependencyStatus(Struct, frozen=True, omit_defaults=True):
    """How a job stands that someone waits for, as the store knows it. `saved`: it has saved its work at least once."""

    job: JobId
    state: str
    saved: bool = False
