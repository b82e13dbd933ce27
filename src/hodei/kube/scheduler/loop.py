"""The loop of the pod scheduler: what the watches brought becomes facts, the controller decides, and what it decided is done.

Decisions never wait for the cluster: a pod counts on its node from the moment of the decision on, and many bindings are under
way at once. Whatever comes of each is a fact for one of the next steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hodei.control.controller import Controller, Step
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import Pod, decode
from hodei.kube.scheduler.background_task import BackgroundTask
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.entries import Entry
from hodei.kube.scheduler.explain import Told
from hodei.kube.scheduler.metrics import Metrics
from hodei.kube.scheduler.pod_api import PodApi, is_gone, is_settled
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.profile import assumed_in
from hodei.kube.scheduler.provisioning import NotProvisioned, Provisioning
from hodei.kube.scheduler.refused_objects import Refused
from hodei.kube.scheduler.removals import Removals
from hodei.kube.scheduler.request_queue import RequestQueue, Work
from hodei.kube.scheduler.status_reporter import StatusReporter
from hodei.model.effects import Spare, Start, Stop
from hodei.model.facts import Fact, RunSpared
from hodei.model.ids import JobId, RunId, job_of

_log = logging.getLogger(__name__)
BINDINGS, REPORTS, DELETIONS = 64, 16, 32
# With more bindings than this on their way it is better to wait and to know more before the next decision.
_ENOUGH = 4 * BINDINGS
_TRIES = 8
_CALM_S = 5.0
# Stops that need no eviction: of a pod that goes by itself (only pods that are gone or going are cancelled here), and of
# those for whom room is made, who are deleted as the plan's evictions say.
_SEEN_TO = ("cancelled", "preempted", "shrunk")


class SchedulerLoop:
    def __init__(
        self,
        api: Api,
        controller: Controller,
        pods: Pods,
        around: ClusterCache,
        actor: PodApi,
        telling: StatusReporter,
        metrics: Metrics,
        now_ms: Callable[[], int],
    ) -> None:
        self._api, self.controller, self.pods, self.around = api, controller, pods, around
        self._actor, self._telling, self._metrics, self._now_ms = actor, telling, metrics, now_ms
        self._stirred = asyncio.Event()
        self._bindings, self._reports, self._deletions = (
            RequestQueue(BINDINGS),
            RequestQueue(REPORTS),
            RequestQueue(DELETIONS),
        )
        self._bindings.quiet = self._go_on
        self._held_back = False
        self._provisioning = Provisioning(around, actor, pods.node, assumed_in(controller))
        self._removals = Removals(actor, pods, self._deletions)
        self.went_round = time.monotonic()
        self._lines = list(controller.lines.values())
        self.attendants: Sequence[BackgroundTask] = ()

    def tell(self, job: JobId, told: Told) -> None:
        """Has the pods of a job told why they wait."""
        for work in self._telling.tell(job, told):
            self._reports.put(work)

    def tell_refused(self, refused: Refused) -> None:
        """An Event about an object that cannot be used; a pod of ours is told by its condition besides."""
        if refused.name:
            self._reports.put(lambda: self._quietly(self._actor.say_refused(refused)))

    def stir(self) -> None:
        """Something has happened."""
        self._stirred.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; then what is under way is brought to its end."""
        stopped = asyncio.create_task(stopping.wait())
        stopped.add_done_callback(lambda _: self._stirred.set())
        try:
            while not stopping.is_set():
                self.went_round = time.monotonic()
                if len(self._bindings) >= _ENOUGH:
                    self._held_back = True
                elif self._hurries():
                    self.step()
                    await asyncio.sleep(0)
                    continue
                await self._rest()
                for work in self._telling.late(self._now_ms()):
                    self._reports.put(work)
        finally:
            stopped.cancel()
        await self._bindings.finish(10)
        await self._deletions.finish(5)
        await self._reports.finish(5)
        for lane in (self._bindings, self._deletions, self._reports):
            lane.close()

    def _go_on(self) -> None:
        """Enough bindings are done that the next decisions are due."""
        if self._held_back:
            self._held_back = False
            self._stirred.set()

    def _hurries(self) -> bool:
        due = self.controller.next_wakeup_ms(self._now_ms())
        return self.pods.stirred or (due is not None and due <= self._now_ms())

    async def _rest(self) -> None:
        due = None if self._held_back else self.controller.next_wakeup_ms(self._now_ms())
        theirs = self.pods.patience.next_ms()
        due = theirs if due is None or (theirs is not None and theirs < due) else due
        pause = _CALM_S if due is None else min(max((due - self._now_ms()) / 1000, 0.001), _CALM_S)
        try:
            async with asyncio.timeout(pause):
                await self._stirred.wait()
        except TimeoutError:
            pass
        self._stirred.clear()

    # ------------------------------------------------------------------------------------------ deciding

    def step(self) -> Step:
        return self.decide(self.pods.take_facts())

    def decide(self, facts: Sequence[Fact]) -> Step:
        """One step of the controller, and all that comes of it is set going. Nobody else may have it take a step: what it
        decides then would never be done."""
        now_ms, began = self._now_ms(), time.perf_counter()
        step = self.controller.step(now_ms, facts)
        took_s = time.perf_counter() - began
        starts = [act for act in step.acts if isinstance(act, Start)]
        entries = self.pods.placed(starts, now_ms)
        if len(entries) < len(starts):
            there = {volume for entry in entries for volume in entry.wanted.job.tasks[0].volumes}
            self._provisioning.forget(volume for act in starts for volume in act.task.volumes if volume not in there)
        for entry in entries:
            self._bindings.put(self._binding(entry, entry.run, entry.node))
        for eviction in step.plan.evictions:
            by = self.pods.of_job(eviction.preemptor)
            for victim in self.pods.of_job(eviction.job):
                self._removals.preempt(victim, by)
        for act in step.acts:
            if isinstance(act, Spare):
                self._spare(act.run)
            elif isinstance(act, Stop) and not self._removals.again(act.run) and act.code not in _SEEN_TO:
                for entry in self.pods.of_job(job_of(act.run)):
                    self._removals.evict(entry, act.reason)
        for work in self._telling.after(step, now_ms):
            self._reports.put(work)
        self._metrics.stepped(step, entries, took_s, self.pods, self._lines)
        for attendant in self.attendants:
            attendant.stepped(step)
        return step

    # ------------------------------------------------------------------------------------------- binding

    def _binding(self, entry: Entry, run: RunId, node: str) -> Work:
        if not entry.pod.spec.volumes:
            return lambda: self._bind(entry.uid, run, node)

        async def bind() -> None:
            try:
                await self._bind(entry.uid, run, node)
            finally:
                again = entry.holds and entry.run != run  # it has been placed once more meanwhile
                if not again and not (entry.run == run and entry.stage == "bound"):
                    self._provisioning.give_up(entry.pod)

        return bind

    async def _bind(self, uid: str, run: RunId, node: str) -> None:
        entry = self.pods.entries.get(uid)
        if entry is None or entry.run != run or entry.stage not in ("placed", "aside"):
            return
        pod, began = entry.pod, time.perf_counter()
        try:
            if self._provisioning.needed(pod):
                await self._provisioning.ready(pod, node)
                if entry.run != run or entry.stage not in ("placed", "aside"):
                    return  # its gang has waited for as long as it may
            if self.pods.node(node) is None:
                raise NotProvisioned(f"node {node} has gone")
            if lacks := self.pods.crowded(entry):
                raise NotProvisioned(f"others have taken the {lacks} of node {node}")
            await self._telling.quiet(uid)  # a condition must not arrive after the binding
            await self._post_binding(pod, node)
        except NotProvisioned as late:
            self._not_bound(entry, run, str(late), gone=False)
        except ApiError as error:
            self._not_bound(entry, run, error.message, gone=is_gone(error) or is_settled(error))
        except Exception as error:  # it must not be left as if its binding were still on its way
            _log.exception("the binding of pod %s failed", entry.name)
            self._not_bound(entry, run, f"{type(error).__name__}: {error}", gone=False)
        else:
            self.pods.bound(uid, run)
            self._metrics.bound(entry, self._now_ms(), time.perf_counter() - began)
            if self._actor.reports == "all":
                self._reports.put(lambda: self._quietly(self._actor.say_scheduled(pod, node)))

    async def _post_binding(self, pod: Pod, node: str) -> None:
        """Where no answer came it is looked at what became of it, and asked again if nothing did."""
        for attempt in range(_TRIES):
            try:
                await self._actor.bind(pod, node)
                return
            except ApiError as error:
                if error.status == 409 and not is_gone(error) and await self._is_on(pod, node):
                    return  # an earlier try had been heard
                if not error.passing or attempt == _TRIES - 1:
                    raise
            await asyncio.sleep(min(0.05 * 2**attempt, 2.0))
            if await self._is_on(pod, node):
                return

    async def _is_on(self, pod: Pod, node: str) -> bool:
        meta = pod.metadata
        try:
            found = await self._api.request("GET", f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}")
        except ApiError as error:
            if is_gone(error):
                raise
            return False
        seen = decode(found, Pod)
        return seen.metadata.uid == meta.uid and seen.spec.node_name == node

    def _not_bound(self, entry: Entry, run: RunId, why: str, *, gone: bool) -> None:
        self.pods.not_bound(entry.uid, run, why, gone=gone)
        self._metrics.failed()
        if not gone:
            _log.warning("pod %s was not bound, it waits again: %s", entry.name, why)
            self._reports.put(self._telling.not_bound(entry, why))
        self._stirred.set()

    def _spare(self, run: RunId) -> None:
        """Its room is not needed any more: it stays if nothing was sent about it yet."""
        if self._removals.spare(run):
            self.pods.give([RunSpared(run=run)])
            self._stirred.set()

    async def _quietly(self, telling: Coroutine[Any, Any, None]) -> None:
        """What is only told may be lost; it must not hold anything up."""
        try:
            await telling
        except ApiError as error:
            if not is_gone(error):
                _log.warning("not told: %s", error.message)
