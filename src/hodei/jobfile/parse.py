"""Parse job documents, in either form, one or many: decoded data or the bytes of a request in, `JobSpec`s out.

JSON in canonical spelling is decoded straight into the types of `schema`. Only if that fails is the document walked
again, slowly, to report every mistake. Bulk submissions come through here, so results are cached: equal names,
quantities, labels and resources share one object.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from hodei.jobfile import schema
from hodei.jobfile.check import MAX_PROBLEMS, convert, new_problems, refuse
from hodei.jobfile.schema import MAX_JOBS, FlatJob, FlatJobs, FullJob, FullJobs
from hodei.jobfile.sections import affinity, after, array, escalation, gang, health, placement
from hodei.jobfile.values import (
    Entry,
    Problems,
    absolute_path,
    check_text,
    did_you_mean,
    duration,
    priority,
    program,
    try_parse,
)
from hodei.jobfile.values import command as parse_command
from hodei.jobfile.values import resources as parse_task_resources
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.errors import InvalidInput
from hodei.model.job import (
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
from hodei.model.names import env_name, job_name, label_key, label_value, name_of_program, plain_name, safe_repr
from hodei.model.names import word as parse_word
from hodei.model.node import Location
from hodei.model.resources import GPU, format_duration, parse_quantity

T = TypeVar("T")

MAX_BODY_BYTES = 16 * 2**20
# Limit for bodies that need the slow path: far above MAX_JOBS ordinary jobs, far below what memory holds.
MAX_BODY_VALUES = 500_000
# Commands and variables of one job.
MAX_JOB_TEXT = 1024 * 1024
MAX_TIME_MS = 253_402_300_799_999

_FULL_KEYS = frozenset({"apiVersion", "api_version", "kind", "metadata", "spec"})
_ONE = (msgspec.json.Decoder(FlatJob), msgspec.json.Decoder(FullJob))
_BULK = (msgspec.json.Decoder(FlatJobs), msgspec.json.Decoder(FullJobs))
_LIST = (msgspec.json.Decoder(list[FlatJob]), msgspec.json.Decoder(list[FullJob]))
_YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
_JSON_TYPES = ("", "application/json", "text/json")
_RESTART: dict[str, RestartPolicy] = {"never": "never", "onfailure": "on_failure", "always": "always"}
_DEFAULT_RESOURCES = parse_task_resources((), ())
_ANY, _NOWHERE, _BATCH, _NO_AFFINITY = BackendChoice(), Location(), Batch(), Affinity()


def parse_job(data: object, *, now_ms: int = 0) -> JobSpec:
    """The job in `data` (decoded JSON or YAML). A deadline given as a duration counts from `now_ms`.

    InvalidInput lists every problem with its path.
    """
    problems: Problems = []
    spec = _parse_one(data, now_ms, "", problems)
    if problems or spec is None:
        raise refuse(problems)
    return spec


def parse_jobs(data: object, *, now_ms: int = 0) -> list[JobSpec]:
    """As `parse_job`, for one document, a list of them, or `{"jobs": [...]}`."""
    at, documents = "", data
    if isinstance(data, dict) and "jobs" in data and not _FULL_KEYS & data.keys():
        at, documents = "jobs", data["jobs"]
        if extra := [key for key in data if key != "jobs"]:
            key = extra[0]
            valid = isinstance(key, str) and key.isprintable() and len(key) <= 64
            raise refuse([(key if valid else safe_repr(key), "unknown key next to jobs; put it into each job")])
        if not isinstance(documents, list):
            raise refuse([("jobs", "expected a list of jobs")])
    if not isinstance(documents, list):
        return [parse_job(data, now_ms=now_ms)]
    if len(documents) > MAX_JOBS:
        raise refuse([(at, f"{len(documents)} jobs at once, at most {MAX_JOBS}; send them in parts")])
    problems: Problems = []
    specs = []
    for i, document in enumerate(documents):
        spec = _parse_one(document, now_ms, f"{at}[{i}].", problems)
        if len(problems) >= MAX_PROBLEMS:
            break
        if spec is not None:
            specs.append(spec)
    if problems:
        raise refuse(problems, "the jobs")
    return specs


def decode_jobs(raw: bytes, content_type: str = "application/json", *, now_ms: int = 0) -> list[JobSpec]:
    """The jobs of a request body, JSON or YAML by its content type; InvalidInput as in `parse_job`."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in _YAML_TYPES:
        documents = load_yaml(raw)
        return parse_jobs(documents[0] if len(documents) == 1 else documents, now_ms=now_ms)
    if kind not in _JSON_TYPES:
        raise InvalidInput(f"cannot read {safe_repr(kind)}", hint="send application/json or application/yaml")
    if len(raw) > MAX_BODY_BYTES:
        raise InvalidInput(f"more than {MAX_BODY_BYTES // 2**20} MiB at once", hint="send the jobs in parts")
    forms = _decode_fast(raw)
    if forms is None:
        return parse_jobs(_decode_slow(raw), now_ms=now_ms)
    problems: Problems = []
    single = len(forms) == 1 and raw.lstrip()[:1] == b"{" and not _is_bulk(raw)
    base = "jobs" if _is_bulk(raw) else ""
    specs = []
    for i, form in enumerate(forms):
        specs.append(_spec_of(form, now_ms, "" if single else f"{base}[{i}].", problems))
        if len(problems) >= MAX_PROBLEMS:
            break
    if problems:
        raise refuse(problems, "the job" if single else "the jobs")
    return specs


