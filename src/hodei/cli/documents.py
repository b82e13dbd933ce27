"""Job documents from files, stdin or options.

Files are checked before anything is sent, so that mistakes are reported with their file and line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from hodei.cli.errors import UsageProblem
from hodei.cli.times import now_ms
from hodei.model.errors import InvalidInput

# Above the limits of a server: these are the user's own files, and they are sent in several requests.
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_VALUES = 2_000_000
Command = TypeVar("Command", bound=Callable[..., Any])


def read_documents(paths: Iterable[str]) -> list[dict[str, Any]]:
    """The checked documents of all files, in order. UsageProblem or InvalidInput names the wrong file."""
    from hodei.jobfile.parse import parse_job

    documents: list[dict[str, Any]] = []
    problems: list[tuple[str, str]] = []
    hint = ""
    for path in paths:
        name, text = _name(path), _read_job_file(path)
        found, lines = _documents_in(text, name), None
        if not found:
            raise UsageProblem(f"{name} contains no job", hint="an example: hodei job init")
        for number, document in enumerate(found, 1):
            try:
                parse_job(document, now_ms=now_ms())
            except InvalidInput as error:
                hint = hint or error.hint
                found_here = error.problems or (("", error.message),)
                lines = _key_lines(text) if lines is None else lines
                job_lines = lines[number - 1] if len(lines) == len(found) else {}
                problems += [(_location(name, number, len(found), path, job_lines), what) for path, what in found_here]
            else:
                documents.append(document)
    if problems:
        what = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        hint = hint or "the keys of a job file: hodei schema"
        raise InvalidInput(f"{what} found, nothing was sent", hint=hint, problems=tuple(problems))
    return documents


def _key_lines(text: str) -> list[dict[str, int]]:
    from hodei.jobfile.yaml_reader import key_lines

    if _json_lines(text):
        return [{"": number} for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return key_lines(text)


def _location(name: str, number: int, count: int, path: str, lines: dict[str, int]) -> str:
    """`job.yaml:3: memroy`: the line of the key, or of its closest parent."""
    at = path
    while at and at not in lines:
        at = at[: max(at.rfind("."), at.rfind("["), 0)]
    line = f":{lines[at]}" if at in lines and (at or count > 1) else ""
    job = f", job {number}" if count > 1 and not line else ""
    return f"{name}{line}{job}" + (f": {path}" if path else "")


def _json_lines(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines if len(lines) > 1 and all(line[0] == "{" and line.rstrip()[-1] == "}" for line in lines) else []


def _documents_in(text: str, name: str) -> list[Any]:
    """YAML or JSON documents, a list of jobs, `{"jobs": [...]}`, or one JSON object per line."""
    from hodei.jobfile.yaml_reader import load_yaml

    if lines := _json_lines(text):
        return [load_yaml(line, name=f"{name}:{number}")[0] for number, line in enumerate(lines, 1)]
    found: list[Any] = []
    for document in load_yaml(text, name=name, max_bytes=MAX_FILE_BYTES, max_values=MAX_VALUES):
        if isinstance(document, dict) and list(document) == ["jobs"] and isinstance(document["jobs"], list):
            document = document["jobs"]
        found += document if isinstance(document, list) else [document]
    return found


def checked(document: dict[str, Any]) -> dict[str, Any]:
    """The document, checked as by a server."""
    from hodei.jobfile.parse import parse_job

    parse_job(document, now_ms=now_ms())
    return document


def read_file(path: str, *, hint: str = "", limit: int = MAX_FILE_BYTES) -> bytes:
    """The content of a FILE argument; `-` is stdin. UsageProblem if it cannot be read or is too large."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(limit + 1)
        else:
            with open(path, "rb") as source:
                data = source.read(limit + 1)
    except FileNotFoundError:
        raise UsageProblem(f"there is no file {path}", hint=hint) from None
    except IsADirectoryError:
        raise UsageProblem(f"{path} is a directory", hint=f"name the files: {path.rstrip('/')}/*") from None
    except (OSError, ValueError) as error:
        raise UsageProblem(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", hint=hint) from None
    if len(data) > limit:
        raise UsageProblem(f"{_name(path)} is larger than {limit // 2**20} MiB", hint=hint)
    return data


def read_text(path: str, *, hint: str = "", limit: int = MAX_FILE_BYTES) -> str:
    try:
        text = read_file(path, hint=hint, limit=limit).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageProblem(f"{_name(path)} is not text", hint=hint) from None
    if "\0" in text:
        raise UsageProblem(f"{_name(path)} is binary, not text", hint=hint)
    return text


def read_toml(path: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(read_text(path, hint="it is a TOML file"))
    except tomllib.TOMLDecodeError as error:
        raise UsageProblem(f"{_name(path)}: {error}", hint="docs/reference/configuration.md") from None


def _name(path: str) -> str:
    return "stdin" if path == "-" else path


def _read_job_file(path: str) -> str:
    if "://" in path:
        hint = f"download and check it, then: curl -fsS {path} | hodei submit -"
        raise UsageProblem(f"{path[:200]!r} is a URL, but jobs are read from files only", hint=hint)
    from hodei.jobfile.yaml_reader import check_suffix

    hint = "an example to start from: hodei job init > job.yaml"
    try:
        check_suffix(path)
    except InvalidInput as error:
        raise UsageProblem(error.message, hint=hint) from None
    return read_text(path, hint=hint)


_OPTIONS = (
    click.option("--name", help="Name of the job [default: the command's]."),
    click.option("--cpu", metavar="N", help="Cores, for example 2 or 500m."),
    click.option("--memory", "--mem", metavar="SIZE", help="Memory, for example 512Mi or 8Gi."),
    click.option("--gpu", metavar="N", help="GPUs."),
    click.option("--gpu-type", metavar="TYPE", help="Which GPU, for example a100."),
    click.option("--arch", help="Processor, for example amd64 or arm64."),
    click.option("--resource", metavar="NAME=N", multiple=True, help="Any other resource; may be repeated."),
    click.option("--project", help="Project of the job."),
    click.option("--priority", help="critical, high, medium, low, batch, scavenger or a number."),
    click.option("--profile", help="Scheduling profile."),
    click.option("-e", "--env", metavar="K=V", multiple=True, help="Environment variable; K alone copies this shell's value."),
    click.option("--workdir", metavar="DIR", help="Working directory [default: this one, if the server is local]."),
    click.option("--label", metavar="K=V", multiple=True, help="Label of the job; may be repeated."),
    click.option("--node-selector", metavar="K=V", multiple=True, help="Only nodes with this label; may be repeated."),
    click.option("--tolerate", metavar="TAINT", multiple=True, help="Taint to tolerate: key, key=value:Effect."),
    click.option("--backend", metavar="NAME", help="Run it on this backend."),
    click.option("--timeout", metavar="TIME", help="Stop it after this long, for example 90s or 1h30m."),
    click.option("--after", metavar="JOB", multiple=True, help="Start after this job has succeeded, by id or name; may be repeated."),
    click.option("--retries", type=click.IntRange(0), help="Number of retries after a failure."),
    click.option("--array", metavar="N | A-B[:S]", help="An array of jobs with HODEI_ARRAY_INDEX; 100%10: ten at once."),
)  # fmt: skip


# Options that have the name and value of the key in the job file.
_SAME_KEYS = (
    "name", "cpu", "memory", "gpu", "project", "profile", "timeout", "retries", "arch", "priority", "gpu_type", "backend",
)  # fmt: skip


def job_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def document_of(command: tuple[str, ...], given: dict[str, Any], *, local: bool) -> dict[str, Any]:
    """The short form of a job file, from options. `local`: the server is on this machine."""
    document: dict[str, Any] = {"command": list(command)}
    document |= {key: given[key] for key in _SAME_KEYS if given.get(key) is not None}
    if str(document.get("priority", "")).lstrip("-").isdigit():
        document["priority"] = int(document["priority"])
    if given.get("after"):
        document["after"] = [int(job) if job.isdecimal() else job for job in given["after"]]
    if given.get("array"):
        document["array"] = _array(given["array"])
    if given.get("tolerate"):
        document["tolerations"] = list(given["tolerate"])
    for key, option in (("resources", "resource"), ("labels", "label"), ("node_selector", "node_selector")):
        if given.get(option):
            document[key] = dict(_pair(text, f"--{option.replace('_', '-')}") for text in given[option])
    if given.get("env"):
        document["env"] = dict(_environment(text) for text in given["env"])
    workdir = given.get("workdir") or (os.getcwd() if local else "")
    if workdir:
        document["workdir"] = str(Path(workdir).absolute()) if local else workdir
    return document


def _array(text: str) -> Any:
    """`100` or `0-98:2`; `%10` at the end limits it to ten at once, as in Slurm."""
    which, _, limit = text.partition("%")
    if limit and not limit.isdecimal():
        raise UsageProblem(f"--array {text[:80]!r}: {limit[:20]!r} is not a number", hint="write --array 100%10")
    _check_unique(which)
    key, value = ("count", int(which)) if which.isdecimal() else ("indices", which)
    return {key: value, "at_most": int(limit)} if limit else {key: value}


def _check_unique(indices: str) -> None:
    """An index that is listed twice is a mistake: there would be fewer jobs than expected. Job files accept it."""
    from hodei.model.array import parse_indices

    seen: set[int] = set()
    for part in indices.split(",") if "," in indices else ():
        try:
            found = parse_indices(part)
        except InvalidInput:
            return  # reported when the document is checked
        if repeated := sorted(seen.intersection(found)):
            what = f"--array {indices[:80]!r}: index {repeated[0]} is listed twice"
            raise UsageProblem(what, hint="list each index once")
        seen.update(found)


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageProblem(f"{option} {text[:80]!r} is not of the form KEY=VALUE")
    return key, value


def _environment(text: str) -> tuple[str, str]:
    if "=" in text:
        return _pair(text, "--env")
    if text not in os.environ:
        what = f"--env {text[:80]!r}: this shell has no such variable"
        raise UsageProblem(what, hint=f"write --env {text[:80]}=VALUE")
    return text, os.environ[text]
