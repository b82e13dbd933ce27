"""Small builders of model values for tests: sensible defaults, all overridable, quantities as people write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hodei.model.effects import Event, Save, SaveEvent, SaveJob, SaveKey, Start
from hodei.model.ids import run_id
from hodei.model.job import PRIORITY_CLASSES, Job, JobSpec, Run, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import Resources, parse_resources
from hodei.ports import JobQuery, Store

NOW_MS = 1_700_000_000_000
Amounts = Mapping[str, str | int | float]


def amounts(cpu: str | int | float = "", memory: str | int = "", gpu: str | int = "", **others: str | int) -> Resources:
    """`amounts(cpu="500m", memory="1Gi")`; what is not named is left out."""
    given = {"cpu": cpu, "memory": memory, "gpu": gpu, **others}
    return parse_resources({name: amount for name, amount in given.items() if amount != ""})


def a_task(
    name: str = "main",
    *,
    cpu: str | int | float = "1",
    memory: str | int = "1Gi",
    gpu: str | int = "",
    request: Amounts | None = None,
    **fields: Any,
) -> TaskSpec:
    """`request`, if given, adds to cpu, memory and gpu (custom resources) or replaces them."""
    wanted = amounts(cpu, memory, gpu) | parse_resources(request or {})
    fields.setdefault("command", ("/bin/true",))
    return TaskSpec(name=name, request=wanted, **fields)


_SPEC_FIELDS = frozenset(JobSpec.__struct_fields__)


def a_job_spec(name: str = "job", *, priority: int | str = "medium", **fields: Any) -> JobSpec:
    """Fields of the spec go to the spec; all others (`cpu`, `memory`, `count`, `command` ...) to its one task."""
    of_spec = {key: value for key, value in fields.items() if key in _SPEC_FIELDS}
    of_task = {key: value for key, value in fields.items() if key not in _SPEC_FIELDS}
    if "tasks" not in of_spec:
        of_spec["tasks"] = (a_task(**of_task),)
    elif of_task:
        raise TypeError(f"give either tasks or fields of the one task, not both: {sorted(of_task)}")
    of_spec["tasks"] = tuple(of_spec["tasks"])
    return JobSpec(name=name, priority=PRIORITY_CLASSES.get(priority, priority), **of_spec)  # type: ignore[arg-type]


_JOB_FIELDS = frozenset(Job.__struct_fields__)


def a_job(
    id: int = 1, *, state: str = "pending", at_ms: int = NOW_MS, spec: JobSpec | None = None, **fields: Any
) -> Job:
    """Fields of the job go to the job; all others to `a_job_spec` (`name`, `project`, `cpu`, `count` ...)."""
    of_job = {key: value for key, value in fields.items() if key in _JOB_FIELDS}
    of_spec = {key: value for key, value in fields.items() if key not in _JOB_FIELDS}
    if spec is None:
        spec = a_job_spec(of_spec.pop("name", f"job-{id}"), **of_spec)
    elif of_spec:
        raise TypeError(f"give either spec or fields of it, not both: {sorted(of_spec)}")
    of_job.setdefault("submitted_ms", at_ms)
    of_job.setdefault("changed_ms", at_ms)
    return Job(id=id, spec=spec, state=state, **of_job)  # type: ignore[arg-type]


def a_run(
    job: int = 1, member: int = 0, attempt: int = 1, *, node: str = "n1", state: str = "placed", **fields: Any
) -> Run:
    fields.setdefault("id", run_id(job, member, attempt))
    fields.setdefault("task", "main")
    fields.setdefault("backend", "local")
    fields.setdefault("placed_ms", NOW_MS)
    return Run(job=job, member=member, attempt=attempt, node=node, state=state, **fields)  # type: ignore[arg-type]


def a_node(
    name: str = "n1",
    cpu: str | int | float = "4",
    memory: str | int = "16Gi",
    *,
    gpu: str | int = "",
    capacity: Amounts | None = None,
    **fields: Any,
) -> Node:
    """`capacity`, if given, adds to cpu, memory and gpu or replaces them."""
    fields.setdefault("backend", "local")
    return Node(name=name, capacity=amounts(cpu, memory, gpu) | parse_resources(capacity or {}), **fields)


def an_event(seq: int = 1, kind: str = "job.submitted", *, at_ms: int = NOW_MS, **fields: Any) -> Event:
    return Event(seq=seq, at_ms=at_ms, kind=kind, **fields)


def a_record(seq: int = 1, kind: str = "job.submitted", **fields: Any) -> SaveEvent:
    return SaveEvent(an_event(seq, kind, **fields))


def a_key(key: str = "key-1", jobs: tuple[int, ...] = (1,), *, at_ms: int = NOW_MS, fingerprint: str = "f") -> SaveKey:
    return SaveKey(key=key, fingerprint=fingerprint, jobs=jobs, at_ms=at_ms)


def an_order(job: int, *command: str, **fields: Any) -> Start:
    """The start of the first run of a job with one task; `fields` as in `a_job_spec`."""
    spec = a_job_spec(f"job-{job}", command=command or ("/bin/true",), **fields)
    return Start(run=a_run(job), spec=spec, task=spec.tasks[0])


Connect = Callable[[], Store]


def new_jobs(*ids: int, **fields: Any) -> list[Save]:
    return [SaveJob(a_job(id, **fields), new=True) for id in ids]


def all_pages(store: Store, **query: Any) -> list[int]:
    ids: list[int] = []
    after = 0
    while True:
        page = store.jobs(JobQuery(after=after, **query))
        ids += [job.id for job in page.jobs]
        after = page.next_after
        if not after:
            return ids
