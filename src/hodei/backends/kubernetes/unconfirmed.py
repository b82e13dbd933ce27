"""Runs of which nobody knows whether their pod was created: the request was sent, and no answer came.

They are ordered again until the API answers. If it refuses then, that is no proof: an earlier request may have created the
pod (and filled the very quota that the refusal is about), or may still be on its way to do so. The run counts as refused
when there is no pod after all such requests are over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hodei.backends.kubernetes.pod_api import Pods
from hodei.backends.kubernetes.runs import Runs
from hodei.backends.kubernetes.states import START_FAILED
from hodei.model.effects import Start
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId

# An API server gives up on a request after a minute, if nobody has told it otherwise (--request-timeout).
DOUBT_S = 75.0
LOOK_EVERY_S = 1.0


class UnconfirmedPods:
    def __init__(self, runs: Runs, now_ms: Callable[[], int]) -> None:
        self._runs, self._now_ms = runs, now_ms
        self._born_ms = now_ms()
        self._unanswered: set[RunId] = set()
        self._finding: dict[RunId, Callable[[], Awaitable[None]] | None] = {}

    def of(self, order: Start) -> bool:
        """Whether an earlier request may have created its pod: one of ours, or of a server before us."""
        return order.run.id in self._unanswered or order.run.placed_ms < self._born_ms

    def sent(self, run: RunId) -> None:
        self._unanswered.add(run)

    def settled(self, run: RunId) -> None:
        self._unanswered.discard(run)

    def known(self) -> dict[RunId, RunObserved]:
        now_ms, reason = self._now_ms(), "whether its pod was created is not known yet"
        return {run: RunObserved(run, "placed", now_ms, reason=reason) for run in self._finding}

    def stop_when_found(self, run: RunId, stop: Callable[[], Awaitable[None]]) -> None:
        if run in self._finding:
            self._finding[run] = stop

    async def find_out(self, run: RunId, refusal: BackendError | BackendRefused, pods: Pods) -> None:
        """Its pod is there, and told of by the watch; or it never will be, which is told here."""
        if run in self._finding:
            return
        self._finding[run] = None
        clock = asyncio.get_running_loop().time
        try:
            since = clock()
            while clock() - since < DOUBT_S:
                try:
                    there = run in self._runs.pods or await pods.exists(run)
                except BackendError:
                    since, there = clock(), False  # it does not answer: what was sent may still come
                if there:
                    self.settled(run)
                    if (stop := self._finding[run]) is not None:
                        await stop()
                    return
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            del self._finding[run]
        self.settled(run)
        permanent = isinstance(refusal, BackendRefused)
        self._runs.end(
            RunObserved(run, "failed", self._now_ms(), None, START_FAILED, refusal.message, permanent=permanent)
        )
