"""Those who wait in a line that promises starts and were not even tried are told why all the same.

Such a line does not try whoever is larger than all that is free, nor whoever may not pass those before it. Whether room is
what they lack changes while they wait, and with it the reason of their condition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator

from hodei.control.controller import Controller
from hodei.control.queue.backfill import BackfillQueue
from hodei.engine.plan import Refusal
from hodei.engine.view import Gang
from hodei.kube.scheduler.background_task import NoBackground
from hodei.kube.scheduler.explain import PodExplainer, Told
from hodei.kube.scheduler.pods import Pods
from hodei.model.ids import JobId

EVERY_S = 1.0
# So many kinds of pods are looked at in one round, and so many pods are told; the others in the next ones.
_KINDS, _TOLD = 50, 500


class QueueStatus(NoBackground):
    """`tell`: has the pods of a job told."""

    def __init__(
        self,
        controller: Controller,
        pods: Pods,
        explaining: PodExplainer,
        tell: Callable[[JobId, Told], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._controller, self._pods, self._explaining = controller, pods, explaining
        self._tell, self._now_ms = tell, now_ms
        self._lines = [line for line in controller.lines.values() if isinstance(line, BackfillQueue)]
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
            return self._explaining.refused(gang, result, now_ms)
        return self._explaining.not_its_turn()

    def _changed(self) -> bool:
        return self._state != self._now()

    def _now(self) -> tuple[int, ...]:
        world = self._controller.world
        waiting = sum(len(line.gangs) for line in self._lines)
        newest = max((max(line.gangs, default=0) for line in self._lines), default=0)
        return (
            world.table.generation,
            len(world.table.changes),
            world.book.version,
            waiting,
            newest,
            len(self._pods.fresh),
        )
