"""Reports why pods are pending: a condition and an Event for each new answer, also for pods parked behind equal ones.

In a full cluster, every pod that ends changes the numbers in the answers of all pending pods. So a new answer with the same
reason is reported after a pause that grows with the number of reports, and only the newest; another reason is reported at once.

A pod gets one report at a time. While one is being sent, only the newest of the following ones is kept. So reports never
arrive in the wrong order, and none arrives after the pod's binding.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator

from msgspec import Struct

from hodei.control.controller import Controller, Step
from hodei.control.queue.backfill import BackfillQueue
from hodei.engine.plan import Refusal
from hodei.engine.view import Gang
from hodei.kube.api.client import ApiError
from hodei.kube.scheduler.background import BackgroundTask
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.messages import (
    INVALID_GROUP,
    INVALID_POD,
    SCHEDULER_ERROR,
    UNSUPPORTED,
    PendingStatus,
    PodExplainer,
)
from hodei.kube.scheduler.pod_api import PodApi, Request, is_not_found
from hodei.kube.scheduler.pods import Pods
from hodei.model.ids import JobId, NodeName

_log = logging.getLogger(__name__)
PAUSE_MS, LONGEST_PAUSE_MS = 10_000, 300_000
_CHECK_DELAYED_MS = 1000
_MAX_ANSWERS = 10_000


class _Report(Struct):
    """The next report of a pod. `nominated`: None leaves the nominated node as it is."""

    entry: Entry
    status: PendingStatus | None
    nominated: NodeName | None


class StatusReporter:
    def __init__(self, controller: Controller, pods: Pods, pod_api: PodApi, explainer: PodExplainer) -> None:
        self._controller, self._pods, self._pod_api, self._explainer = controller, pods, pod_api, explainer
        # The last answer for all equal gangs.
        self._answers: dict[Hashable, PendingStatus] = {}
        self._nominated: dict[JobId, list[NodeName]] = {}
        # By uid: answers that wait for their pause, reports to send, pods being reported to, conditions being written.
        self._delayed: dict[str, PendingStatus] = {}
        self._next: dict[str, _Report] = {}
        self._sending: set[str] = set()
        self._patching: dict[str, asyncio.Event] = {}
        self._now_ms = self._checked_ms = 0

    def reports_for(self, step: Step, now_ms: int) -> Iterator[Request]:
        self._now_ms = now_ms
        for refusal in step.plan.refusals:
            gang = self._pending(refusal.job)
            if gang is not None:
                yield from self._report_refusal(gang, refusal, now_ms)
        yield from self._report_nominations(now_ms)
        if self._pods.unreported:
            yield from self._report_new(now_ms)

    def due_reports(self, now_ms: int) -> Iterator[Request]:
        """The delayed reports whose pause is over."""
        if not self._delayed or now_ms - self._checked_ms < _CHECK_DELAYED_MS:
            return
        self._now_ms = self._checked_ms = now_ms
        for uid, status in list(self._delayed.items()):
            entry = self._pods.entries.get(uid)
            if entry is None or entry.assigned:
                del self._delayed[uid]
            elif not self._is_too_soon(entry, status):
                del self._delayed[uid]
                yield from self._report(entry, status)

    def report(self, id: JobId, status: PendingStatus) -> Iterator[Request]:
        """Report an answer that was found elsewhere to all pods of a job."""
        for entry in self._pods.entries_of(id):
            self._pods.unreported.pop(entry.uid, None)
            yield from self._report(entry, status)

    def not_bound(self, entry: Entry, why: str) -> Request:
        entry.reported, entry.reported_reason = why, SCHEDULER_ERROR
        nominated = "" if entry.pod.status.nominated_node_name else None  # no node is reserved for it any more
        return self._enqueue(entry, PendingStatus(SCHEDULER_ERROR, why), nominated)

    async def wait_sent(self, uid: str) -> None:
        """Return when no condition of the pod is being written. Reports not sent by then are dropped once it has a node."""
        patching = self._patching.get(uid)
        if patching is not None:
            await patching.wait()

    def _is_too_soon(self, entry: Entry, status: PendingStatus) -> bool:
        if entry.reported is None or entry.reported_reason != status.reason:
            return False
        return self._now_ms - entry.reported_ms < min(PAUSE_MS * max(entry.tries, 1), LONGEST_PAUSE_MS)

    def _pending(self, id: JobId) -> Gang | None:
        for queue in self._controller.queues.values():
            if id in queue.gangs:
                return queue.gangs[id]
        return None

    def _report_refusal(self, gang: Gang, refusal: Refusal, now_ms: int) -> Iterator[Request]:
        """Report to the gang and, if the answer is new, to all equal gangs that are parked."""
        status = self._explainer.refused(gang, refusal, now_ms)
        if self._answers.get(gang.shape_key) == status:
            yield from self._report_all(gang.id, status)
            return
        if len(self._answers) > _MAX_ANSWERS:
            self._answers.clear()
        self._answers[gang.shape_key] = status
        queue = self._controller.queues[gang.job.profile]
        for other in list(queue.gangs.values()):
            if other is gang or (other.shape_key == gang.shape_key and queue.refusal_of(other) is not None):
                yield from self._report_all(other.id, status)

    def _report_new(self, now_ms: int) -> Iterator[Request]:
        """New pods: those that are not queued, and those parked behind equal ones without a try of their own."""
        for uid in list(self._pods.unreported):
            entry = self._pods.entries.get(uid)
            if entry is None or entry.assigned:
                del self._pods.unreported[uid]
            elif entry.stage == "inactive":
                del self._pods.unreported[uid]
                if entry.reasons:
                    status = self._explainer.not_tried(entry.reasons)
                    if status.reason in (INVALID_POD, INVALID_GROUP, UNSUPPORTED) and entry.reported != status.message:
                        _log.warning("pod %s is refused: %s", entry.name, status.message[:500])
                    yield from self._report(entry, status, at_once=True)
            else:
                gang = self._pending(entry.id)
                if gang is None:
                    del self._pods.unreported[uid]
                    continue
                refusal = self._controller.queues[gang.job.profile].refusal_of(gang)
                if refusal is not None:
                    del self._pods.unreported[uid]
                    status = self._answers.get(gang.shape_key) or self._explainer.refused(gang, refusal, now_ms)
                    yield from self._report(entry, status)

    def _report_nominations(self, now_ms: int) -> Iterator[Request]:
        """Preemptors get the node that is being freed as their nominated node."""
        holds = self._controller.preemption.holds
        for id, hold in holds.items():
            nodes = [place.node for place in hold.places]
            if self._nominated.get(id) != nodes:
                self._nominated[id] = nodes
                status = self._explainer.refused(hold.gang, Refusal(id, ()), now_ms, preempting=True)
                for number, entry in enumerate(self._pods.entries_of(id)):
                    yield from self._report(entry, status, nominated=nodes[min(number, len(nodes) - 1)])
        for id in [id for id in self._nominated if id not in holds]:
            del self._nominated[id]
            for entry in self._pods.entries_of(id):
                if not entry.assigned:
                    yield from self._report(entry, None, nominated="")

    def _report_all(self, id: JobId, status: PendingStatus) -> Iterator[Request]:
        for entry in self._pods.entries_of(id):
            yield from self._report(entry, status)

    def _report(
        self, entry: Entry, status: PendingStatus | None, nominated: NodeName | None = None, *, at_once: bool = False
    ) -> Iterator[Request]:
        if nominated is None and status is not None and entry.reported in (status.message, None):
            known = entry.pod.condition("PodScheduled")
            if entry.reported is not None or (
                known is not None and (known.reason, known.message) == (status.reason, status.message)
            ):  # reported already, by this process or an earlier leader
                entry.reported, entry.reported_reason = status.message, status.reason
                self._delayed.pop(entry.uid, None)
                return
        if status is not None:
            if nominated is None and not at_once and self._is_too_soon(entry, status):
                self._delayed[entry.uid] = status
                return
            self._delayed.pop(entry.uid, None)
            entry.reported, entry.reported_reason, entry.reported_ms = status.message, status.reason, self._now_ms
            entry.tries += 1
        yield self._enqueue(entry, status, nominated)

    def _enqueue(self, entry: Entry, status: PendingStatus | None, nominated: NodeName | None) -> Request:
        """Merge with a report that has not been sent yet."""
        uid, before = entry.uid, self._next.get(entry.uid)
        if before is not None and before.entry is entry:
            status = before.status if status is None else status
            nominated = before.nominated if nominated is None else nominated
        self._next[uid] = _Report(entry, status, nominated)
        return lambda: self._send(uid)

    async def _send(self, uid: str) -> None:
        if uid in self._sending:
            return  # the request under way continues with the newest report
        self._sending.add(uid)
        try:
            while (report := self._next.pop(uid, None)) is not None:
                await self._write(report)
        finally:
            self._sending.discard(uid)

    async def _write(self, report: _Report) -> None:
        entry, status = report.entry, report.status
        if self._pods.entries.get(entry.uid) is not entry or entry.assigned:
            return  # it has a node now, or has changed and gets a new report
        try:
            await self._write_condition(report)
            if status is not None:
                await self._pod_api.record_failed(entry.pod, status.message)
        except ApiError as error:
            if not is_not_found(error):
                entry.reported = None
                _log.warning("the status of pod %s could not be written: %s", entry.name, error.message)

    async def _write_condition(self, report: _Report) -> None:
        uid, status = report.entry.uid, report.status
        reason, message = (status.reason, status.message) if status is not None else ("", "")
        done = self._patching[uid] = asyncio.Event()
        try:
            await self._pod_api.set_unscheduled(report.entry.pod, reason, message, report.nominated)
        finally:
            del self._patching[uid]
            done.set()


CHECK_EVERY_S = 1.0
# Limits of one round; the rest follows in the next rounds.
_MAX_KINDS, _MAX_REPORTS = 50, 500


class QueueStatus(BackgroundTask):
    """Explains pods in a backfill queue that were not tried in a step. `report`: reports to the pods of a job."""

    def __init__(
        self,
        controller: Controller,
        pods: Pods,
        explainer: PodExplainer,
        report: Callable[[JobId, PendingStatus], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._controller, self._pods, self._explainer = controller, pods, explainer
        self._report, self._now_ms = report, now_ms
        self._queues = [queue for queue in controller.queues.values() if isinstance(queue, BackfillQueue)]
        self._explained_version: tuple[int, ...] = ()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self.check()

    def check(self) -> None:
        """One round over the pods without a report, or with an outdated one."""
        controller, now_ms = self._controller, self._now_ms()
        due = controller.next_wakeup_ms(now_ms)
        if self._pods.has_work or (due is not None and due <= now_ms) or self._explained_version == self._version():
            return  # decisions come first, and may change the answer
        kinds: dict[Hashable, PendingStatus] = {}
        reports, complete = 0, True
        for gang, reported_reason in self._pending():
            kind = (gang.shape_key, gang.job.project, gang.estimate_ms)
            if kind not in kinds and len(kinds) >= _MAX_KINDS:
                complete = False
                continue
            status = kinds.get(kind) or kinds.setdefault(kind, self._explain(gang, now_ms))
            if status.reason != reported_reason:
                self._report(gang.id, status)
                reports += 1
                if reports >= _MAX_REPORTS:
                    complete = False
                    break
        self._explained_version = self._version() if complete else ()

    def _pending(self) -> Iterator[tuple[Gang, str]]:
        """Pending gangs, each with the last reported reason ("" for none)."""
        for queue in self._queues:
            for gang in list(queue.gangs.values()):
                entries = self._pods.entries_of(gang.id)
                if entries:
                    known = entries[0].pod.condition("PodScheduled")
                    yield gang, known.reason if known is not None and entries[0].reported is not None else ""

    def _explain(self, gang: Gang, now_ms: int) -> PendingStatus:
        engine = self._controller.engine
        engine.table.settle()
        with engine.table.trial():
            result = engine.place(gang, self._controller.view(now_ms))
            if not isinstance(result, Refusal):
                engine.withdraw(gang, result)
        if isinstance(result, Refusal):
            return self._explainer.refused(gang, result, now_ms)
        return self._explainer.waits_for_turn()

    def _version(self) -> tuple[int, ...]:
        """Changes whenever an answer may change."""
        cluster = self._controller.cluster
        return (
            cluster.table.generation,
            len(cluster.table.changes),
            cluster.availability.version,
            sum(len(queue.gangs) for queue in self._queues),
            max((max(queue.gangs, default=0) for queue in self._queues), default=0),
            len(self._pods.unreported),
        )
