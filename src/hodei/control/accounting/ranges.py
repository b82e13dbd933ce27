"""Limit ranges: the least and the most that one member of a job may ask for, and what it gets that does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.resources import DEFAULT_REQUEST, Resources, human_amount

EVERY_PROJECT = "*"


class Range(Struct, frozen=True):
    least: Resources = {}
    most: Resources = {}
    default: Resources = {}


class Ranges:
    def __init__(self, ranges: Mapping[str, Range]) -> None:
        self._ranges = dict(ranges)

    def applied(self, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
        """The jobs with what they did not say filled in. InvalidInput names the first that is out of range: which limit,
        what was asked for."""
        return [self._job(spec) for spec in specs] if self._ranges else specs

    def _job(self, spec: JobSpec) -> JobSpec:
        mine = self._ranges.get(spec.project) or self._ranges.get(EVERY_PROJECT)
        if mine is None:
            return spec
        tasks = tuple(self._task(spec, task, mine) for task in spec.tasks)
        return spec if tasks == spec.tasks else structs.replace(spec, tasks=tasks)

    def _task(self, spec: JobSpec, task: TaskSpec, mine: Range) -> TaskSpec:
        request = dict(task.request)
        for resource, amount in mine.default.items():
            # Who asks for just what everyone gets is taken not to have said.
            if task.request.get(resource, 0) == DEFAULT_REQUEST.get(resource, 0):
                request[resource] = amount
        for resource, amount in {**request, **dict.fromkeys(mine.least.keys() - request.keys(), 0)}.items():
            least, most = mine.least.get(resource, 0), mine.most.get(resource)
            if amount < least or (most is not None and amount > most):
                which, bound = ("at least", least) if amount < least else ("at most", most or 0)
                raise InvalidInput(
                    f"{spec.name}: {_said(resource, amount)} for each member of task {task.name!r}; jobs of project"
                    f" {spec.project} must ask for {which} {_said(resource, bound)}",
                    hint="the range is set by scheduling.ranges; ask the operator for another",
                    code="OUT_OF_RANGE",
                )
        limits = {name: max(amount, request.get(name, 0)) for name, amount in task.limits.items()}
        if request == task.request and limits == task.limits:
            return task
        return structs.replace(task, request=request, limits=limits)


def _said(resource: str, amount: int) -> str:
    return f"{human_amount(resource, amount)} {resource}"
