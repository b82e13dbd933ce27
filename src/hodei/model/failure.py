"""Why jobs fail, in eight classes. One table: what a backend says of a run, what is said of the job, and the class.

Everything that asks "what kind of failure was it" asks here: retries, the API, metrics and the terminal.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FailureClass = Literal[
    "job_error", "node_lost", "out_of_memory", "timeout", "preempted", "backend_error", "unhealthy", "idle"
]


class Failure(Struct, frozen=True):
    """`run_codes`: the `reason_code` of a run. `codes`: those of its job; the first is the job's if the run's says it."""

    name: FailureClass
    run_codes: tuple[str, ...]
    codes: tuple[str, ...]
    text: str


FAILURES: tuple[Failure, ...] = (
    Failure("job_error", ("", "killed"), ("EXIT_CODE",), "the command ended with an error of its own"),
    Failure("node_lost", ("lost",), ("LOST",), "its node went away, or nobody can tell any more how it ended"),
    Failure("out_of_memory", ("oom",), ("OUT_OF_MEMORY",), "it went over its memory limit"),
    Failure(
        "timeout",
        ("timeout",),
        ("TIMEOUT", "SCHEDULING_TIMEOUT", "QUEUE_TIME_EXCEEDED", "OVERRUN"),
        "it took longer than it was allowed to",
    ),
    Failure("preempted", (), ("PREEMPTED",), "it was told to go, to make room for a job of a higher class"),
    Failure(
        "backend_error",
        ("error", "start_failed", "not_reached", "refused", "permanent"),
        ("RUN_ERROR", "START_FAILED", "BACKEND_REFUSED", "ASSEMBLY_TIMEOUT"),
        "its backend could not start it, or never will",
    ),
    Failure("unhealthy", ("unhealthy",), ("UNHEALTHY",), "its health check failed too often in a row"),
    Failure("idle", ("idle",), ("IDLE_TIMEOUT",), "it is interactive, and nothing happened in it for too long"),
)
CLASSES: tuple[str, ...] = tuple(failure.name for failure in FAILURES)
# A preempted job always goes back into the line, and one that was idle never does: neither is for `retry_on` to say.
RETRIED: tuple[str, ...] = tuple(name for name in CLASSES if name not in ("preempted", "idle"))

_BY_CODE: dict[str, FailureClass] = {code: failure.name for failure in FAILURES for code in failure.codes}
_BY_RUN_CODE: dict[str, FailureClass] = {code: failure.name for failure in FAILURES for code in failure.run_codes}
_CODE_OF_RUN = {"start_failed": "START_FAILED", "refused": "BACKEND_REFUSED", "permanent": "BACKEND_REFUSED"}


def class_of(code: str) -> FailureClass | Literal[""]:
    """The class of a job's reason code; "" for one that is no failure."""
    return _BY_CODE.get(code, "")


def class_of_run(run_code: str) -> FailureClass:
    """The class of a failed or lost run's reason code. Codes that are not in the table are the command's own doing."""
    return _BY_RUN_CODE.get(run_code, "job_error")


def code_of_run(run_code: str) -> str:
    """What is said of a job whose run failed with this reason code."""
    if run_code in _CODE_OF_RUN:
        return _CODE_OF_RUN[run_code]
    found = class_of_run(run_code)
    return next(failure.codes[0] for failure in FAILURES if failure.name == found)


def may_retry(retry_on: tuple[str, ...], failure: str) -> bool:
    """Whether a job that names these classes is tried again after this one; none named: as far as its other keys allow."""
    if failure == "idle":
        return False
    return not retry_on or failure in retry_on or failure == "preempted"