def _parse_one(data: object, now_ms: int, at: str, problems: Problems) -> JobSpec | None:
    form: type[FlatJob] | type[FullJob] = FlatJob
    if isinstance(data, dict) and _FULL_KEYS & data.keys():
        form = FullJob
    try:
        read: Any = msgspec.convert(data, form)
    except (msgspec.ValidationError, OverflowError, RecursionError):
        return _parse_slowly(data, form, now_ms, at, problems)
    return _spec_of(read, now_ms, at, problems)


def _parse_slowly(data: object, form: type, now_ms: int, at: str, problems: Problems) -> JobSpec | None:
    """The slow path: what is valid of the document is parsed too, to report wrong types and wrong values together."""
    wrong_types: Problems = []
    read = convert(data, form, at, wrong_types)
    wrong_values: Problems = []
    spec = None if read is None else _spec_of(read, now_ms, at, wrong_values)
    problems += wrong_types
    problems += new_problems(wrong_values, wrong_types)
    return spec


def _is_bulk(raw: bytes) -> bool:
    """Whether the body starts with `{"jobs":`. A wrong guess only costs the slow path."""
    return raw[:64].lstrip()[1:].lstrip().startswith(b'"jobs"')


def _decode_fast(raw: bytes) -> list[FlatJob | FullJob] | None:
    """The decoded documents, if the body is in canonical spelling and has no wrong types."""
    first = raw.lstrip()[:1]
    for decoder in _LIST if first == b"[" else _BULK if _is_bulk(raw) else _ONE:
        try:
            decoded: Any = decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
        if isinstance(decoded, FlatJobs | FullJobs):
            decoded = decoded.jobs
        elif not isinstance(decoded, list):
            decoded = [decoded]
        return decoded if len(decoded) <= MAX_JOBS else None
    return None


def _decode_slow(raw: bytes) -> object:
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_BODY_VALUES:
        raise InvalidInput(f"more than {MAX_BODY_VALUES} values at once", hint="send the jobs in parts")
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise InvalidInput("the document is nested too deeply", hint="a job is at most a few levels deep") from None
    except UnicodeDecodeError:
        raise InvalidInput("the document is not UTF-8", hint="send the text as UTF-8") from None
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"the document is not JSON: {error}", hint="for YAML, send content type application/yaml"
        ) from None


def _spec_of(form: FlatJob | FullJob, now_ms: int, at: str, problems: Problems) -> JobSpec:
    """`at` is the prefix of every path; the result is valid only if no problem was added."""
    if isinstance(form, FlatJob):
        return _flat_spec(form, now_ms, at, problems)
    return _full_spec(form, now_ms, at, problems)


def _flat_spec(form: schema.FlatJob, now_ms: int, at: str, problems: Problems) -> JobSpec:
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


