"""What stands in for a record that cannot be read: whatever can be saved of it, and nothing that is guessed.

A job that runs goes on running under its stand-in, holds the room that it held, and its end is told. One that waited is
held if all of its description is left, and has failed if not: it cannot be run any more. What has ended has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from hodei.model.audit import RECORD_DAMAGED
from hodei.model.effects import Event
from hodei.model.escalation_state import decode_escalation
from hodei.model.ids import JobId, run_id
from hodei.model.job import JOB_ENDED, RUN_ENDED, Job, JobSpec, JobState, Run, TaskSpec
from hodei.store import rows
from hodei.store.damage import UNREADABLE

# Fields that no decision hangs on: a job whose other fields are well goes on as it is.
_WORDS = frozenset({"reason", "reason_code", "nodes", "failure"})
_REQUEST = re.compile(r'"request"\s*:\s*(\{[^{}]*\})')
LOST_NODE = "unknown"
# A run of a member beyond this is not taken for a sign of how large its job was.
_MOST_MEMBERS = 100_000


class Standin(Struct, frozen=True):
    """`unsure_of`: nodes of which it is not known any more what is held there."""

    job: Job
    outcome: str
    unsure_of: tuple[str, ...] = ()


def text_of(value: Any, default: str = "") -> str:
    """Text as far as it can be read."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else default


def job(id: JobId, row: Mapping[str, Any], body: Any, runs: Sequence[Run], why: str, now_ms: int) -> Standin:
    """`row` has the columns of the job as they are (none if it is gone), `body` the text of its spec, `runs` its runs."""
    members = max((run.member for run in runs), default=0) + 1
    spec, whole, known = _spec(id, row, body, members)
    good, bad = _good_fields(Job, {name: row.get(name) for name in rows.STANDING if name in row})
    live = [run for run in runs if run.state not in RUN_ENDED]
    state, outcome = _state(row.get("state"), good, live, whole, words_only=bool(row) and bad <= _WORDS)
    attempt = max([good.get("attempt", 0), *(run.attempt for run in runs)])
    first = good.get("first_attempt", 0)
    if live:
        first = min(first or attempt, *(run.attempt for run in live))
        if len(live) == len([run for run in runs if run.attempt >= first]):
            first = min(run.attempt for run in live)
    kept = {name: value for name, value in good.items() if name not in ("id", "state", "attempt", "first_attempt")}
    kept.setdefault("submitted_ms", min((run.placed_ms for run in runs), default=now_ms))
    kept.setdefault("changed_ms", now_ms)
    if state == "failed" and not kept.get("finished_ms"):
        kept["finished_ms"] = now_ms
    if state not in ("scheduled", "running", "succeeded") and state != row.get("state"):
        kept |= {
            "reason_code": RECORD_DAMAGED,
            "reason": f"its record is damaged: {why}; {outcome}",
            "changed_ms": now_ms,
        }
    unsure = tuple(sorted({run.node for run in live})) if live and not known else ()
    if unsure:
        outcome += f"; it is not known any more how much it holds, so {', '.join(unsure)} is cordoned: uncordon it when the job has ended"
    made = Job(id, spec, state, attempt=attempt, first_attempt=first, **kept)
    return Standin(made, outcome, unsure)


def strays(body: Any, runs: Sequence[Run]) -> list[Run]:
    """Runs of members that the job does not have, or could not have."""
    try:
        spec = rows.spec_from(body)
    except UNREADABLE:
        return [run for run in runs if run.member >= _MOST_MEMBERS]
    return [run for run in runs if not spec.has_member(run.member)]


def _state(
    told: Any, good: Mapping[str, Any], live: Sequence[Run], whole: bool, *, words_only: bool
) -> tuple[JobState, str]:
    """The state of the stand-in, and what that means in words."""
    if told in JOB_ENDED:
        return told, "it has ended; what is left of its record is shown"
    if live:
        return "running", "its runs go on and their end will be told; it will not be tried again"
    if good.get("finished_ms"):
        ended: JobState = "succeeded" if good.get("exit_code") == 0 else "failed"
        return ended, "it has ended; what is left of its record is shown"
    if not whole:
        return "failed", "its description is lost, so it cannot be run: submit it again"
    if words_only and told in ("pending", "held"):
        return told, "only words were lost, and it goes on"
    return "held", "look at it, then release it to have it run, or cancel it"


