"""The scheduling loop: facts from the watches go to the controller, its decisions become requests to the cluster.

Decisions never wait for the cluster: a pod counts on its node as soon as it is placed, and many bindings are under way at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from hodei.control.controller import Controller, Step
from hodei.engine.topology_index import AssumedVolumes
from hodei.kube.api.client import Api
from hodei.kube.scheduler.background import BackgroundTask
from hodei.kube.scheduler.binder import Binder, Removals, VolumeBinder, log_failure
from hodei.kube.scheduler.cache import ClusterCache, RefusedObject
from hodei.kube.scheduler.messages import PendingStatus
from hodei.kube.scheduler.metrics import Metrics
from hodei.kube.scheduler.pod_api import PodApi, RequestQueue
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.status_reporter import StatusReporter
from hodei.model.effects import Start, Stop, WithdrawStop
from hodei.model.facts import Fact, StopWithdrawn
from hodei.model.ids import JobId, job_of

BINDINGS, REPORTS, REMOVALS = 64, 16, 32
# With more bindings under way, waiting for their results gives better decisions.
_MAX_BINDINGS = 4 * BINDINGS
_IDLE_S = 5.0
# Stops that need no eviction: the pod of a cancelled job is being deleted already, and victims of preemption are deleted
# in stage 3.
_NOT_EVICTED = ("cancelled", "preempted")


class SchedulerLoop:
    def __init__(
        self,
        api: Api,
        controller: Controller,
        pods: Pods,
        cache: ClusterCache,
        pod_api: PodApi,
        reporter: StatusReporter,
        metrics: Metrics,
        now_ms: Callable[[], int],
        assumed: AssumedVolumes | None = None,
    ) -> None:
        self.controller, self.pods, self.cache = controller, pods, cache
        self._pod_api, self._reporter, self._metrics, self._now_ms = pod_api, reporter, metrics, now_ms
        self._bindings, self._reports = RequestQueue(BINDINGS, self._resume), RequestQueue(REPORTS)
        self._removal_requests = RequestQueue(REMOVALS)
        self._volumes = VolumeBinder(cache, pod_api, pods, assumed)
        self._binder = Binder(
            api, pods, pod_api, self._volumes, reporter, metrics, now_ms, self._bindings, self._reports.put, self.wake
        )
        self._removals = Removals(pod_api, pods, self._removal_requests)
        self._woken = asyncio.Event()
        self._paused = False
        self.last_round = time.monotonic()
        self._queues = list(controller.queues.values())
        self.background_tasks: Sequence[BackgroundTask] = ()

    def wake(self) -> None:
        self._woken.set()

    def report(self, job: JobId, status: PendingStatus) -> None:
        for request in self._reporter.report(job, status):
            self._reports.put(request)

    def report_refused_object(self, refused: RefusedObject) -> None:
        """Post an Event about an object that cannot be used."""
        if refused.name:
            self._reports.put(lambda: log_failure(self._pod_api.record_refused(refused)))

    async def run(self, stopping: asyncio.Event) -> None:
        """Schedule until `stopping` is set, then finish the requests that are under way."""
        stopped = asyncio.create_task(stopping.wait())
        stopped.add_done_callback(lambda _: self.wake())
        try:
            while not stopping.is_set():
                self.last_round = time.monotonic()
                if len(self._bindings) >= _MAX_BINDINGS:
                    self._paused = True
                elif self._has_work():
                    self.step()
                    await asyncio.sleep(0)
                    continue
                await self._wait()
                for request in self._reporter.due_reports(self._now_ms()):
                    self._reports.put(request)
        finally:
            stopped.cancel()
        for queue, within_s in ((self._bindings, 10), (self._removal_requests, 5), (self._reports, 5)):
            await queue.drain(within_s)
        for queue in (self._bindings, self._removal_requests, self._reports):
            queue.close()

    def _resume(self) -> None:
        """Enough bindings are done for the next decisions."""
        if self._paused:
            self._paused = False
            self.wake()

    def _has_work(self) -> bool:
        due = self.controller.next_wakeup_ms(self._now_ms())
        return self.pods.has_work or (due is not None and due <= self._now_ms())

    async def _wait(self) -> None:
        due = None if self._paused else self.controller.next_wakeup_ms(self._now_ms())
        gang_due = self.pods.timeouts.next_ms()
        due = gang_due if due is None or (gang_due is not None and gang_due < due) else due
        pause = _IDLE_S if due is None else min(max((due - self._now_ms()) / 1000, 0.001), _IDLE_S)
        try:
            async with asyncio.timeout(pause):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()

    def step(self, facts: Sequence[Fact] | None = None) -> Step:
        """One scheduling cycle; `facts` default to those of the watches. Nothing else may step the controller."""
        # 1. Decide.
        now_ms, began = self._now_ms(), time.perf_counter()
        step = self.controller.step(now_ms, self.pods.take_facts() if facts is None else facts)
        took_s = time.perf_counter() - began
        # 2. Bind the pods that were placed.
        starts = [act for act in step.acts if isinstance(act, Start)]
        placed = self.pods.place(starts, now_ms)
        if len(placed) < len(starts):  # a pod was deleted meanwhile: release the volumes assumed for it
            used = {volume for entry in placed for volume in entry.info.job.tasks[0].volumes}
            self._volumes.release(volume for act in starts for volume in act.task.volumes if volume not in used)
        for entry in placed:
            self._binder.bind(entry)
        # 3. Delete the victims of preemption.
        for eviction in step.plan.evictions:
            preemptors = self.pods.entries_of(eviction.preemptor)
            for victim in self.pods.entries_of(eviction.job):
                self._removals.preempt(victim, preemptors)
        # 4. Evict pods that have to stop for another reason; keep those that need not stop any more.
        for act in step.acts:
            if isinstance(act, WithdrawStop) and self._removals.cancel(act.run):
                self.pods.add_facts([StopWithdrawn(run=act.run)])
                self.wake()
            elif isinstance(act, Stop) and not self._removals.resume(act.run) and act.reason.code not in _NOT_EVICTED:
                for entry in self.pods.entries_of(job_of(act.run)):
                    self._removals.evict(entry, act.reason.text)
        # 5. Report why the others are pending.
        for request in self._reporter.reports_for(step, now_ms):
            self._reports.put(request)
        # 6. Metrics and background tasks.
        self._metrics.stepped(step, placed, took_s, self.pods, self._queues)
        for task in self.background_tasks:
            task.on_step(step)
        return step
