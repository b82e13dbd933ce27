"""From what was written to what is meant: a form becomes a `JobSpec`, or a list of everything that is wrong with it.

Bulk submits come through here, so nothing is parsed twice: names, quantities, labels and resources are remembered,
and equal ones share one object. The story goes on in `control`'s admission.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from hodei.jobfile import schema
from hodei.jobfile.names import (
    did_you_mean,
    env_name,
    job_name,
    label_key,
    label_value,
    name_of_program,
    plain_name,
    shown,
)
from hodei.jobfile.names import word as checked_word
from hodei.jobfile.sections import affinity, after, array, escalation, gang, health, placement
from hodei.jobfile.values import Entry, Problems, absolute_path, check_text, duration, program, settle, size, take
from hodei.jobfile.values import command as read_command
from hodei.model.errors import InvalidInput
from hodei.model.job import (
    PRIORITY_CLASSES,
    Affinity,
    BackendChoice,
    Batch,
    DataProcessing,
    Interactive,
    JobSpec,
    LongRunning,
    RestartPolicy,
    Serverless,
    TaskSpec,
    Workload,
)
from hodei.model.node import Location
from hodei.model.resources import GPU, format_duration

T = TypeVar("T")

# One job as a store likes it.
MAX_JOB_TEXT = 1024 * 1024
LAST_MS = 253_402_300_799_999
_RESTART: dict[str, RestartPolicy] = {"never": "never", "onfailure": "on_failure", "always": "always"}
_NO_RESOURCES = settle((), ())
_ANY, _NOWHERE, _BATCH, _NO_AFFINITY = BackendChoice(), Location(), Batch(), Affinity()


def flat_spec(form: schema.FlatJob, now_ms: int, at: str, problems: Problems) -> JobSpec:
    """`at` goes before every path; the answer is to be used only if no problem was added."""
    requests: list[Entry] = []
    if form.cpu is not None:
        requests.append(("cpu", "cpu", form.cpu))
    if form.memory is not None:
        requests.append(("memory", "memory", form.memory))
    if form.storage is not None:
        requests.append(("storage", "storage", form.storage))
    if form.gpu is not None:
        requests.append(("gpu", "gpu", form.gpu))
    limits: list[Entry] = [(f"limits.{name}", name, amount) for name, amount in (form.limits or {}).items()]
    task = _task(form, "main", requests, limits, form.labels or {}, at, problems)
    name = form.name
    if name is None:
        name = name_of_program(program(form.command))
    return _job(form, form, name, (task,), now_ms, at, at, problems)


def full_spec(form: schema.FullJob, now_ms: int, at: str, problems: Problems) -> JobSpec:
    """`at` goes before every path; the answer is to be used only if no problem was added."""
    tasks = []
    for i, task in enumerate(form.spec.tasks):
        path = f"{at}spec.tasks[{i}]."
        name = task.name or ("main" if len(form.spec.tasks) == 1 else f"task-{i + 1}")
        called = take(problems, f"{path}name", plain_name, name, name)
        tasks.append(_task(task, called, [], [], form.metadata.labels or {}, path, problems))
        if any(other.name == name for other in tasks[:-1]):
            problems.append((f"{path}name", f"there are two tasks with the name {shown(name)}"))
    if sum(task.count for task in tasks) > schema.MAX_COUNT:
        problems.append((f"{at}spec.tasks", f"more than {schema.MAX_COUNT} members in one job"))
    meta, keys = form.metadata, form.spec
    return _job(meta, keys, meta.name, tuple(tasks), now_ms, f"{at}metadata.", f"{at}spec.", problems)


def _job(
    who: schema.FlatJob | schema.Metadata,
    keys: schema.FlatJob | schema.JobKeys,
    name: str,
    tasks: tuple[TaskSpec, ...],
    now_ms: int,
    who_at: str,
    at: str,
    problems: Problems,
) -> JobSpec:
    workload: Workload = _BATCH
    filled = _NOTHING
    if keys.workload is not None:
        workload, filled = _workload(keys.workload, f"{at}workload", problems)
    timeout = duration(keys.timeout, f"{at}timeout", problems)
    estimate = duration(keys.estimate, f"{at}estimate", problems)
    grace = duration(keys.grace, f"{at}grace", problems)
    restart = None if keys.restart is None else take(problems, f"{at}restart", _restart, keys.restart, None)
    retries = keys.retries
    if filled is not _NOTHING:
        timeout = _agree(timeout, "timeout", filled, at, problems, format_duration)
        estimate = _agree(estimate, "estimate", filled, at, problems, format_duration)
        retries = _agree(retries, "retries", filled, at, problems, str)
        restart = _agree(restart, "restart", filled, at, problems, str)
    if sum(map(_weight, tasks)) > MAX_JOB_TEXT:
        problems.append(
            (at.rstrip("."), f"the job's commands and variables are larger than {MAX_JOB_TEXT // 1024} KiB together")
        )
    return JobSpec(
        take(problems, f"{who_at}name", job_name, name, name),
        tasks,
        "default" if who.project is None else take(problems, f"{who_at}project", plain_name, who.project, ""),
        "",
        _labels(who.labels, f"{who_at}labels", problems) if who.labels else {},
        _annotations(who.annotations, f"{who_at}annotations", problems) if who.annotations else {},
        500 if keys.priority is None else take(problems, f"{at}priority", _priority, keys.priority, 0),
        "default" if keys.profile is None else take(problems, f"{at}profile", checked_word, keys.profile, ""),
        _ANY if keys.backend is None else take(problems, f"{at}backend", placement.backend, keys.backend, _ANY),
        _NOWHERE if keys.near is None else take(problems, f"{at}near", placement.near, keys.near, _NOWHERE),
        workload,
        estimate or 0,
        timeout or 0,
        duration(keys.scheduling_timeout, f"{at}scheduling_timeout", problems) or 0,
        0 if keys.deadline is None else _deadline(keys.deadline, now_ms, f"{at}deadline", problems),
        10_000 if grace is None else grace,
        retries or 0,
        restart or "on_failure",
        _inputs(keys.inputs, f"{at}inputs", problems) if keys.inputs else (),
        *gang.job_rules(keys, tasks, at, problems),
        max_queue_time_ms=duration(keys.max_queue_time, f"{at}max_queue_time", problems) or 0,
        health=health.NOBODY_LOOKS if keys.health is None else health.health(keys.health, f"{at}health", problems),
        retry_on=() if keys.retry_on is None else health.retry_on(keys.retry_on, f"{at}retry_on", problems),
        after=after.NOTHING if keys.after is None else after.dependencies(keys.after, f"{at}after", problems),
        array=None if keys.array is None else array.array_of(keys.array, f"{at}array", problems),
        escalation=escalation.NOTHING
        if keys.escalation is None
        else escalation.escalation(keys.escalation, f"{at}escalation", problems),
    )


def _task(
    form: schema.FlatJob | schema.TaskForm,
    name: str,
    requests: list[Entry],
    limits: list[Entry],
    labels: dict[str, str],
    at: str,
    problems: Problems,
) -> TaskSpec:
    if form.resources:
        _spread(form.resources, requests, limits, at, problems)
    request, most, wrong = settle(tuple(requests), tuple(limits)) if requests or limits else _NO_RESOURCES
    problems += [(at + place, text) for place, text in wrong]
    command = () if form.command is None else read_command(form.command, f"{at}command", problems)
    if (not command and not form.image) or (command and not program(form.command)):
        problems.append((f"{at}command", "missing: give the program and its arguments"))
    if form.gpu_type and not request.get(GPU):
        problems.append((f"{at}gpu_type", "gpu_type without a gpu; add gpu: 1, or leave gpu_type out"))
    return TaskSpec(
        name,
        form.count or 1,
        command,
        _env(form.env, f"{at}env", problems) if form.env else {},
        take(problems, f"{at}workdir", absolute_path, form.workdir, "") if form.workdir else "",
        take(problems, f"{at}image", _image, form.image, "") if form.image else "",
        request,
        most,
        take(problems, f"{at}arch", checked_word, form.arch, "") if form.arch else "",
        take(problems, f"{at}gpu_type", checked_word, form.gpu_type, "") if form.gpu_type else "",
        _labels(form.node_selector, f"{at}node_selector", problems) if form.node_selector else {},
        placement.affinity(form.affinity, f"{at}affinity", problems) if form.affinity else _NO_AFFINITY,
        tuple(
            take(problems, f"{at}tolerations[{i}]", placement.toleration, given, placement.EVERYTHING)
            for i, given in enumerate(form.tolerations)
        )
        if form.tolerations
        else (),
        *affinity.rules(form, labels, at, problems),
        *gang.task_rules(form, request, at, problems),
    )


# ------------------------------------------------------------------------------------------- single keys


def _deadline(value: str | int | float, now_ms: int, path: str, problems: Problems) -> int:
    if not isinstance(value, str) or value[4:5] != "-" or value[7:8] != "-":
        return now_ms + (duration(value, path, problems) or 0)
    try:
        moment = datetime.fromisoformat(value.strip())
    except ValueError:
        problems.append((path, f"{shown(value)} is not a time; write 2030-01-31T18:00:00Z, or a duration such as 4h"))
        return 0
    if moment.tzinfo is None:
        problems.append((path, f"{shown(value)} does not say in which time zone; add Z (UTC) or an offset like +02:00"))
        return 0
    at_ms = round(moment.timestamp() * 1000)
    if not 0 < at_ms <= LAST_MS:
        problems.append((path, f"{shown(value)} is out of range"))
    return at_ms


@lru_cache(maxsize=256)
def _priority(value: int | str) -> int:
    if isinstance(value, int):
        return value
    if value not in PRIORITY_CLASSES:
        raise InvalidInput(
            f"unknown priority {shown(value)}: {', '.join(PRIORITY_CLASSES)} or a whole number"
            f"{did_you_mean(value, PRIORITY_CLASSES)}"
        )
    return PRIORITY_CLASSES[value]


def _restart(value: str) -> RestartPolicy | None:
    policy = _RESTART.get(value.lower().replace("_", "").replace("-", ""))
    if policy is None:
        raise InvalidInput(f"unknown restart policy {shown(value)}: never, on_failure or always")
    return policy


def _inputs(names: list[str], at: str, problems: Problems) -> tuple[str, ...]:
    """Each once, in the order given."""
    return tuple(dict.fromkeys(take(problems, f"{at}[{i}]", checked_word, name, name) for i, name in enumerate(names)))


def _image(value: str) -> str:
    if not value.isascii() or not value.isprintable() or " " in value:
        raise InvalidInput(f"{shown(value)} is not the name of an image", hint="for example python:3.12")
    return value


def _labels(labels: dict[str, str], at: str, problems: Problems) -> dict[str, str]:
    try:
        return _checked_labels(tuple(labels.items()))
    except InvalidInput:
        for key, value in labels.items():
            take(problems, at, label_key, key, key)
            take(problems, f"{at}.{key}" if key.isprintable() else at, label_value, value, value)
        return labels


@lru_cache(maxsize=2048)
def _checked_labels(items: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {label_key(key): label_value(value) for key, value in items}


def _annotations(notes: dict[str, str], at: str, problems: Problems) -> dict[str, str]:
    for key in notes:
        take(problems, at, label_key, key, key)
    check_text(tuple(notes.values()), at, problems)
    return notes


def _env(env: dict[str, str | int], at: str, problems: Problems) -> dict[str, str]:
    for name in env:
        take(problems, at, env_name, name, name)
    out = {name: value if isinstance(value, str) else str(value) for name, value in env.items()}
    check_text(tuple(out.values()), at, problems)
    return out


def _weight(task: TaskSpec) -> int:
    return sum(map(len, task.command)) + (sum(map(len, task.env.values())) if task.env else 0)


def _spread(resources: dict[str, Any], requests: list[Entry], limits: list[Entry], at: str, problems: Problems) -> None:
    """`{requests, limits}` or the requests themselves: into the lists that they belong to."""
    for name, given in resources.items():
        if name in ("requests", "limits") and isinstance(given, dict):
            into = requests if name == "requests" else limits
            into += [(f"resources.{name}.{inner}", inner, amount) for inner, amount in given.items()]
        elif isinstance(given, dict):
            problems.append((f"{at}resources", f"{shown(name)} is neither requests nor limits, and not an amount"))
        else:
            requests.append((f"resources.{name}", name, given))


# ------------------------------------------------------------------------------------------- workload

# General key -> (where it was said, value), for the keys that a workload type fills.
Filled = dict[str, tuple[str, Any]]
_NOTHING: Filled = {}


def _workload(given: str | schema.WorkloadForm, at: str, problems: Problems) -> tuple[Workload, Filled]:
    if isinstance(given, str):
        if given not in schema.WORKLOADS:
            known = ", ".join(schema.WORKLOADS)
            problems.append((at, f"unknown workload {shown(given)}: {known}{did_you_mean(given, schema.WORKLOADS)}"))
            return _BATCH, _NOTHING
        given = schema.WORKLOADS[given]()
    said_here: Filled = {}

    def fill(general: str, key: str, value: Any) -> None:
        if value is not None:
            said_here[general] = (f"workload.{key}", value)

    match given:
        case schema.LongRunningForm():
            longest = duration(given.max_duration, f"{at}.max_duration", problems)
            fill("timeout", "max_duration", longest)
            if given.restart_policy is not None:
                policy = take(problems, f"{at}.restart_policy", _restart, given.restart_policy, None)
                fill("restart", "restart_policy", policy)
            return LongRunning(longest or 0), said_here
        case schema.BatchForm():
            usual = duration(given.estimated_duration, f"{at}.estimated_duration", problems)
            fill("estimate", "estimated_duration", usual)
            fill("retries", "max_retries", given.max_retries)
            return _BATCH, said_here
        case schema.ServerlessForm():
            fill("timeout", "timeout", duration(given.timeout, f"{at}.timeout", problems))
            return Serverless(given.cold_start_acceptable is not False), said_here
        case schema.DataProcessingForm():
            amounts = [
                0 if value is None else take(problems, f"{at}.{key}", size, value, 0)
                for key, value in (("input_size", given.input_size), ("output_size", given.output_size))
            ]
            return DataProcessing(*amounts), said_here
        case schema.InteractiveForm():
            longest = duration(given.max_execution_time, f"{at}.max_execution_time", problems)
            fill("timeout", "max_execution_time", longest)
            return Interactive(duration(given.idle_timeout, f"{at}.idle_timeout", problems) or 0), said_here


def _agree(
    value: T | None, key: str, filled: Filled, at: str, problems: Problems, show: Callable[[Any], str]
) -> T | None:
    """The general key's value, or the workload's where that is missing; both with different values are a problem."""
    if key not in filled:
        return value
    place, other = filled[key]
    if value is not None and value != other:
        text = f"{key} is {show(value)} but {place} is {show(other)}; give one of them"
        problems.append((f"{at}{key}", text))
    return other if value is None else value
