"""Slurm's words for how a job stands, in ours."""

from __future__ import annotations

from hodei.backends.hpc.ports import Phase, Seen

# Those that are not here are taken for alive: a word that we do not know must not end a run.
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ENDED = {
    "COMPLETED": "",
    "FAILED": "",
    "CANCELLED": "killed",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "NODE_FAIL": "lost",
    "BOOT_FAIL": "lost",
    "PREEMPTED": "lost",
    "REVOKED": "lost",
}
_REASONS = {
    "CANCELLED": "it was cancelled in Slurm, and not by Hodei",
    "TIMEOUT": "it reached the time limit that it had in Slurm",
    "DEADLINE": "it reached its deadline in Slurm",
    "OUT_OF_MEMORY": "it went over its memory limit in Slurm",
}
# Slurm writes this "signal" for a step that ran out of memory.
_OOM_SIGNAL = 125


def phase_of(state: str) -> Phase:
    if state in _ENDED:
        return "ended"
    return "waiting" if state in _WAITING else "running"


def exit_code(text: str) -> int | None:
    """`768` (a wait status: exit 3) or `3:0` (exit code : signal); 128 + the signal's number if one ended it."""
    code, colon, signal = text.strip().partition(":")
    if not code.isdigit() or (colon and not signal.isdigit()):
        return None
    left, number = (int(code), int(signal)) if colon else (int(code) >> 8, int(code) & 127)
    if number == _OOM_SIGNAL:
        return 137
    return 128 + number if number else left


def seen_of(
    *,
    job: str,
    mark: str,
    state: str,
    reason: str = "",
    code: str = "",
    start_s: int = 0,
    end_s: int = 0,
    submit_s: int = 0,
    restarts: int = 0,
) -> Seen:
    word = (state.split() or [""])[0].rstrip("+")  # sacct: "CANCELLED by 0"
    phase = phase_of(word)
    number = exit_code(code) if phase == "ended" else None
    if word == "CANCELLED" and number == 0:
        number = None  # it did not end well: it did not end by itself
    return Seen(
        job=job,
        mark=mark,
        phase=phase,
        state=word,
        reason=_REASONS.get(word, "") if phase == "ended" else ("" if reason == "None" else reason),
        code=number,
        reason_code=_ENDED.get(word, ""),
        start_s=start_s,
        end_s=end_s if phase == "ended" else 0,
        submit_s=submit_s,
        restarts=restarts,
    )
