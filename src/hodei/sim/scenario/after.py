"""What the jobs of a scenario wait for: names become numbers, as a server would do it when they are submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from hodei.control.admission.dependency_names import Found, depends, refuse_rings, resolved
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.errors import InvalidInput
from hodei.sim.scenario.schema import ScenarioJob


def numbered(jobs: Sequence[ScenarioJob], wrong: Callable[[str, str], object]) -> list[ScenarioJob]:
    """A number that no job of the file has is that of a job before its time, which did what was wanted of it. Nobody can
    wait for a job that is submitted later than itself."""
    specs = [job.spec for job in jobs]
    if not depends(specs):
        return list(jobs)
    by_id = {job.id: job for job in jobs}
    by_name = {(job.spec.project, job.spec.name): [job.id] for job in jobs}
    known = [structs.replace(spec, after=_within(spec.after, by_id)) for spec in specs]
    found = Found(by_name, {job.id: job.name for job in jobs})
    try:
        refuse_rings(known)
    except InvalidInput as error:
        wrong("jobs", error.message)
        return list(jobs)
    out = []
    for place, (job, spec) in enumerate(zip(jobs, known, strict=True)):
        try:
            # Alone, so that a name leads to the number that the file gives and not to the next one.
            (spec,) = resolved([structs.replace(spec, name=f"{spec.name}.")], job.id, found)
        except InvalidInput as error:
            wrong(f"jobs[{place}].after", error.message.partition("after: ")[2] or error.message)
            continue
        late = [one.name for one in spec.after.of if one.job and by_id[one.job].at_ms > job.at_ms]
        if late:
            wrong(f"jobs[{place}].after", f"{late[0]} is submitted later than this job, which cannot know of it yet")
        out.append(structs.replace(job, spec=structs.replace(spec, name=job.spec.name)))
    return out


def _within(after: Dependencies, by_id: dict[int, ScenarioJob]) -> Dependencies:
    # In a scenario every element is a job of its own, so a number is that very job, whatever element it was.
    of: list[Dependency] = [
        structs.replace(one, elements="") if one.job else one for one in after.of if not one.job or one.job in by_id
    ]
    need = max(after.needed - (len(after.of) - len(of)), 0)
    return Dependencies(tuple(of) if need else (), 0 if need == len(of) else need, after.timeout_ms)