def _full_spec(form: schema.FullJob, now_ms: int, at: str, problems: Problems) -> JobSpec:
    tasks = []
    for i, task in enumerate(form.spec.tasks):
        path = f"{at}spec.tasks[{i}]."
        name = task.name or ("main" if len(form.spec.tasks) == 1 else f"task-{i + 1}")
        valid_name = try_parse(problems, f"{path}name", plain_name, name, name)
        tasks.append(_task(task, valid_name, [], [], form.metadata.labels or {}, path, problems))
        if any(other.name == name for other in tasks[:-1]):
            problems.append((f"{path}name", f"there are two tasks with the name {safe_repr(name)}"))
    if sum(task.count for task in tasks) > schema.MAX_COUNT:
        problems.append((f"{at}spec.tasks", f"more than {schema.MAX_COUNT} members in one job"))
    meta, keys = form.metadata, form.spec
    return _job(meta, keys, meta.name, tuple(tasks), now_ms, f"{at}metadata.", f"{at}spec.", problems)


def _job(
    metadata: schema.FlatJob | schema.Metadata,
    keys: schema.FlatJob | schema.JobKeys,
    name: str,
    tasks: tuple[TaskSpec, ...],
    now_ms: int,
    metadata_at: str,
    at: str,
    problems: Problems,
) -> JobSpec:
    workload: Workload = _BATCH
    filled = _NOT_FILLED
    if keys.workload is not None:
        workload, filled = _workload(keys.workload, f"{at}workload", problems)
    timeout = duration(keys.timeout, f"{at}timeout", problems)
    estimate = duration(keys.estimate, f"{at}estimate", problems)
    grace = duration(keys.grace, f"{at}grace", problems)
    restart = None if keys.restart is None else try_parse(problems, f"{at}restart", _restart, keys.restart, None)
    retries = keys.retries
    if filled is not _NOT_FILLED:
        timeout = _merge(timeout, "timeout", filled, at, problems, format_duration)
        estimate = _merge(estimate, "estimate", filled, at, problems, format_duration)
        retries = _merge(retries, "retries", filled, at, problems, str)
        restart = _merge(restart, "restart", filled, at, problems, str)
    if sum(map(_text_size, tasks)) > MAX_JOB_TEXT:
        problems.append(
            (at.rstrip("."), f"the job's commands and variables are larger than {MAX_JOB_TEXT // 1024} KiB together")
        )
    gang_rules, distribution, checkpoint = gang.job_rules(keys, tasks, at, problems)
    return JobSpec(
        name=try_parse(problems, f"{metadata_at}name", job_name, name, name),
        tasks=tasks,
        project=try_parse(problems, f"{metadata_at}project", plain_name, metadata.project, "")
        if metadata.project is not None
        else "default",
        labels=_labels(metadata.labels, f"{metadata_at}labels", problems) if metadata.labels else {},
        annotations=_annotations(metadata.annotations, f"{metadata_at}annotations", problems)
        if metadata.annotations
        else {},
        priority=500 if keys.priority is None else try_parse(problems, f"{at}priority", priority, keys.priority, 0),
        profile="default"
        if keys.profile is None
        else try_parse(problems, f"{at}profile", parse_word, keys.profile, ""),
        backend=_ANY
        if keys.backend is None
        else try_parse(problems, f"{at}backend", placement.backend, keys.backend, _ANY),
        near=_NOWHERE if keys.near is None else try_parse(problems, f"{at}near", placement.near, keys.near, _NOWHERE),
        workload=workload,
        estimate_ms=estimate or 0,
        timeout_ms=timeout or 0,
        scheduling_timeout_ms=duration(keys.scheduling_timeout, f"{at}scheduling_timeout", problems) or 0,
        deadline_ms=0 if keys.deadline is None else _deadline(keys.deadline, now_ms, f"{at}deadline", problems),
        grace_ms=10_000 if grace is None else grace,
        retries=retries or 0,
        restart=restart or "on_failure",
        inputs=_inputs(keys.inputs, f"{at}inputs", problems) if keys.inputs else (),
        gang=gang_rules,
        distribution=distribution,
        checkpoint=checkpoint,
        max_queue_time_ms=duration(keys.max_queue_time, f"{at}max_queue_time", problems) or 0,
        health=health.NO_CHECK if keys.health is None else health.health(keys.health, f"{at}health", problems),
        retry_on=() if keys.retry_on is None else health.retry_on(keys.retry_on, f"{at}retry_on", problems),
        after=after.NO_DEPENDENCIES if keys.after is None else after.dependencies(keys.after, f"{at}after", problems),
        array=None if keys.array is None else array.array_of(keys.array, f"{at}array", problems),
        escalation=escalation.NO_ESCALATION
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
        _collect_resources(form.resources, requests, limits, at, problems)
    parsed = parse_task_resources(tuple(requests), tuple(limits)) if requests or limits else _DEFAULT_RESOURCES
    request, limit, wrong = parsed
    problems += [(at + path, text) for path, text in wrong]
    command = () if form.command is None else parse_command(form.command, f"{at}command", problems)
    if (not command and not form.image) or (command and not program(form.command)):
        problems.append((f"{at}command", "missing: give the program and its arguments"))
    if form.gpu_type and not request.get(GPU):
        problems.append((f"{at}gpu_type", "gpu_type without a gpu; add gpu: 1, or leave gpu_type out"))
    return TaskSpec(
        name,
        form.count or 1,
        command,
        _env(form.env, f"{at}env", problems) if form.env else {},
        try_parse(problems, f"{at}workdir", absolute_path, form.workdir, "") if form.workdir else "",
        try_parse(problems, f"{at}image", _image, form.image, "") if form.image else "",
        request,
        limit,
        try_parse(problems, f"{at}arch", parse_word, form.arch, "") if form.arch else "",
        try_parse(problems, f"{at}gpu_type", parse_word, form.gpu_type, "") if form.gpu_type else "",
        _labels(form.node_selector, f"{at}node_selector", problems) if form.node_selector else {},
        placement.affinity(form.affinity, f"{at}affinity", problems) if form.affinity else _NO_AFFINITY,
        tuple(
            try_parse(problems, f"{at}tolerations[{i}]", placement.toleration, given, placement.TOLERATE_ALL)
            for i, given in enumerate(form.tolerations)
        )
        if form.tolerations
        else (),
        *affinity.rules(form, labels, at, problems),
        *gang.task_rules(form, request, at, problems),
    )


def _deadline(value: str | int | float, now_ms: int, path: str, problems: Problems) -> int:
    if not isinstance(value, str) or value[4:5] != "-" or value[7:8] != "-":
        return now_ms + (duration(value, path, problems) or 0)
    try:
        moment = datetime.fromisoformat(value.strip())
    except ValueError:
        problems.append(
            (path, f"{safe_repr(value)} is not a time; write 2030-01-31T18:00:00Z, or a duration such as 4h")
        )
        return 0
    if moment.tzinfo is None:
        problems.append((path, f"{safe_repr(value)} has no time zone; add Z (UTC) or an offset like +02:00"))
        return 0
    at_ms = round(moment.timestamp() * 1000)
    if not 0 < at_ms <= MAX_TIME_MS:
        problems.append((path, f"{safe_repr(value)} is out of range"))
    return at_ms


def _restart(value: str) -> RestartPolicy | None:
    policy = _RESTART.get(value.lower().replace("_", "").replace("-", ""))
    if policy is None:
        raise InvalidInput(f"unknown restart policy {safe_repr(value)}: never, on_failure or always")
    return policy


def _inputs(names: list[str], at: str, problems: Problems) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(try_parse(problems, f"{at}[{i}]", parse_word, name, name) for i, name in enumerate(names))
    )


