"""Pods that wait are told why: a condition and an Event, once for each new answer, also those behind which others sleep.

In a full cluster every pod that ends changes the numbers in the answer to all that wait. So a new answer with the same reason
is told after a pause that grows with the answers given, and then the newest only; another reason is told at once.

A pod is told one thing at a time: while a report is on its way the next one waits, and only the newest of those that wait is
sent. So two of them never arrive in the wrong order, and none arrives after the pod's binding.
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
from hodei.kube.scheduler.background import NoBackground
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.messages import INVALID_GROUP, INVALID_POD, SCHEDULER_ERROR, UNSUPPORTED, PodExplainer, Told
from hodei.kube.scheduler.pod_api import PodApi, Work, is_gone
from hodei.kube.scheduler.pods import Pods
from hodei.model.ids import JobId, NodeName

_log = logging.getLogger(__name__)
PAUSE_MS, LONGEST_PAUSE_MS = 10_000, 300_000
_LATE_EVERY_MS = 1000


class _Report(Struct):
    """What a pod is to be told next. `nominated`: None to leave that as it is."""

    entry: Entry
    told: Told | None
    nominated: NodeName | None


class StatusReporter:
    def __init__(self, controller: Controller, pods: Pods, actor: PodApi, explainer: PodExplainer) -> None:
        self._controller, self._pods, self._actor, self._explainer = controller, pods, actor, explainer
        # What was last said to all gangs that are alike.
        self._said: dict[Hashable, Told] = {}
        self._nominated: dict[JobId, list[NodeName]] = {}
        # Newer answers that pods have not been told yet, by uid.
        self._late: dict[str, Told] = {}
        # What pods are to be told next, by uid; who is being told something; and whose condition is on its way.
        self._next: dict[str, _Report] = {}
        self._sending: set[str] = set()
        self._patching: dict[str, asyncio.Event] = {}
        self._now_ms = self._looked_ms = 0

    def after(self, step: Step, now_ms: int) -> Iterator[Work]:
        """The reports that a step gives cause for."""
        self._now_ms = now_ms
        for refusal in step.plan.refusals:
            gang = self._waiting(refusal.job)
            if gang is not None:
                yield from self._refused(gang, refusal, now_ms)
        yield from self._holding(now_ms)
        if self._pods.fresh:
            yield from self._fresh(now_ms)

    def late(self, now_ms: int) -> Iterator[Work]:
        """The reports whose pause is over."""
        if not self._late or now_ms - self._looked_ms < _LATE_EVERY_MS:
            return
        self._now_ms = self._looked_ms = now_ms
        for uid, told in list(self._late.items()):
            entry = self._pods.entries.get(uid)
            if entry is None or entry.holds:
                del self._late[uid]
            elif not self._too_soon(entry, told):
                del self._late[uid]
                yield from self._tell(entry, told)

    def _too_soon(self, entry: Entry, told: Told) -> bool:
        if entry.told is None or entry.told_reason != told.reason:
            return False
        return self._now_ms - entry.told_ms < min(PAUSE_MS * max(entry.tries, 1), LONGEST_PAUSE_MS)

    def _waiting(self, id: JobId) -> Gang | None:
        for line in self._controller.queues.values():
            if id in line.gangs:
                return line.gangs[id]
        return None

    def _refused(self, gang: Gang, refusal: Refusal, now_ms: int) -> Iterator[Work]:
        told = self._explainer.refused(gang, refusal, now_ms)
        if self._said.get(gang.alike) == told:
            yield from self._tell_all(gang.id, told)
            return
        if len(self._said) > 10_000:
            self._said.clear()
        self._said[gang.alike] = told
        line = self._controller.queues[gang.job.profile]
        for other in list(line.gangs.values()):
            if other is gang or (other.alike == gang.alike and line.refusal_of(other) is not None):
                yield from self._tell_all(other.id, told)

    def _fresh(self, now_ms: int) -> Iterator[Work]:
        """Pods that came to sleep behind others without a try of their own."""
        for uid in list(self._pods.fresh):
            entry = self._pods.entries.get(uid)
            if entry is None or entry.holds:
                del self._pods.fresh[uid]
            elif entry.stage == "aside":
                del self._pods.fresh[uid]
                if entry.reasons:
                    told = self._explainer.aside(entry.reasons)
                    if told.reason in (INVALID_POD, INVALID_GROUP, UNSUPPORTED) and entry.told != told.message:
                        _log.warning("pod %s is refused: %s", entry.name, told.message[:500])
                    yield from self._tell(entry, told, at_once=True)
            else:
                gang = self._waiting(entry.id)
                if gang is None:
                    del self._pods.fresh[uid]
                    continue
                refusal = self._controller.queues[gang.job.profile].refusal_of(gang)
                if refusal is not None:
                    del self._pods.fresh[uid]
                    told = self._said.get(gang.alike) or self._explainer.refused(gang, refusal, now_ms)
                    yield from self._tell(entry, told)

    def _holding(self, now_ms: int) -> Iterator[Work]:
        """Those for whom others go are named on the node that they will have."""
        holds = self._controller.preemption.holds
        for id, hold in holds.items():
            places = [place.node for place in hold.places]
            if self._nominated.get(id) != places:
                self._nominated[id] = places
                gang = hold.gang
                told = self._explainer.refused(gang, Refusal(id, ()), now_ms, making_room=True)
                for number, entry in enumerate(self._pods.of_job(id)):
                    yield from self._tell(entry, told, nominated=places[min(number, len(places) - 1)])
        for id in [id for id in self._nominated if id not in holds]:
            del self._nominated[id]
            for entry in self._pods.of_job(id):
                if not entry.holds:
                    yield from self._tell(entry, None, nominated="")

    def tell(self, id: JobId, told: Told) -> Iterator[Work]:
        """For others who know why a job waits."""
        for entry in self._pods.of_job(id):
            self._pods.fresh.pop(entry.uid, None)
            yield from self._tell(entry, told)

    def _tell_all(self, id: JobId, told: Told) -> Iterator[Work]:
        for entry in self._pods.of_job(id):
            yield from self._tell(entry, told)

    def _tell(
        self, entry: Entry, told: Told | None, nominated: NodeName | None = None, *, at_once: bool = False
    ) -> Iterator[Work]:
        if nominated is None and told is not None and entry.told in (told.message, None):
            known = entry.pod.condition("PodScheduled")
            if entry.told is not None or (
                known is not None and (known.reason, known.message) == (told.reason, told.message)
            ):  # it knows, from us or from one before us
                entry.told, entry.told_reason = told.message, told.reason
                self._late.pop(entry.uid, None)
                return
        if told is not None:
            if nominated is None and not at_once and self._too_soon(entry, told):
                self._late[entry.uid] = told
                return
            self._late.pop(entry.uid, None)
            entry.told, entry.told_reason, entry.told_ms = told.message, told.reason, self._now_ms
            entry.tries += 1
        yield self._queued(entry, told, nominated)

    def _queued(self, entry: Entry, told: Told | None, nominated: NodeName | None) -> Work:
        """Sent when its turn comes, in the place of what the pod was not told yet."""
        uid, before = entry.uid, self._next.get(entry.uid)
        if before is not None and before.entry is entry:
            told = before.told if told is None else told
            nominated = before.nominated if nominated is None else nominated
        self._next[uid] = _Report(entry, told, nominated)
        return lambda: self._send(uid)

    async def _send(self, uid: str) -> None:
        if uid in self._sending:
            return  # whoever is at it goes on with the newest
        self._sending.add(uid)
        try:
            while (report := self._next.pop(uid, None)) is not None:
                await self._report(report)
        finally:
            self._sending.discard(uid)

    async def quiet(self, uid: str) -> None:
        """Returns when no condition is on its way to the pod; what is not sent yet will not be, once the pod has a node."""
        patching = self._patching.get(uid)
        if patching is not None:
            await patching.wait()

    async def _patch(self, report: _Report) -> None:
        uid, told = report.entry.uid, report.told
        reason, message = (told.reason, told.message) if told is not None else ("", "")
        done = self._patching[uid] = asyncio.Event()
        try:
            await self._actor.set_unscheduled(report.entry.pod, reason, message, report.nominated)
        finally:
            del self._patching[uid]
            done.set()

    async def _report(self, report: _Report) -> None:
        entry, told = report.entry, report.told
        if self._pods.entries.get(entry.uid) is not entry or entry.holds:
            return  # it has got a node meanwhile, or has changed and is looked at anew
        try:
            await self._patch(report)
            if told is not None:
                await self._actor.say_failed(entry.pod, told.message)
        except ApiError as error:
            if not is_gone(error):
                entry.told = None
                _log.warning("pod %s could not be told why it waits: %s", entry.name, error.message)

    def not_bound(self, entry: Entry, why: str) -> Work:
        """The cluster would not have the binding."""
        entry.told, entry.told_reason = why, SCHEDULER_ERROR
        # No room is held for it any more.
        nominated = "" if entry.pod.status.nominated_node_name else None
        return self._queued(entry, Told(SCHEDULER_ERROR, why), nominated)


# ---------------------------------------------------------------------------------------- queue status
# Those who wait in a line that promises starts and were not even tried are told why all the same.


EVERY_S = 1.0
# So many kinds of pods are looked at in one round, and so many pods are told; the others in the next ones.
_KINDS, _TOLD = 50, 500


class QueueStatus(NoBackground):
    """`tell`: has the pods of a job told."""

    def __init__(
        self,
        controller: Controller,
        pods: Pods,
        explainer: PodExplainer,
        tell: Callable[[JobId, Told], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._controller, self._pods, self._explainer = controller, pods, explainer
        self._tell, self._now_ms = tell, now_ms
        self._lines = [line for line in controller.queues.values() if isinstance(line, BackfillQueue)]
        self._state: tuple[int, ...] = ()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.look()

    def look(self) -> None:
        """One round: whoever has not been told, or was told what is true no more."""
        controller, now_ms = self._controller, self._now_ms()
        due = controller.next_wakeup_ms(now_ms)
        if self._pods.stirred or (due is not None and due <= now_ms) or not self._changed():
            return  # decisions come first, and may change the answer
        kinds: dict[Hashable, Told] = {}
        count, whole = 0, True
        for gang, reason in self._stale():
            kind = (gang.alike, gang.job.project, gang.estimate_ms)
            if kind not in kinds and len(kinds) >= _KINDS:
                whole = False
                continue
            told = kinds.get(kind) or kinds.setdefault(kind, self._answer(gang, now_ms))
            if told.reason != reason:
                self._tell(gang.id, told)
                count += 1
                if count >= _TOLD:
                    whole = False
                    break
        self._state = self._now() if whole else ()

    def _stale(self) -> Iterator[tuple[Gang, str]]:
        """With what each was told last ("" for nothing yet)."""
        for line in self._lines:
            for gang in list(line.gangs.values()):
                entries = self._pods.of_job(gang.id)
                if entries:
                    known = entries[0].pod.condition("PodScheduled")
                    yield gang, known.reason if known is not None and entries[0].told is not None else ""

    def _answer(self, gang: Gang, now_ms: int) -> Told:
        engine = self._controller.engine
        engine.table.settle()
        with engine.table.trial():
            result = engine.place(gang, self._controller.view(now_ms))
            if not isinstance(result, Refusal):
                engine.withdraw(gang, result)
        if isinstance(result, Refusal):
            return self._explainer.refused(gang, result, now_ms)
        return self._explainer.not_its_turn()

    def _changed(self) -> bool:
        return self._state != self._now()

    def _now(self) -> tuple[int, ...]:
        cluster = self._controller.cluster
        waiting = sum(len(line.gangs) for line in self._lines)
        newest = max((max(line.gangs, default=0) for line in self._lines), default=0)
        return (
            cluster.table.generation,
            len(cluster.table.changes),
            cluster.availability.version,
            waiting,
            newest,
            len(self._pods.fresh),
        )


# ----------------------------------------------------------------------------------------------------
