"""Resolution of dependency names to job numbers, before a submission is accepted.

A name means a document of the same submission, in any order, else the newest job of that name in the project. An array is
required as a whole, by name or by the number of its first job; indices in brackets choose elements. Cycles of documents
are refused and named. The caller first looks up what is outside the submission (`references`).
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


class References(Struct):
    """What the documents refer to outside the submission."""

    names: set[Name] = set()
    jobs: set[JobId] = set()
    data: set[str] = set()


class ResolvedReferences(Struct, frozen=True):
    """What was found: the jobs of each name, the name of each job. `near`: other names by project, to suggest for a
    mistyped one. `arrays`: the array of jobs that are elements of one."""

    names: Mapping[Name, Sequence[JobId]] = {}
    jobs: Mapping[JobId, str] = {}
    near: Mapping[str, Sequence[str]] = {}
    arrays: Mapping[JobId, ArrayElement] = {}


class UnresolvedDependency(InvalidInput):
    """`problem`: the message without the name of the document."""

    def __init__(self, document: str, problem: str, hint: str, code: str = "") -> None:
        super().__init__(f"{document}: after: {problem}", hint=hint, code=code)
        self.problem = problem


def has_dependencies(specs: Iterable[JobSpec]) -> bool:
    return any(spec.after.of for spec in specs)


def references(specs: Sequence[JobSpec]) -> References:
    own = {(spec.project, spec.name) for spec in specs}
    out = References(set(), set(), set())
    for spec in specs:
        for one in spec.after.of:
            if one.on == "exists":
                out.data.add(one.what)
            elif one.job:
                out.jobs.add(one.job)
            elif (spec.project, one.name) not in own:
                out.names.add((spec.project, one.name))
    return out


def resolve_names(specs: Sequence[JobSpec], first: JobId, found: ResolvedReferences) -> list[JobSpec]:
    """The documents with numbers instead of names; `first`: the number of the first job.

    InvalidInput for what does not exist, what is ambiguous, and for cycles."""
    own: dict[Name, list[int]] = {}
    for place, spec in enumerate(specs):
        own.setdefault((spec.project, spec.name), []).append(place)
    reject_cycles(specs)
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
                ids, array = _jobs_by_number(one, found)
            else:
                ids, array = _jobs_by_name(specs, place, one.name, own, begins, found)
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
            text = f"more than {MOST_EDGES} dependencies at once"
            raise UnresolvedDependency(_which(specs, place), text, "submit the jobs in parts")
        need = spec.after.need
        if need > len(of):
            text = f"needs {need} of {len(of)}, because some are named twice"
            raise UnresolvedDependency(_which(specs, place), text, "name each once, or lower need")
        out.append(structs.replace(spec, after=Dependencies(tuple(of.values()), need, spec.after.timeout_ms)))
    return out


def _jobs_by_number(one: Dependency, found: ResolvedReferences) -> tuple[Sequence[JobId], ArrayElement | None]:
    """The number of an array's first job means the whole array; with brackets the number of any element does."""
    array = found.arrays.get(one.job)
    if array is not None and (one.elements or one.job == array.first):
        return range(array.first, array.last + 1), array
    return (one.job,), array


def _elements(
    specs: Sequence[JobSpec], place: int, one: Dependency, array: ArrayElement | None
) -> list[tuple[JobId, int]]:
    """The elements that brackets choose, each with its index."""
    if array is None:
        raise _unknown(specs, place, f"{one.job or one.name} is not an array", "leave out the brackets")
    try:
        return [(array.job_of(index), index) for index in parse_indices(one.elements[1:-1])]
    except InvalidInput as error:
        raise _unknown(specs, place, error.message, error.hint) from None


def _jobs_by_name(
    specs: Sequence[JobSpec],
    place: int,
    name: str,
    own: Mapping[Name, Sequence[int]],
    begins: Sequence[JobId],
    found: ResolvedReferences,
) -> tuple[Sequence[JobId], ArrayElement | None]:
    project = specs[place].project
    here = own.get((project, name), ())
    if len(here) > 1:
        text = f"{len(here)} documents are called {name!r}"
        raise UnresolvedDependency(_which(specs, place), text, "give each of them a name of its own")
    if here:
        begin, template = begins[here[0]], specs[here[0]].array
        array = structs.replace(template, first=begin) if template is not None else None
        return range(begin, begin + element_count(specs[here[0]])), array
    if not found.names.get((project, name)):
        known = [*(spec.name for spec in specs), *found.near.get(project, ())]
        text = f"there is no job {name!r} in project {project}{did_you_mean(name, known)}"
        raise _unknown(specs, place, text, _HINT)
    ids = found.names[project, name]
    return ids, found.arrays.get(ids[0])


def reject_cycles(specs: Sequence[JobSpec]) -> None:
    """InvalidInput if documents wait for each other by name. A depth-first search; a document on the path closes a cycle."""
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
            following = next(rest, None)
            if following is None:
                stack.pop()
                del on_path[place]
                done.add(place)
            elif following in on_path:
                path = list(on_path)
                raise _cycle([specs[at].name for at in (*path[path.index(following) :], following)])
            elif following not in done:
                on_path[following] = None
                stack.append((following, iter(follows[following])))


def _cycle(names: Sequence[str]) -> InvalidInput:
    shown = names if len(names) <= 20 else [*names[:10], f"({len(names) - 20} more)", *names[-10:]]
    return InvalidInput(
        f"these jobs wait for each other: {' -> '.join(shown)}", hint="remove one of these dependencies",
        code="DEPENDENCY_CYCLE",
    )  # fmt: skip


def _unknown(specs: Sequence[JobSpec], place: int, text: str, hint: str) -> UnresolvedDependency:
    return UnresolvedDependency(_which(specs, place), text, hint, code="UNKNOWN_DEPENDENCY")


def _which(specs: Sequence[JobSpec], place: int) -> str:
    name = specs[place].name
    return f"document {place + 1} ({name})" if len(specs) > 1 else name
