"""A job's story as a scenario: the cluster as it was, the jobs around it with the times that they really took, what
operators and nodes did, and what happened as what is expected. Made of the server's answers alone.

What jobs run, their environment and their annotations are left out: the scheduler does not look at them, and they may hold
secrets. Troubles of backends (a start that failed, an agent out of reach) are not told by events and so not replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import structs, to_builtins

from hodei.api.views import JobDetail
from hodei.client.api import Client
from hodei.client.incident_jobs import JobStory, millis
from hodei.client.incident_nodes import NodeStory
from hodei.jobfile.flow_yaml import flow
from hodei.model.config import SchedulingConfig
from hodei.model.effects import Event
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.lifecycle import JOB_ENDED, JOB_STEPS
from hodei.model.quantity import format_duration

MOST_JOBS = 2000
MOST_EVENTS = 200_000
# How long before it a job may have been submitted that was still around, and has ended and been quiet since.
LOOK_BACK_MS = 24 * 3_600_000
_ACTIVE = tuple(state for state in JOB_STEPS if state not in JOB_ENDED)


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