def _spec(id: JobId, row: Mapping[str, Any], body: Any, members: int) -> tuple[JobSpec, bool, bool]:
    """What is left of a spec, whether that is all of it, and whether the requests are known."""
    try:
        spec = rows.spec_from(body)
        return spec, True, spec.has_member(members - 1)
    except UNREADABLE:
        pass
    text = text_of(body)
    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    left, tasks = dict[str, Any](), list[TaskSpec]()
    known = False
    if isinstance(tree, dict):
        left, _ = _good_fields(JobSpec, tree)
        given = tree.get("tasks")
        for task in given if isinstance(given, list) else ():
            fields, bad = _good_fields(TaskSpec, task if isinstance(task, dict) else {"request": None})
            tasks.append(TaskSpec(**fields))
            known = (known or len(tasks) == 1) and "request" not in bad
    if not tasks:
        tasks, known = _tasks_in(text, members)
    if any(task.count < 1 for task in tasks) or sum(task.count for task in tasks) < members:
        tasks, known = [TaskSpec(count=members, request=tasks[0].request)], known and len(tasks) == 1
    left |= {"tasks": tuple(tasks), "restart": "never", "retries": 0}
    if "gang" in left:  # only the runs that it has go on: it starts on no further node
        left["gang"] = msgspec.structs.replace(left["gang"], per_node=False)
    for name, otherwise in (("name", f"job-{id}"), ("project", "default"), ("user", "")):
        left[name] = left.get(name) or text_of(row.get(name)) or otherwise
    return JobSpec(**left), False, known


def _tasks_in(text: str, members: int) -> tuple[list[TaskSpec], bool]:
    """From a text that is no JSON any more: what its one task asks for, if that much can still be read."""
    found = _REQUEST.findall(text)
    if len(found) == 1:
        try:
            request = msgspec.json.decode(found[0], type=dict[str, int])
            return [TaskSpec(count=members, request=request)], True
        except msgspec.MsgspecError:
            pass
    return [TaskSpec(count=members)], False


def _good_fields(of: type[Struct], raw: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The fields that can be read, and the names of those that cannot."""
    hints, good, bad = get_type_hints(of), dict[str, Any](), set[str]()
    for name in of.__struct_fields__:
        if name not in raw:
            continue
        value = bool(raw[name]) if hints[name] is bool and raw[name] in (0, 1) else raw[name]
        try:
            good[name] = msgspec.convert(value, hints[name])
            if type(value) is int and name != "exit_code" and not 0 <= value <= _most(name):
                raise ValueError("out of range")
            if name == "escalation_state" and value:
                decode_escalation(str(value))
        except UNREADABLE:
            good.pop(name, None)
            bad.add(name)
    return good, bad


def _most(name: str) -> int:
    return rows.LAST_MS if name.endswith("_ms") else 2**63 - 1


def run(row: Mapping[str, Any]) -> tuple[Run, bool]:
    """The run as far as it can be read, and whether it is known what it holds. A run whose state is lost counts as running:
    its backend says how it stands, or that it does not know of it."""
    good, bad = _good_fields(Run, {name: row[name] for name in rows.RUN if name not in rows.TREES})
    for tree in rows.TREES:
        if row[tree] is not None:
            try:
                good[tree] = rows.tree_from(tree, row[tree])
            except UNREADABLE:
                bad.add(tree)
    if "state" in bad:
        code = good.get("exit_code")
        good["state"] = "running" if not good.get("finished_ms") else "succeeded" if code == 0 else "failed"
    for name in ("task", "node", "backend"):
        if name in bad:
            good[name] = text_of(row[name]) or LOST_NODE
    good.setdefault("placed_ms", good.get("started_ms", 0))
    # Its name stays as it is stored, also out of range: by it the record is found again.
    key = {name: row[name] if isinstance(row[name], int) else 0 for name in ("job", "member", "attempt")}
    return Run(id=run_id(*key.values()), **good | key), not bad & {"grant", "node", "backend"}


def event(row: Sequence[Any], why: str) -> Event:
    seq, at_ms, kind, job, run, node, _ = row
    at_ms = at_ms if isinstance(at_ms, int) and 0 <= at_ms <= rows.LAST_MS else 0
    job = job if isinstance(job, int) and job >= 0 else 0
    return Event(seq, at_ms, text_of(kind), job, text_of(run), text_of(node), {"damaged": why})
