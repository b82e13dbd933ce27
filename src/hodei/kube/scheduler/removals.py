"""Pods that were told to go, until they go.

Whoever is preempted is deleted, as kube-scheduler does it. All others (quota that was lent, a reservation, an estimate that is
over) are asked to go by the eviction API, so that PodDisruptionBudgets are kept. The controller tells each to go once and
waits until it has gone, so it is asked until that is granted or the pod has gone by itself, however long a budget, a missing
right or an API server that is away stands against it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from msgspec import Struct, structs

from hodei.kube.api.client import ApiError
from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.entries import Entry
from hodei.kube.scheduler.pod_api import PodApi, is_gone
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.request_queue import RequestQueue
from hodei.model.ids import RunId

_log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
# Rights come from people: there is no hurry, and each try is a line in the cluster's audit.
FORBIDDEN_S = 60.0
_TOLD_EVERY = 20
_ROLE = "To evict needs the role hodei-reclaim (deploy/kubernetes/rbac-reclaim.yaml)."
_Request = Callable[[Pod], Coroutine[Any, Any, None]]


class _Removal(Struct, eq=False):
    """`ask` sends the pod away, `tell` says why afterwards. `run`: whose place it has."""

    uid: str
    run: RunId
    why: str
    ask: _Request
    tell: _Request
    tries: int = 0
    begun: bool = False


class Removals:
    """Those who wait between two tries take no place in the lane: others are sent away meanwhile."""

    def __init__(self, actor: PodApi, pods: Pods, lane: RequestQueue) -> None:
        self._actor, self._pods, self._lane = actor, pods, lane
        self._asked: dict[str, _Removal] = {}
        # Those that need not go after all, by run; they may have to, later.
        self._spared: dict[RunId, _Removal] = {}

    def evict(self, entry: Entry, why: str) -> None:
        actor = self._actor
        self._put(_Removal(entry.uid, entry.run, why, actor.evict, partial(actor.say_evicted, why=why)))

    def preempt(self, victim: Entry, by: list[Entry]) -> None:
        actor, node = self._actor, victim.node

        async def tell(pod: Pod) -> None:
            if by:
                await actor.say_preempted(pod, by[0].pod, node)

        self._put(_Removal(victim.uid, victim.run, "preempted", actor.preempt, tell))

    def spare(self, run: RunId) -> bool:
        """It need not go; False if it was told to already, or may have been."""
        found = next((one for one in self._asked.values() if one.run == run and not one.begun), None)
        if found is None:
            return False
        del self._asked[found.uid]
        self._spared = {run: one for run, one in self._spared.items() if one.uid in self._pods.entries}
        self._spared[run] = found
        return True

    def again(self, run: RunId) -> bool:
        """One that was spared must go after all, as it was to go before; False if it is none of those."""
        found = self._spared.pop(run, None)
        if found is not None:
            self._put(structs.replace(found))
        return found is not None

    def _put(self, removal: _Removal) -> None:
        self._spared.pop(removal.run, None)
        if removal.uid not in self._asked:
            self._asked[removal.uid] = removal
            self._lane.put(lambda: self._ask(removal))

    async def _ask(self, removal: _Removal) -> None:
        if self._asked.get(removal.uid) is not removal:
            return  # it was spared meanwhile
        removal.begun = True
        entry = self._pods.entries.get(removal.uid)
        if entry is None or entry.pod.leaving:
            del self._asked[removal.uid]
            return
        try:
            await removal.ask(entry.pod)
        except ApiError as error:
            if is_gone(error):
                del self._asked[removal.uid]
            else:
                self._later(entry, removal, error)
            return
        except Exception as error:
            _log.exception("pod %s could not be sent away", entry.name)
            self._later(entry, removal, ApiError(0, "Failed", f"{type(error).__name__}: {error}"))
            return
        del self._asked[removal.uid]
        _log.info("pod %s was told to go: %s", entry.name, removal.why)
        try:
            await removal.tell(entry.pod)
        except ApiError as error:
            if not is_gone(error):
                _log.warning("not told: %s", error.message)

    def _later(self, entry: Entry, removal: _Removal, error: ApiError) -> None:
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(removal.tries, 20), LONGEST_PAUSE_S)
        if not error.passing:
            pause_s = FORBIDDEN_S
        if removal.tries % _TOLD_EVERY == 0:
            hint = _ROLE if error.status == 403 else error.hint
            _log.warning("pod %s is to go and cannot be sent away yet: %s %s", entry.name, error.message, hint)
        removal.tries += 1
        asyncio.get_running_loop().call_later(pause_s, lambda: self._lane.put(lambda: self._ask(removal)))
