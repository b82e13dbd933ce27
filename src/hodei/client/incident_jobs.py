"""One job of an incident: what it asked for, how long its runs took, what was done to it and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from hodei.api.views import JobDetail, RunView
from hodei.model.effects import Event
from hodei.model.lifecycle import JOB_ENDED
from hodei.model.quantity import format_duration

Timed = tuple[int, dict[str, Any]]
_LEFT_OUT = ("command", "env", "workdir", "image")
_TOLD_TO_GO = ("job.cancel_requested", "job.preempted", "job.requeue_requested", "job.shrunk")
# Ends whose reason comes out the same when it is played again.
_REASONS = ("CANCELLED", "EXIT_CODE", "TIMEOUT", "SCHEDULING_TIMEOUT", "QUEUE_TIME_EXCEEDED")


class Began(Struct):
    """One start of the whole gang, with the runs since then. `nodes` are where it was placed to begin with."""

    at_ms: int
    runs: list[RunView]

    @property
    def nodes(self) -> list[str]:
        return sorted({run.node for run in self.runs if millis(run.placed_at) == self.at_ms})


class JobStory:
    """Times are since the epoch until they are written; `began_ms` is when the scenario begins."""

    def __init__(self, detail: JobDetail, window: Sequence[Event], began_ms: int, end_ms: int) -> None:
        self.id, self.name = detail.job.id, detail.job.name
        self._detail, self._began_ms, self._end_ms = detail, began_ms, end_ms
        self._all = window
        self._events = [event for event in window if event.job == self.id]
        self._ends = {event.run: event.at_ms for event in window if event.kind == "run.ended"}
        self.runs = [
            run
            for run in detail.runs
            if millis(run.placed_at) <= end_ms and (not self._end_of(run) or self._end_of(run) > began_ms)
        ]
        self.starts = self._starts()

    def _end_of(self, run: RunView) -> int:
        return self._ends.get(run.id) or millis(run.finished_at)

    def _starts(self) -> list[Began]:
        """By the attempts that placed the whole gang; the other attempts are members that joined one of these."""
        whole = {event.detail.get("attempt"): event.at_ms for event in self._events if event.kind == "job.scheduled"}
        old = [run for run in self.runs if millis(run.placed_at) < self._began_ms]
        out = [Began(min(millis(run.placed_at) for run in old), [])] if old else []
        for run in sorted(self.runs, key=lambda run: (run.attempt, run.member)):
            if run.attempt in whole and (not out or out[-1].at_ms != whole[run.attempt]):
                out.append(Began(whole[run.attempt], []))
            if out:
                out[-1].runs.append(run)
        return out

    # ------------------------------------------------------------------------------------------ what it is

    def document(self) -> dict[str, Any]:
        submitted = next((event.at_ms for event in self._events if event.kind == "job.submitted"), 0)
        at_ms = (submitted or millis(self._detail.job.submitted_at)) - self._began_ms
        out: dict[str, Any] = {"name": self.name, "id": self.id}
        if self.starts and self.starts[0].at_ms < self._began_ms:
            at_ms = self.starts[0].at_ms - self._began_ms
            nodes = [run.node for run in sorted(self.starts[0].runs, key=lambda run: run.member)]
            out["running"] = nodes[0] if len(set(nodes)) == 1 else nodes
        out["at"] = f"-{format_duration(-at_ms)}" if at_ms < 0 else format_duration(at_ms)
        lasted = [self._lasted_ms(start) for start in self.starts]
        longest = max((ms for ms in lasted if ms is not None), default=None)
        runs = ["forever" if ms is None else format_duration(ms) for ms in lasted] or ["forever"]
        if longest is not None and runs[-1] == "forever":
            runs.append(format_duration(longest))  # should it start once more
        out["run"] = runs[0] if len(set(runs)) == 1 else runs
        codes = [
            next((run.exit_code for run in start.runs if run.state == "failed"), None) or 0 for start in self.starts
        ]
        if any(codes):
            out["exit"] = codes[0] if len(set(codes)) == 1 else codes
        if stopping_ms := max((self._stopping_ms(run) for run in self.runs), default=0):
            out["stopping"] = format_duration(stopping_ms)
        if self._detail.job.user:
            out["user"] = self._detail.job.user
        return out | self._asked()

    def _asked(self) -> dict[str, Any]:
        """The job file, in its short form if it has one task; what it runs is left out."""
        spec = dict(self._detail.spec["spec"])
        if "deadline" in spec:
            left_ms = millis(spec["deadline"]) - millis(self._detail.job.submitted_at)
            spec["deadline"] = format_duration(max(left_ms, 0))
        tasks = [{key: value for key, value in task.items() if key not in _LEFT_OUT} for task in spec.pop("tasks")]
        metadata = {key: self._detail.spec["metadata"].get(key) for key in ("project", "labels")}
        metadata = {key: value for key, value in metadata.items() if value}
        if len(tasks) > 1:
            kept = {"name": self.name, **metadata}
            return {"apiVersion": "hodei/v1", "kind": "Job", "metadata": kept, "spec": spec | {"tasks": tasks}}
        (task,) = tasks
        task.pop("name", None)
        if task.get("count") == 1:
            task.pop("count")
        amounts = task.get("resources", {})
        if not amounts.get("limits"):
            task.pop("resources", None)
            request = {name: whole(amount) for name, amount in amounts.get("requests", {}).items()}
            plain = {key: request.pop(key) for key in ("cpu", "memory", "gpu") if key in request}
            task = plain | ({"resources": request} if request else {}) | task
        return task | metadata | spec

    def _lasted_ms(self, start: Began) -> int | None:
        """How long its runs took; None if none of them came to an end of its own."""
        own = [run for run in start.runs if run.state in ("succeeded", "failed") and run.reason_code != "timeout"]
        return max((self._end_of(run) - millis(run.placed_at) for run in own), default=None)

    def _stopping_ms(self, run: RunView) -> int:
        """How long it took to stop after it was told to."""
        if run.state != "stopped":
            return 0
        ended_ms = self._end_of(run)
        told = [event.at_ms for event in self._events if event.kind in _TOLD_TO_GO and event.at_ms <= ended_ms]
        told += [
            event.at_ms
            for event in self._all
            if event.at_ms <= ended_ms
            and (
                (event.kind == "node.marked" and event.node == run.node)
                or (event.kind == "run.ended" and event.job == self.id and event.run != run.id)
            )
        ]
        return ended_ms - max(told, default=ended_ms)

    # ---------------------------------------------------------------------------------------- what happened

    def facts(self) -> list[Timed]:
        verbs = {"job.cancel_requested": "cancel", "job.released": "release", "job.requeue_requested": "requeue"}
        out: list[Timed] = []
        moving = False
        for event in self._events:
            verb = verbs.get(event.kind, "")
            if event.kind == "job.held" and not event.detail.get("reason"):
                verb = "hold"
            elif event.kind == "job.requeued":
                # Of one that had ended no request is told before.
                verb = "requeue" if event.detail.get("reason") == "requeued by a user" and not moving else ""
                moving = False
            moving = moving or event.kind == "job.requeue_requested"
            if verb:
                out.append((event.at_ms - self._began_ms, {verb: self.name}))
        return out

    def expectations(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for number, start in enumerate(self.starts, 1):
            if start.at_ms >= self._began_ms:
                again: dict[str, Any] = {} if number == 1 else {"attempt": number}
                nodes: Any = start.nodes if len(start.nodes) > 1 else start.nodes[0]
                about = {"about": format_duration(start.at_ms - self._began_ms)}
                out.append({"job": self.name, **again, "starts": about, "on": nodes})
        ended = next((event for event in reversed(self._events) if event.kind == "job.ended"), None)
        view = self._detail.job
        if ended is not None and ended.detail.get("state") in JOB_ENDED and self._events[-1] is ended:
            code = ended.detail.get("reason_code", "")
            reason = {"reason": code} if code in _REASONS else {}
            out.append({"job": self.name, "ends": ended.detail["state"], **reason})
        elif view.state in ("pending", "held"):
            when = format_duration(self._end_ms - self._began_ms)
            reason = {"reason": view.reason_code} if view.reason_code else {}
            out.append({"at": when, "job": self.name, "state": view.state, **reason})
        return out


def millis(text: str) -> int:
    """0 for a time that is not yet."""
    return round(datetime.fromisoformat(text).timestamp() * 1000) if text else 0


def whole(amount: str) -> str | int:
    """A quantity as people write it: `2` is a number, `500m` is not."""
    return int(amount) if amount.isdigit() else amount
