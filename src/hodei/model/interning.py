"""One object for all that is equal. A hundred thousand jobs that differ in their number alone have one spec between them.

What is shared must never change in place; specs and their parts never do. Only what came lately is remembered: jobs that are
alike mostly come together.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import structs

from hodei.model.job import JobSpec, TaskSpec

T = TypeVar("T")
_SPECS = 4096
_VALUES = 65_536
_encode = msgspec.msgpack.Encoder().encode


class SpecInterner:
    def __init__(self) -> None:
        self._specs: dict[bytes, JobSpec] = {}
        self._tasks: dict[bytes, tuple[TaskSpec]] = {}
        self._values: dict[Any, Any] = {}

    def one(self, value: T) -> T:
        """For texts, numbers and tuples of these."""
        found = self._values.get(value)
        if found is None:
            if len(self._values) >= _VALUES:
                self._values.clear()
            found = self._values[value] = value
        return found

    def spec(self, spec: JobSpec) -> JobSpec:
        """An equal one. Elements of one array share all but their place."""
        place = spec.array
        alone = spec if place is None else structs.replace(spec, array=None)
        content = _encode(alone)
        found = self._specs.get(content)
        if found is None:
            if len(self._specs) >= _SPECS:
                self._specs.clear()
            found = self._specs[content] = self._of_shared_parts(alone)
        return found if place is None else structs.replace(found, array=place)

    def _of_shared_parts(self, spec: JobSpec) -> JobSpec:
        one, tasks = self.one, tuple([self._task(task) for task in spec.tasks])
        return structs.replace(
            spec,
            name=one(spec.name),
            tasks=tasks[0] if len(tasks) == 1 else tuple([task for (task,) in tasks]),
            project=one(spec.project),
            user=one(spec.user),
            profile=one(spec.profile),
            labels=self._mapping(spec.labels),
            annotations=self._mapping(spec.annotations),
        )

    def _task(self, task: TaskSpec) -> tuple[TaskSpec]:
        content = _encode(task)
        found = self._tasks.get(content)
        if found is None:
            if len(self._tasks) >= _SPECS:
                self._tasks.clear()
            found = self._tasks[content] = (
                structs.replace(
                    task,
                    command=self.one(task.command),
                    env=self._mapping(task.env),
                    request=self._mapping(task.request),
                    limits=self._mapping(task.limits),
                    node_selector=self._mapping(task.node_selector),
                    labels=self._mapping(task.labels),
                ),
            )
        return found

    def _mapping(self, mapping: dict[str, T]) -> dict[str, T]:
        # Marked as a mapping, so that it is told from a tuple of the same pairs.
        key = (dict, *mapping.items())
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = mapping
        return found
