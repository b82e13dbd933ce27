"""A job's story as a scenario: the cluster as it was, the jobs around it with the times that they really took, what
operators and nodes did, and what happened as what is expected. Made of the server's answers alone.

What jobs run, their environment and their annotations are left out: the scheduler does not look at them, and they may hold
secrets. Troubles of backends (a start that failed, an agent out of reach) are not told by events and so not replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct, convert, structs, to_builtins

from hodei.api.views import JobDetail, NodeView, RunView
from hodei.client.api import Client
from hodei.jobfile.yaml_reader import flow
from hodei.model.config import SchedulingConfig
from hodei.model.effects import Event
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.job import JOB_ENDED, JOB_TRANSITIONS
from hodei.model.node import Taint
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, format_duration

# --------------------------------------------------------------------------------------- incident jobs
# One job of an incident: what it asked for, how long its runs took, what was done to it and what came of it.


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
                (event.kind == "node.updated" and event.node == run.node)
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


# ----------------------------------------------------------------------------------------------------


# -------------------------------------------------------------------------------------- incident nodes
# The cluster as it was when an incident began: today's nodes, with what has happened to them since taken back.


Timed = tuple[int, dict[str, Any]]
_TOP = {CPU: "cpu", MEMORY: "memory", GPU: "gpu", STORAGE: "storage"}


class NodeStory:
    """`events`: all since the beginning, so that today's marks can be taken back; facts are those until `end_ms`."""

    def __init__(
        self, views: Sequence[NodeView], events: Sequence[Event], began_ms: int, end_ms: int, used: set[str]
    ) -> None:
        self._began_ms, self._end_ms = began_ms, end_ms
        self._views = {view.name: view for view in views}
        self._events = [event for event in events if event.kind in ("node.joined", "node.lost", "node.updated")]
        lost = {event.node: event for event in self._events if event.kind == "node.lost"}
        self._gone = {name: event for name, event in lost.items() if name not in self._views}
        joined_later = {event.node for event in self._events if event.kind == "node.joined" and event.at_ms > end_ms}
        self._names = sorted(({*self._views} - (joined_later - used - {*lost})) | {*self._gone})

    def cluster(self) -> list[dict[str, Any]]:
        out = []
        for name in self._names:
            entry = _of_view(self._views[name]) if name in self._views else _of_event(self._gone[name])
            taints = self._taints_then(name, entry.pop("taints", []))
            mine = [event for event in self._events if event.node == name and event.kind != "node.updated"]
            if mine and mine[0].kind == "node.joined":
                entry["there"] = False
            out.append(entry | ({"taints": taints} if taints else {}))
        return out

    def facts(self) -> list[Timed]:
        out: list[Timed] = [(0, {"cordon": name}) for name in self._names if self._cordoned_then(name)]
        for event in self._events:
            if event.node in self._names and event.at_ms <= self._end_ms:
                out += [(event.at_ms - self._began_ms, fact) for fact in _facts_of(event)]
        return out

    def _marks(self, name: str) -> Iterable[Event]:
        return (event for event in reversed(self._events) if event.kind == "node.updated" and event.node == name)

    def _cordoned_then(self, name: str) -> bool:
        cordoned = name in self._views and self._views[name].state == "cordoned"
        for event in self._marks(name):
            if event.detail.get("cordon") is not None or event.detail.get("drain"):
                cordoned = not (event.detail.get("cordon") or event.detail.get("drain"))
        return cordoned

    def _taints_then(self, name: str, now: list[str]) -> list[str]:
        taints = list(now)
        for event in self._marks(name):
            taints = [taint for taint in taints if taint not in event.detail.get("add_taints", ())]
            taints += event.detail.get("remove_taints", ())
        return taints


def _facts_of(event: Event) -> list[dict[str, Any]]:
    if event.kind != "node.updated":
        return [{"join" if event.kind == "node.joined" else "lose": event.node}]
    out: list[dict[str, Any]] = []
    detail = event.detail
    if detail.get("drain"):
        out.append({"drain": event.node})
    elif detail.get("cordon") is not None:
        out.append({"cordon" if detail["cordon"] else "uncordon": event.node})
    out += [{"taint": event.node, "as": taint} for taint in detail.get("add_taints", ())]
    out += [{"untaint": event.node, "as": taint} for taint in detail.get("remove_taints", ())]
    return out


def _of_view(view: NodeView) -> dict[str, Any]:
    place: dict[str, Any] = {
        key: view.location[key]
        for key in ("region", "zone", "datacenter", "rack", "lat", "lng")
        if key in view.location
    }
    taints = [str(convert(to_builtins(taint), Taint)) for taint in view.taints]
    sockets = [{"cpus": list(socket.cpus), "gpus": list(socket.gpus)} for socket in view.sockets]
    more: dict[str, Any] = {
        "labels": view.labels, "taints": taints, "arch": view.arch, "gpu_type": view.gpu_type, **place,
        "data": view.data, "cost": view.cost, "overcommit": view.overcommit, "sockets": sockets,
        "backend": view.backend if view.backend != "local" else "",
    }  # fmt: skip
    return {"name": view.name, **_amounts(view.capacity)} | {
        key: value for key, value in more.items() if value not in ("", 0, [], {}, None) or key in ("lat", "lng")
    }