def _image(value: str) -> str:
    if not value.isascii() or not value.isprintable() or " " in value:
        raise InvalidInput(f"{safe_repr(value)} is not the name of an image", hint="for example python:3.12")
    return value


def _labels(labels: dict[str, str], at: str, problems: Problems) -> dict[str, str]:
    try:
        return _checked_labels(tuple(labels.items()))
    except InvalidInput:
        for key, value in labels.items():
            try_parse(problems, at, label_key, key, key)
            try_parse(problems, f"{at}.{key}" if key.isprintable() else at, label_value, value, value)
        return labels


@lru_cache(maxsize=2048)
def _checked_labels(items: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {label_key(key): label_value(value) for key, value in items}


def _annotations(notes: dict[str, str], at: str, problems: Problems) -> dict[str, str]:
    for key in notes:
        try_parse(problems, at, label_key, key, key)
    check_text(tuple(notes.values()), at, problems)
    return notes


def _env(env: dict[str, str | int], at: str, problems: Problems) -> dict[str, str]:
    for name in env:
        try_parse(problems, at, env_name, name, name)
    out = {name: value if isinstance(value, str) else str(value) for name, value in env.items()}
    check_text(tuple(out.values()), at, problems)
    return out


def _text_size(task: TaskSpec) -> int:
    return sum(map(len, task.command)) + (sum(map(len, task.env.values())) if task.env else 0)


def _collect_resources(
    resources: dict[str, Any], requests: list[Entry], limits: list[Entry], at: str, problems: Problems
) -> None:
    """Add `{requests, limits}`, or the requests themselves, to the lists."""
    for name, given in resources.items():
        if name in ("requests", "limits") and isinstance(given, dict):
            into = requests if name == "requests" else limits
            into += [(f"resources.{name}.{inner}", inner, amount) for inner, amount in given.items()]
        elif isinstance(given, dict):
            problems.append((f"{at}resources", f"{safe_repr(name)} is neither requests nor limits, and not an amount"))
        else:
            requests.append((f"resources.{name}", name, given))


# Key of the job -> (path, value), for the keys that a workload type fills.
Filled = dict[str, tuple[str, Any]]
_NOT_FILLED: Filled = {}


def _workload(given: str | schema.WorkloadForm, at: str, problems: Problems) -> tuple[Workload, Filled]:
    if isinstance(given, str):
        if given not in schema.WORKLOADS:
            known = ", ".join(schema.WORKLOADS)
            problems.append(
                (at, f"unknown workload {safe_repr(given)}: {known}{did_you_mean(given, schema.WORKLOADS)}")
            )
            return _BATCH, _NOT_FILLED
        given = schema.WORKLOADS[given]()
    filled: Filled = {}

    def fill(job_key: str, key: str, value: Any) -> None:
        if value is not None:
            filled[job_key] = (f"workload.{key}", value)

    match given:
        case schema.LongRunningForm():
            longest = duration(given.max_duration, f"{at}.max_duration", problems)
            fill("timeout", "max_duration", longest)
            if given.restart_policy is not None:
                policy = try_parse(problems, f"{at}.restart_policy", _restart, given.restart_policy, None)
                fill("restart", "restart_policy", policy)
            return LongRunning(longest or 0), filled
        case schema.BatchForm():
            usual = duration(given.estimated_duration, f"{at}.estimated_duration", problems)
            fill("estimate", "estimated_duration", usual)
            fill("retries", "max_retries", given.max_retries)
            return _BATCH, filled
        case schema.ServerlessForm():
            fill("timeout", "timeout", duration(given.timeout, f"{at}.timeout", problems))
            return Serverless(given.cold_start_acceptable is not False), filled
        case schema.DataProcessingForm():
            amounts = [
                0 if value is None else try_parse(problems, f"{at}.{key}", parse_quantity, value, 0)
                for key, value in (("input_size", given.input_size), ("output_size", given.output_size))
            ]
            return DataProcessing(*amounts), filled
        case schema.InteractiveForm():
            longest = duration(given.max_execution_time, f"{at}.max_execution_time", problems)
            fill("timeout", "max_execution_time", longest)
            return Interactive(duration(given.idle_timeout, f"{at}.idle_timeout", problems) or 0), filled


def _merge(
    value: T | None, key: str, filled: Filled, at: str, problems: Problems, show: Callable[[Any], str]
) -> T | None:
    """The value of the job's key, else that of the workload; two different values are a problem."""
    if key not in filled:
        return value
    path, other = filled[key]
    if value is not None and value != other:
        text = f"{key} is {show(value)} but {path} is {show(other)}; give one of them"
        problems.append((f"{at}{key}", text))
    return other if value is None else value
