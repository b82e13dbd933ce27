"""What is known of our own runs: their pods as last seen, the ends that are not forgotten yet, the news. No I/O: the watch
of our pods tells it, and it outlives the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import structs

from hodei.backends.kubernetes.pod_api import Pods
from hodei.backends.kubernetes.states import START_FAILED, RunPod, observed, vanished
from hodei.model.effects import Start
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.job import RUN_ENDED, HealthState


class Runs:
    """`ended` is called with every end as it is seen, and has it told (`tell`) when it is time."""

    def __init__(self, now_ms: Callable[[], int], ended: Callable[[RunObserved], None]) -> None:
        self._now_ms, self._ended = now_ms, ended
        self.pods: dict[RunId, RunPod] = {}
        self.ends: dict[RunId, RunObserved] = {}
        self.something_new = asyncio.Event()
        self._news: list[RunObserved] = []
        self._told: dict[RunId, tuple[str, str, int, str]] = {}
        self._forgotten: set[RunId] = set()
        # What was found in containers, which their pods do not say.
        self._saved_ms: dict[RunId, int] = {}
        self._health: dict[RunId, HealthState] = {}

    def known(self) -> dict[RunId, RunObserved]:
        now_ms = self._now_ms()
        going = {run: self._seen(pod, now_ms) for run, pod in self.pods.items() if run not in self.ends}
        return going | self.ends

    def _seen(self, pod: RunPod, now_ms: int) -> RunObserved:
        seen, run = observed(pod, now_ms), pod.run
        if run not in self._saved_ms and run not in self._health:
            return seen
        health = self._health.get(run, seen.health) if seen.state == "running" else seen.health
        return structs.replace(seen, checkpoint_ms=self._saved_ms.get(run, 0), health=health)

    def saved(self, run: RunId, at_ms: int) -> None:
        """Its work was saved then."""
        if run in self.pods and at_ms > self._saved_ms.get(run, 0):
            self._saved_ms[run] = at_ms
            self.look(run)

    def not_saved(self, run: RunId, why: str) -> None:
        if run in self.pods and run not in self.ends:
            self.tell(structs.replace(self._seen(self.pods[run], self._now_ms()), checkpoint_error=why))

    def found(self, run: RunId, health: HealthState) -> None:
        """A look into its container found it so."""
        if run in self.pods:
            self._health[run] = health
            self.look(run)

    def look(self, run: RunId) -> None:
        """Tell how it stands, if that is news: time has passed, or something was found."""
        pod = self.pods.get(run)
        if pod is not None:
            self._heard(pod)

    def tell(self, news: RunObserved) -> None:
        self._news.append(news)
        self.something_new.set()

    def take_news(self) -> list[RunObserved]:
        news, self._news = self._news, []
        return news

    def end(self, seen: RunObserved) -> None:
        """The first end that is seen of a run is its end."""
        if seen.run not in self.ends and seen.run not in self._forgotten:
            self.ends[seen.run] = seen
            self._ended(seen)

    def forget(self, run: RunId) -> None:
        """Its pod is about to go, and says nothing more until it has gone."""
        self.ends.pop(run, None)
        self._drop(run)
        if self.pods.pop(run, None) is not None:
            self._forgotten.add(run)

    # ------------------------------------------------------------------------------- the watch of our pods

    def listed(self, pods: list[RunPod]) -> None:
        there = {pod.run for pod in pods}
        self._forgotten &= there
        for run in self.pods.keys() - there:
            self._gone(run)
        for pod in pods:
            self._heard(pod)

    def changed(self, kind: str, pod: RunPod) -> None:
        self._heard(pod)
        if kind == "DELETED":
            self._gone(pod.run)

    def _heard(self, pod: RunPod) -> None:
        run = pod.run
        if not run or run in self._forgotten:
            return
        self.pods[run] = pod
        if run in self.ends:
            return
        seen = self._seen(pod, self._now_ms())
        if seen.state in RUN_ENDED:
            self.end(seen)
        elif self._told.get(run) != (told := (seen.state, seen.reason, seen.checkpoint_ms, seen.health)):
            self._told[run] = told
            self.tell(seen)

    def _gone(self, run: RunId) -> None:
        self._forgotten.discard(run)
        self._drop(run)
        pod = self.pods.pop(run, None)
        if pod is not None:
            self.end(vanished(pod, self._now_ms()))

    def _drop(self, run: RunId) -> None:
        for table in (self._told, self._saved_ms, self._health):
            table.pop(run, None)


# ----------------------------------------------------------------------------------------- unconfirmed
# Runs of which nobody knows whether their pod was created: the request was sent, and no answer came.


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
