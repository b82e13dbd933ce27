"""Interning of job specs: equal specs, and equal parts of specs, share one object.

A hundred thousand jobs that differ only in their id then hold a single spec. Shared values must never change in place;
specs and their parts are frozen. The caches are bounded, because equal jobs mostly arrive together.
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

    def intern(self, value: T) -> T:
        """Interns strings, numbers and tuples of these."""
        found = self._values.get(value)
        if found is None:
            if len(self._values) >= _VALUES:
                self._values.clear()
            found = self._values[value] = value
        return found

    def spec(self, spec: JobSpec) -> JobSpec:
        """An equal spec. Elements of one array share everything except `array`."""
        element = spec.array
        shared = spec if element is None else structs.replace(spec, array=None)
        content = _encode(shared)
        found = self._specs.get(content)
        if found is None:
            if len(self._specs) >= _SPECS:
                self._specs.clear()
            found = self._specs[content] = self._intern_parts(shared)
        return found if element is None else structs.replace(found, array=element)

    def _intern_parts(self, spec: JobSpec) -> JobSpec:
        intern, tasks = self.intern, tuple([self._task(task) for task in spec.tasks])
        return structs.replace(
            spec,
            name=intern(spec.name),
            tasks=tasks[0] if len(tasks) == 1 else tuple([task for (task,) in tasks]),
            project=intern(spec.project),
            user=intern(spec.user),
            profile=intern(spec.profile),
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
                    command=self.intern(task.command),
                    env=self._mapping(task.env),
                    request=self._mapping(task.request),
                    limits=self._mapping(task.limits),
                    node_selector=self._mapping(task.node_selector),
                    labels=self._mapping(task.labels),
                ),
            )
        return found

    def _mapping(self, mapping: dict[str, T]) -> dict[str, T]:
        # The tag `dict` keeps the key distinct from a tuple of the same pairs.
        key = (dict, *mapping.items())
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = mapping
        return found
