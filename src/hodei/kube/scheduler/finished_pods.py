"""Pods that succeeded, to learn from how long such pods run.

The watch of pods that run cannot tell: when one is over it brings the pod as it was before. So those that succeeded are
watched for themselves; whatever of them is still in the cluster when this process begins is its history.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import field

from hodei.kube.api.client import Api
from hodei.kube.api.numbers import bounded
from hodei.kube.api.objects import Meta, Pod, PodSpec, PodStatus, Slim
from hodei.kube.api.reflector import Reflector, Resource
from hodei.kube.scheduler.background_task import NoBackground
from hodei.kube.scheduler.pod_reader import PODS_PATH, Reader, at_ms
from hodei.kube.scheduler.refused_objects import Refusals, said
from hodei.model.estimate import Ran, name_of, shape_of
from hodei.model.job import JobSpec
from hodei.model.quantity import MAX_DURATION_MS

_log = logging.getLogger(__name__)
_SUCCEEDED = {"fieldSelector": "status.phase=Succeeded"}
_PATIENCE_S = 20.0
# Of what is there at the beginning so many of the newest tell enough.
_HISTORY = 10_000


class _Terminated(Slim, frozen=True):
    finished_at: str | None = None


class _State(Slim, frozen=True):
    terminated: _Terminated | None = None


class _Container(Slim, frozen=True):
    state: _State = _State()


class _Status(Slim, frozen=True):
    phase: str = ""
    start_time: str | None = None
    container_statuses: tuple[_Container, ...] = ()


class FinishedPod(Slim, frozen=True):
    metadata: Meta = Meta()
    spec: PodSpec = field(default_factory=PodSpec)
    status: _Status = _Status()

    @property
    def ended_ms(self) -> int:
        """When its last container ended; 0 if that is not told."""
        ends = [one.state.terminated.finished_at for one in self.status.container_statuses if one.state.terminated]
        return max((at_ms(stamp) for stamp in ends), default=0)

    @property
    def ran_ms(self) -> int:
        began = at_ms(self.status.start_time)
        return bounded(self.ended_ms - began, 1, MAX_DURATION_MS) if began and self.ended_ms else 0

    @property
    def pod(self) -> Pod:
        return Pod(self.metadata, self.spec, PodStatus(self.status.phase, start_time=self.status.start_time))


# What a pod was, how long it took, and when it was over.
Learn = Callable[[JobSpec, int, int], None]


class Finished(NoBackground):
    """`learn` is told of each pod of ours once, those of the past in the order in which they ended."""

    def __init__(self, api: Api, scheduler: str, reader: Reader, learn: Learn) -> None:
        self._scheduler, self._reader, self._learn = scheduler, reader, learn
        self._known: set[str] = set()
        self._reflector = Reflector(api, Resource("/api/v1/pods", FinishedPod), self, selector=_SUCCEEDED)
        self._watching: asyncio.Task[None] | None = None
        self.refusals = Refusals()

    async def begin(self) -> None:
        """The past first, if it comes soon: a start is not held up by it."""
        self._watching = asyncio.create_task(self._reflector.run())
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._reflector.synced.wait()
        except TimeoutError:
            _log.warning(
                "pods that succeeded before cannot be read yet: %s", self._reflector.problem or "it takes long"
            )

    async def run(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._reflector.run())
        await self._watching

    async def end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    # ------------------------------------------------------------------------------------- the reflector's sink

    def listed(self, objects: Iterable[FinishedPod], /) -> None:
        found = sorted(objects, key=lambda pod: (pod.ended_ms, pod.metadata.uid))
        for pod in found[-_HISTORY:]:
            self._take(pod)
        self._known &= {pod.metadata.uid for pod in found}

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], pod: FinishedPod, /) -> None:
        if kind == "DELETED":
            self._known.discard(pod.metadata.uid)
        else:
            self._take(pod)

    def _take(self, pod: FinishedPod) -> None:
        uid = pod.metadata.uid
        if uid in self._known or pod.spec.scheduler_name != self._scheduler or not pod.ran_ms:
            return
        self._known.add(uid)
        try:
            self._learn(self._reader.pod(pod.pod, ours=True).job, pod.ran_ms, pod.ended_ms)
        except Exception as error:
            self.refusals.put(PODS_PATH, pod.metadata, f"nothing is learnt from it: {said(error)}")


def as_ran(spec: JobSpec, ran_ms: int) -> Ran:
    said_ms = spec.estimate_ms or spec.timeout_ms
    return Ran(spec.project, spec.user, name_of(spec), shape_of(spec), ran_ms, said_ms)
