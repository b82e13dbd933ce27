"""The key `after` (dependencies): schema, parser and renderer."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

from hodei.jobfile.values import Duration, Form, Line, Problems, about, duration, try_parse
from hodei.model.array import parse_indices
from hodei.model.dependency import ONS, Dependencies, Dependency, On, parse_data_location
from hodei.model.names import job_name, safe_repr
from hodei.model.resources import format_duration

MAX_AFTER = 10_000
# A line, because indices may follow the name: sweep[1,3,7-9].
JobRef = Annotated[int, Meta(ge=1, le=2**53)] | Line
JobRefs = Annotated[list[JobRef], Meta(max_length=MAX_AFTER)] | JobRef


class AfterForm(Form, frozen=True):
    """Dependencies of a job: other jobs by number or name, and data."""

    succeeded: Annotated[JobRefs, about("These jobs have succeeded.", ["build", 17, "sweep[3]"])] | None = None
    completed: Annotated[JobRefs, about("These jobs have ended, in any state.", ["build"])] | None = None
    failed: Annotated[JobRefs, about("These jobs have failed.", ["train"])] | None = None
    checkpointed: Annotated[JobRefs, about("These jobs have taken a checkpoint, or succeeded.", ["train"])] | None = (
        None
    )
    exists: (
        Annotated[
            Annotated[list[Line], Meta(max_length=64)] | Line,
            about(
                "These files on the server's host or URLs exist; the configuration lists the allowed places.",
                ["/data/x.csv", "https://data.example/x.csv"],
            ),
        ]
        | None
    ) = None
    need: Annotated[int, Meta(ge=1, le=MAX_AFTER), about("How many of these are enough. Default: all.")] | None = None
    timeout: Annotated[Duration, about("Fail the job if it waits longer than this for them.", "2h")] | None = None


AfterKey = Annotated[
    Annotated[list[JobRef], Meta(max_length=MAX_AFTER)] | JobRef | AfterForm,
    about(
        "Dependencies: jobs that must succeed, by number or name (an array as a whole, `sweep[3]` is one element), or in detail.",
        ["build", 17],
        {"succeeded": ["build"], "exists": ["/data/x.csv"], "timeout": "2h"},
    ),
]


NO_DEPENDENCIES = Dependencies()
_MAX_ID = 2**53
_ELEMENTS = re.compile(r"([^\[\]]+)(\[[^\[\]]*\])")
_Refs = list[int | str] | int | str


def dependencies(given: AfterForm | _Refs, at: str, problems: Problems) -> Dependencies:
    """Each dependency once, in the order given. A name of digits only is a number; brackets select elements."""
    of: dict[Dependency, None] = {}
    if not isinstance(given, AfterForm):
        _jobs(given, "succeeded", at, of, problems)
        return Dependencies(tuple(of))
    for on in ONS:
        refs = getattr(given, on)
        if refs is None:
            continue
        if on != "exists":
            _jobs(refs, on, f"{at}.{on}", of, problems)
            continue
        for i, what in enumerate([refs] if isinstance(refs, str) else refs):
            try_parse(problems, f"{at}.exists[{i}]", parse_data_location, what, None)
            of[Dependency(on, what=what)] = None
    if not of:
        problems.append((at, "has no dependencies; name a job or a file, or remove it"))
    if len(of) > MAX_AFTER:
        problems.append((at, f"more than {MAX_AFTER} dependencies"))
    if given.need is not None and given.need > len(of):
        problems.append((f"{at}.need", f"{given.need} is more than the {len(of)} dependencies"))
    timeout = duration(given.timeout, f"{at}.timeout", problems)
    if timeout == 0:
        problems.append((f"{at}.timeout", "too short; give at least 1s, or remove it"))
    need = 0 if given.need == len(of) else given.need or 0
    return Dependencies(tuple(of), need, timeout or 0)


def _jobs(refs: _Refs, on: On, at: str, of: dict[Dependency, None], problems: Problems) -> None:
    single = not isinstance(refs, list)
    for i, ref in enumerate([refs] if isinstance(refs, int | str) else refs):
        path = at if single else f"{at}[{i}]"
        elements = ""
        if isinstance(ref, str) and (written := _ELEMENTS.fullmatch(ref)) is not None:
            ref, elements = written[1], written[2].replace(" ", "")
            if elements != "[]":
                try_parse(problems, path, parse_indices, elements[1:-1], None)
        if isinstance(ref, str) and ref.isdecimal() and ref.isascii():
            ref = int(ref)
            if not 0 < ref <= _MAX_ID:
                problems.append((path, f"{safe_repr(str(ref))} is not the number of a job"))
        if isinstance(ref, int):
            of[Dependency(on, job=ref, elements=elements)] = None
        else:
            of[Dependency(on, name=try_parse(problems, path, job_name, ref, ref), elements=elements)] = None


def document(after: Dependencies) -> dict[str, Any]:
    """The long form of the key; empty without dependencies."""
    out: dict[str, Any] = {}
    for one in after.of:
        job = one.job or one.name
        out.setdefault(one.on, []).append(one.what or (f"{job}{one.elements}" if one.elements else job))
    if after.need:
        out["need"] = after.need
    if after.timeout_ms:
        out["timeout"] = format_duration(after.timeout_ms)
    return out
