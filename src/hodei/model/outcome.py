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


FailureClass = Literal[
    "job_error", "node_lost", "out_of_memory", "timeout", "preempted", "backend_error", "unhealthy", "idle"
]


class FailureKind(Struct, frozen=True):
    """`run_codes`: the `reason_code` of a run. `codes`: those of its job; the first is the job's if the run's says it."""

    name: FailureClass
    run_codes: tuple[str, ...]
    codes: tuple[str, ...]
    text: str


FAILURES: tuple[FailureKind, ...] = (
    FailureKind("job_error", ("", "killed"), ("EXIT_CODE",), "the command ended with an error of its own"),
    FailureKind("node_lost", ("lost",), ("LOST",), "its node went away, or nobody can tell any more how it ended"),
    FailureKind("out_of_memory", ("oom",), ("OUT_OF_MEMORY",), "it went over its memory limit"),
    FailureKind(
        "timeout",
        ("timeout",),
        ("TIMEOUT", "SCHEDULING_TIMEOUT", "QUEUE_TIME_EXCEEDED", "OVERRUN"),
        "it took longer than it was allowed to",
    ),
    FailureKind("preempted", (), ("PREEMPTED",), "it was told to go, to make room for a job of a higher class"),
    FailureKind(
        "backend_error",
        ("error", "start_failed", "not_reached", "refused", "permanent"),
        ("RUN_ERROR", "START_FAILED", "BACKEND_REFUSED", "ASSEMBLY_TIMEOUT"),
        "its backend could not start it, or never will",
    ),
    FailureKind("unhealthy", ("unhealthy",), ("UNHEALTHY",), "its health check failed too often in a row"),
    FailureKind("idle", ("idle",), ("IDLE_TIMEOUT",), "it is interactive, and nothing happened in it for too long"),
)
FAILURE_CLASSES: tuple[str, ...] = tuple(failure.name for failure in FAILURES)
# A preempted job always goes back into the line, and one that was idle never does: neither is for `retry_on` to say.
RETRYABLE_CLASSES: tuple[str, ...] = tuple(name for name in FAILURE_CLASSES if name not in ("preempted", "idle"))

_BY_CODE: dict[str, FailureClass] = {code: failure.name for failure in FAILURES for code in failure.codes}
_BY_RUN_CODE: dict[str, FailureClass] = {code: failure.name for failure in FAILURES for code in failure.run_codes}
_CODE_OF_RUN = {"start_failed": "START_FAILED", "refused": "BACKEND_REFUSED", "permanent": "BACKEND_REFUSED"}


def failure_class(code: str) -> FailureClass | Literal[""]:
    """The class of a job's reason code; "" for one that is no failure."""
    return _BY_CODE.get(code, "")


def run_failure_class(run_code: str) -> FailureClass:
    """The class of a failed or lost run's reason code. Codes that are not in the table are the command's own doing."""
    return _BY_RUN_CODE.get(run_code, "job_error")


def job_code_of_run(run_code: str) -> str:
    """What is said of a job whose run failed with this reason code."""
    if run_code in _CODE_OF_RUN:
        return _CODE_OF_RUN[run_code]
    found = run_failure_class(run_code)
    return next(failure.codes[0] for failure in FAILURES if failure.name == found)


def may_retry(retry_on: tuple[str, ...], failure: str) -> bool:
    """Whether a job that names these classes is tried again after this one; none named: as far as its other keys allow."""
    if failure == "idle":
        return False
    return not retry_on or failure in retry_on or failure == "preempted"
