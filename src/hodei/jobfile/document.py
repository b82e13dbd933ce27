"""The doors for job documents: decoded data or a request's bytes in, `JobSpec`s out. Both forms, one or many.

A bulk submit of JSON goes straight into the forms; only when that fails is the document walked again, slowly, to name
every mistake. Nothing here decides; the story goes on in `control`'s admission.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hodei.jobfile.check import MAX_PROBLEMS, Problems, convert, refuse
from hodei.jobfile.names import shown
from hodei.jobfile.parse import flat_spec, full_spec
from hodei.jobfile.schema import MAX_JOBS, FlatJob, FlatJobs, FullJob, FullJobs
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec

MAX_BODY_BYTES = 16 * 2**20
# Of a body that needs the slow path; far more than MAX_JOBS ordinary jobs hold, far less than memory does.
MAX_BODY_VALUES = 500_000

_FULL_KEYS = frozenset({"apiVersion", "api_version", "kind", "metadata", "spec"})
_ONE = (msgspec.json.Decoder(FlatJob), msgspec.json.Decoder(FullJob))
_BULK = (msgspec.json.Decoder(FlatJobs), msgspec.json.Decoder(FullJobs))
_LIST = (msgspec.json.Decoder(list[FlatJob]), msgspec.json.Decoder(list[FullJob]))
_YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
_JSON_TYPES = ("", "application/json", "text/json")


def parse_job(data: object, *, now_ms: int = 0) -> JobSpec:
    """The job that `data` (decoded JSON or YAML) describes. A deadline given as a duration counts from `now_ms`.

    InvalidInput names every problem that was found, each with its path.
    """
    problems: Problems = []
    spec = _parse_one(data, now_ms, "", problems)
    if problems or spec is None:
        raise refuse(problems)
    return spec


def parse_jobs(data: object, *, now_ms: int = 0) -> list[JobSpec]:
    """As `parse_job`, for one document, a list of them, or `{"jobs": [...]}`."""
    at, many = "", data
    if isinstance(data, dict) and "jobs" in data and not _FULL_KEYS & data.keys():
        at, many = "jobs", data["jobs"]
        if extra := [key for key in data if key != "jobs"]:
            raise refuse([(_place(extra[0]), "unknown key beside jobs; each job has its own keys")])
        if not isinstance(many, list):
            raise refuse([("jobs", "expected a list of jobs")])
    if not isinstance(many, list):
        return [parse_job(data, now_ms=now_ms)]
    if len(many) > MAX_JOBS:
        raise refuse([(at, f"{len(many)} jobs at once, at most {MAX_JOBS}; send them in parts")])
    problems: Problems = []
    specs = []
    for i, one in enumerate(many):
        spec = _parse_one(one, now_ms, f"{at}[{i}].", problems)
        if len(problems) >= MAX_PROBLEMS:
            break
        if spec is not None:
            specs.append(spec)
    if problems:
        raise refuse(problems, "the jobs")
    return specs


def decode_jobs(raw: bytes, content_type: str = "application/json", *, now_ms: int = 0) -> list[JobSpec]:
    """The jobs of a request's body, JSON or YAML by its content type; InvalidInput as in `parse_job`."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in _YAML_TYPES:
        documents = load_yaml(raw)
        return parse_jobs(documents[0] if len(documents) == 1 else documents, now_ms=now_ms)
    if kind not in _JSON_TYPES:
        raise InvalidInput(f"cannot read {shown(kind)}", hint="send application/json or application/yaml")
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
        return _explain(data, form, now_ms, at, problems)
    return _spec_of(read, now_ms, at, problems)


def _explain(data: object, form: type, now_ms: int, at: str, problems: Problems) -> JobSpec | None:
    """The slow path. What is left after the mistakes of type is read for its meaning too, to name all mistakes at once."""
    wrong: Problems = []
    read = convert(data, form, at, wrong)
    more: Problems = []
    spec = None if read is None else _spec_of(read, now_ms, at, more)
    known = {path for path, _ in wrong}
    problems += wrong
    problems += [problem for problem in more if problem[0] not in known]
    return spec


def _spec_of(form: FlatJob | FullJob, now_ms: int, at: str, problems: Problems) -> JobSpec:
    if isinstance(form, FlatJob):
        return flat_spec(form, now_ms, at, problems)
    return full_spec(form, now_ms, at, problems)


def _is_bulk(raw: bytes) -> bool:
    """Does the body begin as `{"jobs":`? A guess that need not be right: wrong, it costs the slow path."""
    return raw[:64].lstrip()[1:].lstrip().startswith(b'"jobs"')


def _decode_fast(raw: bytes) -> list[FlatJob | FullJob] | None:
    """The forms, if the body is in canonical spelling and without mistakes of type."""
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


def _place(key: object) -> str:
    return key if isinstance(key, str) and key.isprintable() and len(key) <= 64 else shown(key)
