"""Why a run is stopped (`StopReason`) and why a job failed (`FAILURES`).

Code matches on the codes; the texts are for people. Retries, the API, metrics and the CLI all take the failure class
from the table here.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

StopCode = Literal[
    "cancelled", "requeued", "suspended", "migrated", "drained", "tainted", "preempted", "reclaimed", "assembly", "overran",
    "cleared", "outstayed", "node_reclaimed", "sibling_ended", "member_ended", "not_wanted",
]  # fmt: skip
# The stop is not the run's fault: it takes a checkpoint if it can, and its job is queued again.
MOVED: frozenset[StopCode] = frozenset(
    {
        "requeued", "suspended", "migrated", "drained", "tainted", "preempted", "reclaimed", "assembly", "overran",
        "cleared", "outstayed", "node_reclaimed",
    }
)  # fmt: skip


class StopReason(Struct, frozen=True, omit_defaults=True, gc=False):
    """`detail` completes the code to a readable text. `gang`: the gang survives the stop of this member, which is
    replaced ("repair") or dropped ("shrink"); "": the attempt ends.

    Less obvious codes: `assembly` (not all members of the gang started in time), `overran` (exceeded its estimate),
    `cleared` (the node is needed by a reservation that begins), `outstayed` (its reservation is over), `node_reclaimed` (the
    provider takes back the node), `member_ended`
    (the run ended by itself), `not_wanted` (the run belongs to no job).
    """

    code: StopCode
    detail: str = ""
    gang: Literal["", "repair", "shrink"] = ""

    @property
    def text(self) -> str:
        return f"{self.code.replace('_', ' ')} {self.detail}".rstrip()

    @property
    def moves_job(self) -> bool:
        """Whether the job is queued again after the run has stopped."""
        return not self.gang and self.code in MOVED


FailureClass = Literal[
    "job_error", "node_lost", "out_of_memory", "timeout", "preempted", "backend_error", "unhealthy", "idle"
]


class FailureKind(Struct, frozen=True):
    """`run_codes` of a run and `codes` of a job with this kind; the first of `codes` is the default."""

    name: FailureClass
    run_codes: tuple[str, ...]
    codes: tuple[str, ...]
    text: str


FAILURES: tuple[FailureKind, ...] = (
    FailureKind("job_error", ("", "killed"), ("EXIT_CODE",), "the command exited with an error"),
    FailureKind("node_lost", ("lost",), ("LOST",), "its node was lost, or its outcome is unknown"),
    FailureKind("out_of_memory", ("oom",), ("OUT_OF_MEMORY",), "it exceeded its memory limit"),
    FailureKind(
        "timeout",
        ("timeout",),
        ("TIMEOUT", "SCHEDULING_TIMEOUT", "QUEUE_TIME_EXCEEDED", "OVERRUN"),
        "it exceeded a time limit",
    ),
    FailureKind("preempted", (), ("PREEMPTED",), "it was preempted by a job of a higher class"),
    FailureKind(
        "backend_error",
        ("error", "start_failed", "not_reached", "refused", "permanent"),
        ("RUN_ERROR", "START_FAILED", "BACKEND_REFUSED", "ASSEMBLY_TIMEOUT"),
        "its backend could not start it",
    ),
    FailureKind("unhealthy", ("unhealthy",), ("UNHEALTHY",), "its health check failed too often in a row"),
    FailureKind("idle", ("idle",), ("IDLE_TIMEOUT",), "it is interactive and was idle for too long"),
)
FAILURE_CLASSES: tuple[str, ...] = tuple(failure.name for failure in FAILURES)

_BY_CODE: dict[str, FailureClass] = {code: failure.name for failure in FAILURES for code in failure.codes}
_BY_RUN_CODE: dict[str, FailureClass] = {code: failure.name for failure in FAILURES for code in failure.run_codes}
_CODE_OF_RUN = {"start_failed": "START_FAILED", "refused": "BACKEND_REFUSED", "permanent": "BACKEND_REFUSED"}


def failure_class(code: str) -> FailureClass | Literal[""]:
    """The class of a job's reason code; "" if the code is not a failure."""
    return _BY_CODE.get(code, "")


def run_failure_class(run_code: str) -> FailureClass:
    """The class of a failed or lost run. Unknown codes count as failures of the command."""
    return _BY_RUN_CODE.get(run_code, "job_error")


def job_code_of_run(run_code: str) -> str:
    """The reason code of a job whose run failed with this reason code."""
    if run_code in _CODE_OF_RUN:
        return _CODE_OF_RUN[run_code]
    found = run_failure_class(run_code)
    return next(failure.codes[0] for failure in FAILURES if failure.name == found)


def may_retry(retry_on: tuple[str, ...], failure: str) -> bool:
    """Whether `retry_on` allows another attempt after this failure class; an empty `retry_on` allows every class."""
    if failure == "idle":
        return False
    return not retry_on or failure in retry_on or failure == "preempted"
