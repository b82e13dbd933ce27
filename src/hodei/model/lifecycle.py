"""The life of jobs and runs as tables with one door each. Only `control` calls the doors.

A state that is not reachable from the present one is a bug in the caller, so it is loud.
"""

from __future__ import annotations

from typing import Literal

JobState = Literal["pending", "held", "scheduled", "running", "succeeded", "failed", "cancelled"]
RunState = Literal["placed", "running", "succeeded", "failed", "stopped", "lost"]

JOB_STEPS: dict[JobState, frozenset[JobState]] = {
    "pending": frozenset({"held", "scheduled", "failed", "cancelled"}),
    "held": frozenset({"pending", "cancelled", "failed"}),
    "scheduled": frozenset({"running", "pending", "held", "succeeded", "failed", "cancelled"}),
    "running": frozenset({"pending", "held", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset({"pending"}),
    "failed": frozenset({"pending"}),
    "cancelled": frozenset({"pending"}),
}
RUN_STEPS: dict[RunState, frozenset[RunState]] = {
    "placed": frozenset({"running", "succeeded", "failed", "stopped", "lost"}),
    "running": frozenset({"succeeded", "failed", "stopped", "lost"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "stopped": frozenset(),
    "lost": frozenset(),
}
JOB_ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
RUN_ENDED: frozenset[str] = frozenset(state for state, steps in RUN_STEPS.items() if not steps)


class ImpossibleStep(AssertionError):
    """The caller asked for a step that the table does not have."""


def advance_job(state: JobState, to: JobState) -> JobState:
    if to not in JOB_STEPS[state]:
        raise ImpossibleStep(f"a {state} job cannot become {to}")
    return to


def advance_run(state: RunState, to: RunState) -> RunState:
    if to not in RUN_STEPS[state]:
        raise ImpossibleStep(f"a {state} run cannot become {to}")
    return to
