"""Export an incident as a scenario for `hodei test`, from the server's responses alone: the cluster as it was, the jobs of
that time with their real durations, the actions of operators and nodes, and what happened as expectations.

Commands, environments and annotations are omitted: they do not affect scheduling and may contain secrets. Failures of
backends (a failed start, an unreachable agent) have no events, so they are not replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct, convert, to_builtins

from hodei.api.config import non_defaults
from hodei.api.views import JobDetail, NodeView, RunView
from hodei.client.api import Client
from hodei.jobfile.yaml_reader import flow
from hodei.model.effects import Event
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.job import JOB_ENDED, JOB_TRANSITIONS
from hodei.model.node import Taint
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, format_duration

_OMITTED = ("command", "env", "workdir", "image")
_STOP_EVENTS = ("job.cancel_requested", "job.preempted", "job.requeue_requested", "job.shrunk")
# Reasons that are the same in a replay.
_REASONS = ("CANCELLED", "EXIT_CODE", "TIMEOUT", "SCHEDULING_TIMEOUT", "QUEUE_TIME_EXCEEDED")


class GangStart(Struct):
    """One start of the whole gang, with the runs since then. `nodes` is its first placement."""

    at_ms: int
    runs: list[RunView]

    @property
    def nodes(self) -> list[str]:
        return sorted({run.node for run in self.runs if millis(run.placed_at) == self.at_ms})


class IncidentJob:
    """One job of the scenario. `start_ms` and `end_ms` bound the scenario; written times count from `start_ms`."""

    def __init__(self, detail: JobDetail, window: Sequence[Event], start_ms: int, end_ms: int) -> None:
        self.id, self.name = detail.job.id, detail.job.name
        self._detail, self._start_ms, self._end_ms = detail, start_ms, end_ms
        self._all = window
        self._events = [event for event in window if event.job == self.id]
        self._ends = {event.run: event.at_ms for event in window if event.kind == "run.ended"}
        self.runs = [
            run
            for run in detail.runs
            if millis(run.placed_at) <= end_ms and (not self._end_of(run) or self._end_of(run) > start_ms)
        ]
        self.starts = self._starts()

    def _end_of(self, run: RunView) -> int:
        return self._ends.get(run.id) or millis(run.finished_at)

    def _starts(self) -> list[GangStart]:
        """One for each attempt that placed the whole gang; runs of other attempts are members that joined later."""
        scheduled = {
            event.detail.get("attempt"): event.at_ms for event in self._events if event.kind == "job.scheduled"
        }
        old = [run for run in self.runs if millis(run.placed_at) < self._start_ms]
        out = [GangStart(min(millis(run.placed_at) for run in old), [])] if old else []
        for run in sorted(self.runs, key=lambda run: (run.attempt, run.member)):
            if run.attempt in scheduled and (not out or out[-1].at_ms != scheduled[run.attempt]):
                out.append(GangStart(scheduled[run.attempt], []))
            if out:
                out[-1].runs.append(run)
        return out

    def document(self) -> dict[str, Any]:
        submitted = next((event.at_ms for event in self._events if event.kind == "job.submitted"), 0)
        at_ms = (submitted or millis(self._detail.job.submitted_at)) - self._start_ms
        out: dict[str, Any] = {"name": self.name, "id": self.id}
        if self.starts and self.starts[0].at_ms < self._start_ms:
            at_ms = self.starts[0].at_ms - self._start_ms
            nodes = [run.node for run in sorted(self.starts[0].runs, key=lambda run: run.member)]
            out["running"] = nodes[0] if len(set(nodes)) == 1 else nodes
        out["at"] = f"-{format_duration(-at_ms)}" if at_ms < 0 else format_duration(at_ms)
        durations = [self._run_ms(start) for start in self.starts]
        longest = max((ms for ms in durations if ms is not None), default=None)
        runs = ["forever" if ms is None else format_duration(ms) for ms in durations] or ["forever"]
        if longest is not None and runs[-1] == "forever":
            runs.append(format_duration(longest))  # in case it starts once more
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
        return out | self._job_keys()

    def _job_keys(self) -> dict[str, Any]:
        """The keys of the job file, in the short form if it has one task."""
        spec = dict(self._detail.spec["spec"])
        if "deadline" in spec:
            left_ms = millis(spec["deadline"]) - millis(self._detail.job.submitted_at)
            spec["deadline"] = format_duration(max(left_ms, 0))
        tasks = [{key: value for key, value in task.items() if key not in _OMITTED} for task in spec.pop("tasks")]
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
            request = {name: number_or_text(amount) for name, amount in amounts.get("requests", {}).items()}
            top = {key: request.pop(key) for key in ("cpu", "memory", "gpu") if key in request}
            task = top | ({"resources": request} if request else {}) | task
        return task | metadata | spec

    def _run_ms(self, start: GangStart) -> int | None:
        """How long its runs took; None if none of them ended by itself."""
        own = [run for run in start.runs if run.state in ("succeeded", "failed") and run.reason_code != "timeout"]
        return max((self._end_of(run) - millis(run.placed_at) for run in own), default=None)

    def _stopping_ms(self, run: RunView) -> int:
        """The time from the request to stop until the run ended."""
        if run.state != "stopped":
            return 0
        ended_ms = self._end_of(run)
        requested = [event.at_ms for event in self._events if event.kind in _STOP_EVENTS and event.at_ms <= ended_ms]
        requested += [
            event.at_ms
            for event in self._all
            if event.at_ms <= ended_ms
            and (
                (event.kind == "node.updated" and event.node == run.node)
                or (event.kind == "run.ended" and event.job == self.id and event.run != run.id)
            )
        ]
        return ended_ms - max(requested, default=ended_ms)

    def facts(self) -> list[TimedFact]:
        verbs = {
            "job.cancel_requested": "cancel", "job.released": "release", "job.resumed": "release",
            "job.requeue_requested": "requeue",
        }  # fmt: skip
        out: list[TimedFact] = []
        requeue_requested = False
        for event in self._events:
            verb = verbs.get(event.kind, "")
            if event.kind == "job.held" and not event.detail.get("reason"):
                verb = "hold"
            elif event.kind == "job.requeued":
                # The requeue of an ended job has no request before it.
                by_user = event.detail.get("reason") == "requeued by a user"
                verb = "requeue" if by_user and not requeue_requested else ""
                requeue_requested = False
            requeue_requested = requeue_requested or event.kind == "job.requeue_requested"
            if verb:
                out.append((event.at_ms - self._start_ms, {verb: self.name}))
        return out

    def expectations(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for number, start in enumerate(self.starts, 1):
            if start.at_ms >= self._start_ms:
                again: dict[str, Any] = {} if number == 1 else {"attempt": number}
                nodes: Any = start.nodes if len(start.nodes) > 1 else start.nodes[0]
                about = {"about": format_duration(start.at_ms - self._start_ms)}
                out.append({"job": self.name, **again, "starts": about, "on": nodes})
        ended = next((event for event in reversed(self._events) if event.kind == "job.ended"), None)
        view = self._detail.job
        if ended is not None and ended.detail.get("state") in JOB_ENDED and self._events[-1] is ended:
            code = ended.detail.get("reason_code", "")
            reason = {"reason": code} if code in _REASONS else {}
            out.append({"job": self.name, "ends": ended.detail["state"], **reason})
        elif view.state in ("pending", "held"):
            when = format_duration(self._end_ms - self._start_ms)
            reason = {"reason": view.reason_code} if view.reason_code else {}
            out.append({"at": when, "job": self.name, "state": view.state, **reason})
        return out


def millis(text: str) -> int:
    """Milliseconds since the epoch of an ISO time; 0 for none."""
    return round(datetime.fromisoformat(text).timestamp() * 1000) if text else 0


def number_or_text(amount: str) -> str | int:
    """A quantity for YAML: `2` is a number, `500m` is text."""
    return int(amount) if amount.isdigit() else amount


TimedFact = tuple[int, dict[str, Any]]
_TOP = {CPU: "cpu", MEMORY: "memory", GPU: "gpu", STORAGE: "storage"}


class IncidentNodes:
    """The nodes at `start_ms`: the current nodes with all `events` since then undone. Facts are those until `end_ms`.

    After a restart of the server all its nodes join again; such a join is no change of the cluster.
    """

    def __init__(
        self, views: Sequence[NodeView], events: Sequence[Event], start_ms: int, end_ms: int, used: set[str]
    ) -> None:
        self._start_ms, self._end_ms = start_ms, end_ms
        self._views = {view.name: view for view in views}
        self._events = list(_node_changes(events))
        lost = {event.node: event for event in self._events if event.kind == "node.lost"}
        self._removed = {name: event for name, event in lost.items() if name not in self._views}
        joined_later = {event.node for event in self._events if event.kind == "node.joined" and event.at_ms > end_ms}
        self._names = sorted(({*self._views} - (joined_later - used - {*lost})) | {*self._removed})

    def cluster(self) -> list[dict[str, Any]]:
        out = []
        for name in self._names:
            entry = _node_from_view(self._views[name]) if name in self._views else _node_from_event(self._removed[name])
            taints = self._taints_at_start(name, entry.pop("taints", []))
            mine = [event for event in self._events if event.node == name and event.kind != "node.updated"]
            if mine and mine[0].kind == "node.joined":
                entry["there"] = False
            out.append(entry | ({"taints": taints} if taints else {}))
        return out

    def facts(self) -> list[TimedFact]:
        out: list[TimedFact] = [(0, {"cordon": name}) for name in self._names if self._was_cordoned(name)]
        for event in self._events:
            if event.node in self._names and event.at_ms <= self._end_ms:
                out += [(event.at_ms - self._start_ms, fact) for fact in _facts_of(event)]
        return out

    def _updates(self, name: str) -> Iterable[Event]:
        return (event for event in reversed(self._events) if event.kind == "node.updated" and event.node == name)

    def _was_cordoned(self, name: str) -> bool:
        cordoned = name in self._views and self._views[name].state == "cordoned"
        for event in self._updates(name):
            if event.detail.get("cordon") is not None or event.detail.get("drain"):
                cordoned = not (event.detail.get("cordon") or event.detail.get("drain"))
        return cordoned

    def _taints_at_start(self, name: str, now: list[str]) -> list[str]:
        taints = list(now)
        for event in self._updates(name):
            taints = [taint for taint in taints if taint not in event.detail.get("add_taints", ())]
            taints += event.detail.get("remove_taints", ())
        return taints


def _node_changes(events: Iterable[Event]) -> Iterable[Event]:
    """The events of nodes, without the joins that only follow from a restart of the server."""
    joined, lost, restarted = set[str](), set[str](), False
    for event in events:
        if event.kind == "server.restarted":
            restarted, joined = True, set()
        elif event.kind == "node.joined":
            if not restarted or event.node in joined or event.node in lost:
                yield event
            joined.add(event.node)
            lost.discard(event.node)
        elif event.kind in ("node.lost", "node.updated"):
            lost |= {event.node} if event.kind == "node.lost" else set()
            yield event


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


def _node_from_view(view: NodeView) -> dict[str, Any]:
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


def _node_from_event(event: Event) -> dict[str, Any]:
    """A removed node, as its last event describes it."""
    more = {"labels": event.detail.get("labels", {}), "taints": event.detail.get("taints", [])}
    entry: dict[str, Any] = {"name": event.node, **_amounts(event.detail.get("capacity", {}))}
    return entry | {key: value for key, value in more.items() if value}


def _amounts(capacity: dict[str, str]) -> dict[str, Any]:
    given = {name: number_or_text(amount) for name, amount in capacity.items()}
    out: dict[str, Any] = {_TOP[name]: amount for name, amount in given.items() if name in _TOP and amount}
    rest = {name: amount for name, amount in given.items() if name not in _TOP}
    return out | ({"resources": rest} if rest else {})


MAX_JOBS = 2000
MAX_EVENTS = 200_000
# Jobs without events in the window are found if they were submitted at most this long before it.
LOOK_BACK_MS = 24 * 3_600_000
_ACTIVE = tuple(state for state in JOB_TRANSITIONS if state not in JOB_ENDED)


def scenario_text(client: Client, id: int) -> str:
    """The scenario file around one job."""
    detail = client.job(id)
    job_events = list(client.events(job=id))
    first = next((event for event in job_events if event.kind == "job.submitted"), None)
    if first is None:
        raise NotFound(
            f"the events of job {id} have been deleted", hint="events are kept as long as ended jobs: server.retention"
        )
    ended = detail.job.state in JOB_ENDED
    events = _events_since(client, first.seq)
    end_ms = max(event.at_ms for event in (job_events if ended else events))
    window = [event for event in events if event.at_ms <= end_ms]
    details = _concurrent_jobs(client, detail, window, first.at_ms, end_ms)
    jobs = [IncidentJob(one, window, first.at_ms, end_ms) for one in details]
    _make_names_unique(jobs)
    nodes = IncidentNodes(client.nodes(), events, first.at_ms, end_ms, {run.node for job in jobs for run in job.runs})
    names = {job.id: job.name for job in jobs}
    facts = sorted([*nodes.facts(), *(fact for job in jobs for fact in job.facts())], key=lambda fact: fact[0])
    mine = [job for job in jobs if job.id == id]
    others = [job for job in jobs if job.id != id]
    expect = [one for job in (*mine, *others) for one in job.expectations()]
    expect += _preemptions(window, names)
    head = (
        f"# What happened around job {id} ({detail.job.name}); times count from its submission, {detail.job.submitted_at}.\n"
        "# Replay it with `hodei test`.\n"
    )
    config = non_defaults(client.scheduling())
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
        if len(out) > MAX_EVENTS:
            raise InvalidInput(f"more than {MAX_EVENTS} events since that job was submitted", hint="export jobs sooner")
    return out


def _concurrent_jobs(
    client: Client, detail: JobDetail, window: list[Event], start_ms: int, end_ms: int
) -> list[JobDetail]:
    """All jobs that were pending or running in the window, oldest first."""
    ids = {event.job for event in window if event.job}
    views = [*client.jobs(state=_ACTIVE), *client.jobs(since=str(start_ms - LOOK_BACK_MS))]
    ids |= {
        view.id
        for view in views
        if millis(view.submitted_at) <= end_ms and (not view.finished_at or millis(view.finished_at) >= start_ms)
    }
    if len(ids) > MAX_JOBS:
        raise InvalidInput(f"{len(ids)} jobs were pending or running at that time; a scenario takes {MAX_JOBS} at most")
    out = {detail.job.id: detail}
    for id in sorted(ids - {detail.job.id}):
        try:
            out[id] = client.job(id)
        except NotFound:
            continue  # deleted meanwhile
    return [out[id] for id in sorted(out)]


def _make_names_unique(jobs: list[IncidentJob]) -> None:
    """Expectations refer to jobs by name."""
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