def _of_event(event: Event) -> dict[str, Any]:
    """A node that is gone: its last event says what it was."""
    more = {"labels": event.detail.get("labels", {}), "taints": event.detail.get("taints", [])}
    entry: dict[str, Any] = {"name": event.node, **_amounts(event.detail.get("capacity", {}))}
    return entry | {key: value for key, value in more.items() if value}


def _amounts(capacity: dict[str, str]) -> dict[str, Any]:
    given = {name: whole(amount) for name, amount in capacity.items()}
    out: dict[str, Any] = {_TOP[name]: amount for name, amount in given.items() if name in _TOP and amount}
    rest = {name: amount for name, amount in given.items() if name not in _TOP}
    return out | ({"resources": rest} if rest else {})


# ----------------------------------------------------------------------------------------------------

MOST_JOBS = 2000
MOST_EVENTS = 200_000
# How long before it a job may have been submitted that was still around, and has ended and been quiet since.
LOOK_BACK_MS = 24 * 3_600_000
_ACTIVE = tuple(state for state in JOB_TRANSITIONS if state not in JOB_ENDED)


def scenario_text(client: Client, id: int) -> str:
    """The file that `hodei test` plays again."""
    detail = client.job(id)
    told = list(client.events(job=id))
    first = next((event for event in told if event.kind == "job.submitted"), None)
    if first is None:
        raise NotFound(
            f"what happened to job {id} is no longer known", hint="events are kept as long as ended jobs are"
        )
    ended = detail.job.state in JOB_ENDED
    events = _events_since(client, first.seq)
    end_ms = max(event.at_ms for event in (told if ended else events))
    window = [event for event in events if event.at_ms <= end_ms]
    details = _around(client, detail, window, first.at_ms, end_ms)
    jobs = [JobStory(one, window, first.at_ms, end_ms) for one in details]
    _name_apart(jobs)
    nodes = NodeStory(client.nodes(), events, first.at_ms, end_ms, {run.node for job in jobs for run in job.runs})
    names = {job.id: job.name for job in jobs}
    facts = sorted([*nodes.facts(), *(fact for job in jobs for fact in job.facts())], key=lambda fact: fact[0])
    mine = [job for job in jobs if job.id == id]
    others = [job for job in jobs if job.id != id]
    expect = [one for job in (*mine, *others) for one in job.expectations()]
    expect += _preemptions(window, names)
    head = (
        f"# What happened around job {id} ({detail.job.name}); times count from its submission, {detail.job.submitted_at}.\n"
        "# `hodei test` plays it again.\n"
    )
    config = _given(client.scheduling())
    parts = [("cluster", nodes.cluster()), ("jobs", [job.document() for job in jobs])]
    parts += [("facts", [{"at": format_duration(at_ms), **fact} for at_ms, fact in facts]), ("expect", expect)]
    return "".join([
        head,
        f"scenario: {flow(f'job {id} ({detail.job.name}) as it happened')}\n",
        f"config: {flow(config)}\n" if config else "",
        *(f"{key}:\n" + "".join(f"  - {flow(one)}\n" for one in entries) for key, entries in parts if entries),
        f"until: {format_duration(end_ms - first.at_ms + 2000)}\n",
    ])  # fmt: skip


def _events_since(client: Client, seq: int) -> list[Event]:
    out = []
    for event in client.events(after=seq - 1):
        out.append(event)
        if len(out) > MOST_EVENTS:
            raise InvalidInput(
                f"more than {MOST_EVENTS} events since that job", hint="export it nearer to when it happens"
            )
    return out


def _around(client: Client, detail: JobDetail, window: list[Event], began_ms: int, end_ms: int) -> list[JobDetail]:
    """All that waited or ran between the two, oldest first."""
    ids = {event.job for event in window if event.job}
    views = [*client.jobs(state=_ACTIVE), *client.jobs(since=str(began_ms - LOOK_BACK_MS))]
    ids |= {
        view.id
        for view in views
        if millis(view.submitted_at) <= end_ms and (not view.finished_at or millis(view.finished_at) >= began_ms)
    }
    if len(ids) > MOST_JOBS:
        raise InvalidInput(f"{len(ids)} jobs waited or ran at that time; a scenario takes {MOST_JOBS} at most")
    out = {detail.job.id: detail}
    for id in sorted(ids - {detail.job.id}):
        try:
            out[id] = client.job(id)
        except NotFound:
            continue  # forgotten meanwhile
    return [out[id] for id in sorted(out)]


def _name_apart(jobs: list[JobStory]) -> None:
    """Expectations name jobs, so each needs a name of its own."""
    seen: set[str] = set()
    for job in jobs:
        if job.name in seen:
            job.name = f"{job.name[:50]}-{job.id}"
        seen.add(job.name)


def _preemptions(window: Iterable[Event], names: dict[int, str]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for event in window:
        if event.kind == "job.preempted" and event.detail.get("by") in names and event.job in names:
            one = {"preempted": names[event.job], "by": names[event.detail["by"]]}
            out += [one] if one not in out else []
    return out


def _given(config: SchedulingConfig) -> dict[str, Any]:
    """What differs from the defaults, as it would be written."""
    said = _changed(config)
    assert isinstance(said, dict)
    return said


def _changed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _changed(inner) for key, inner in value.items()}
    if not hasattr(value, "__struct_fields__"):
        return to_builtins(value)
    out = {}
    for field in structs.fields(value):
        default = field.default_factory() if callable(field.default_factory) else field.default
        inner = getattr(value, field.name)
        if inner != default:
            out[field.name] = _changed(inner)
    return out
