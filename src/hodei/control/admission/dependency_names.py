"""From names to numbers: which jobs the documents of one submission wait for, before any of them is let in.

A name means a document of the same submission, in whatever order they stand, else the newest job of that name in the
project. An array is waited for as a whole, be it named or told by the number of its first job; indices in brackets choose
elements of it. Documents that wait for each other in a ring are refused, and the ring is named.
Whoever calls looks up first what is outside the submission (`asked`), then everything is decided here at one go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from hodei.model.array import ArrayElement, element_count, first_ids, parse_indices
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.ids import JobId
from hodei.model.job import JobSpec

MOST_EDGES = 1_000_000
_HINT = "hodei jobs -a shows what there is"
Name = tuple[str, str]  # project, name


class Asked(Struct):
    """What the documents name that is not among them."""

    names: set[Name] = set()
    jobs: set[JobId] = set()
    data: set[str] = set()


class Found(Struct, frozen=True):
    """The answer: for each name its jobs, for each job its name. `near`: what else there is by project, to suggest for a
    mistyped name. `arrays`: of jobs that are elements of an array, their place in it."""

    names: Mapping[Name, Sequence[JobId]] = {}
    jobs: Mapping[JobId, str] = {}
    near: Mapping[str, Sequence[str]] = {}
    arrays: Mapping[JobId, ArrayElement] = {}


def depends(specs: Iterable[JobSpec]) -> bool:
    return any(spec.after.of for spec in specs)


def asked(specs: Sequence[JobSpec]) -> Asked:
    own = {(spec.project, spec.name) for spec in specs}
    out = Asked(set(), set(), set())
    for spec in specs:
        for one in spec.after.of:
            if one.on == "exists":
                out.data.add(one.what)
            elif one.job:
                out.jobs.add(one.job)
            elif (spec.project, one.name) not in own:
                out.names.add((spec.project, one.name))
    return out


def resolved(specs: Sequence[JobSpec], first: JobId, found: Found) -> list[JobSpec]:
    """The documents with numbers for names, when the first job of the first one will have the number `first`.

    InvalidInput for what does not exist, what is ambiguous, and documents that wait for each other."""
    own: dict[Name, list[int]] = {}
    for place, spec in enumerate(specs):
        own.setdefault((spec.project, spec.name), []).append(place)
    refuse_rings(specs)
    begins, out, edges = first_ids(specs, first), list[JobSpec](), 0
    for place, spec in enumerate(specs):
        if not spec.after.of:
            out.append(spec)
            continue
        of: dict[tuple[str, JobId, str], Dependency] = {}
        for one in spec.after.of:
            if one.on == "exists":
                of[one.on, 0, one.what] = one
                continue
            name = one.name
            if one.job:
                if one.job not in found.jobs:
                    raise _unknown(specs, place, f"there is no job {one.job}", _HINT)
                name = found.jobs[one.job]
                ids, array = _jobs_numbered(one, found)
            else:
                ids, array = _jobs_called(specs, place, one.name, own, begins, found)
            if not one.elements or one.elements == "[]":
                if one.elements and array is None:
                    raise _unknown(specs, place, f"{one.job or name} is not an array", "leave out the brackets")
                for id in ids:
                    of.setdefault((one.on, id, ""), Dependency(one.on, id, name))
                continue
            for id, index in _elements(specs, place, one, array):
                of.setdefault((one.on, id, ""), Dependency(one.on, id, name, elements=f"[{index}]"))
        edges += len(of)
        if edges > MOST_EDGES:
            raise InvalidInput(f"more than {MOST_EDGES} dependencies at once", hint="submit the jobs in parts")
        need = spec.after.need
        if need > len(of):
            text = f"after: needs {need} of {len(of)}, as some were named twice"
            raise InvalidInput(f"{_which(specs, place)}: {text}", hint="name each once, or lower need")
        out.append(structs.replace(spec, after=Dependencies(tuple(of.values()), need, spec.after.timeout_ms)))
    return out


def _jobs_numbered(one: Dependency, found: Found) -> tuple[Sequence[JobId], ArrayElement | None]:
    """The number of an array's first job means the whole array, as everywhere; with brackets any element's number does."""
    array = found.arrays.get(one.job)
    if array is not None and (one.elements or one.job == array.first):
        return range(array.first, array.last + 1), array
    return (one.job,), array


def _elements(
    specs: Sequence[JobSpec], place: int, one: Dependency, array: ArrayElement | None
) -> list[tuple[JobId, int]]:
    """The jobs that brackets choose, each with its index."""
    if array is None:
        raise _unknown(specs, place, f"{one.job or one.name} is not an array", "leave out the brackets")
    try:
        return [(array.job_of(index), index) for index in parse_indices(one.elements[1:-1])]
    except InvalidInput as error:
        raise _unknown(specs, place, error.message, error.hint) from None


def _jobs_called(
    specs: Sequence[JobSpec],
    place: int,
    name: str,
    own: Mapping[Name, Sequence[int]],
    begins: Sequence[JobId],
    found: Found,
) -> tuple[Sequence[JobId], ArrayElement | None]:
    project = specs[place].project
    here = own.get((project, name), ())
    if len(here) > 1:
        text = f"after: {len(here)} documents are called {name!r}"
        raise InvalidInput(f"{_which(specs, place)}: {text}", hint="give each of them a name of its own")
    if here:
        begin, mould = begins[here[0]], specs[here[0]].array
        array = structs.replace(mould, first=begin) if mould is not None else None
        return range(begin, begin + element_count(specs[here[0]])), array
    if not found.names.get((project, name)):
        known = [*(spec.name for spec in specs), *found.near.get(project, ())]
        text = f"there is no job {name!r} in project {project}{did_you_mean(name, known)}"
        raise _unknown(specs, place, text, _HINT)
    ids = found.names[project, name]
    return ids, found.arrays.get(ids[0])


# ------------------------------------------------------------------------------------------------ rings


def refuse_rings(specs: Sequence[JobSpec]) -> None:
    """InvalidInput if some wait for each other by name. Every document once, along what it waits for; one that is met while it is still being followed closes a ring."""
    own: dict[Name, list[int]] = {}
    for at, spec in enumerate(specs):
        own.setdefault((spec.project, spec.name), []).append(at)
    follows = [
        [at for one in spec.after.of if one.name and not one.job for at in own.get((spec.project, one.name), ())]
        for spec in specs
    ]
    done, on_path = set[int](), dict[int, None]()
    for start in range(len(specs)):
        if start in done or not follows[start]:
            continue
        stack = [(start, iter(follows[start]))]
        on_path[start] = None
        while stack:
            place, rest = stack[-1]
            nearby = next(rest, None)
            if nearby is None:
                stack.pop()
                del on_path[place]
                done.add(place)
            elif nearby in on_path:
                path = list(on_path)
                raise _ring([specs[at].name for at in (*path[path.index(nearby) :], nearby)])
            elif nearby not in done:
                on_path[nearby] = None
                stack.append((nearby, iter(follows[nearby])))


def _ring(names: Sequence[str]) -> InvalidInput:
    shown = names if len(names) <= 20 else [*names[:10], f"({len(names) - 20} more)", *names[-10:]]
    return InvalidInput(
        f"these jobs wait for each other: {' -> '.join(shown)}", hint="take out one of these dependencies",
        code="DEPENDENCY_CYCLE",
    )  # fmt: skip


def _unknown(specs: Sequence[JobSpec], place: int, text: str, hint: str) -> InvalidInput:
    return InvalidInput(f"{_which(specs, place)}: after: {text}", hint=hint, code="UNKNOWN_DEPENDENCY")


def _which(specs: Sequence[JobSpec], place: int) -> str:
    name = specs[place].name
    return f"document {place + 1} ({name})" if len(specs) > 1 else name
