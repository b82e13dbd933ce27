"""The loop of the pod scheduler: what the watches brought becomes facts, the controller decides, and what it decided is done.

Decisions never wait for the cluster: a pod counts on its node from the moment of the decision on, and many bindings are under
way at once. Whatever comes of each is a fact for one of the next steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, structs

from hodei.control.controller import Controller, Step
from hodei.engine.topology_index import AssumedVolumes
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import NO_PROVISIONER, SELECTED_NODE, Claim, Node, Pod, decode
from hodei.kube.scheduler.background import BackgroundTask
from hodei.kube.scheduler.cache import ClusterCache, Refused
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.messages import Told
from hodei.kube.scheduler.metrics import Metrics
from hodei.kube.scheduler.pod_api import PodApi, RequestQueue, Work, is_gone, is_settled
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.status_reporter import StatusReporter
from hodei.kube.scheduler.volumes import claim_handle, claim_name, to_bind, volume_on
from hodei.model.effects import Start, Stop, WithdrawStop
from hodei.model.facts import Fact, StopWithdrawn
from hodei.model.ids import JobId, RunId, job_of
from hodei.model.node import Volume as Needed

# -------------------------------------------------------------------------------------------- removals
# Pods that were told to go, until they go.


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


# ----------------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------- provisioning
# Volumes that wait for their first consumer: told which node it is, and waited for before the pod is bound.


PATIENCE_S = 600.0


class NotProvisioned(Exception):
    """The volumes did not come; the pod may do better elsewhere."""


class Provisioning:
    def __init__(
        self,
        cache: ClusterCache,
        actor: PodApi,
        node: Callable[[str], Node | None],
        assumed: AssumedVolumes | None = None,
    ) -> None:
        self._cache, self._actor, self._node = cache, actor, node
        self._moved = asyncio.Event()
        self._assumed = AssumedVolumes() if assumed is None else assumed
        cache.storage_moved = self._storage_moved

    def needed(self, pod: Pod) -> bool:
        return bool(pod.spec.volumes) and bool(to_bind(pod, self._cache.surroundings.storage))

    async def ready(self, pod: Pod, node: str) -> None:
        """Returns when all claims of the pod are bound. Raises NotProvisioned, or ApiError."""
        storage = self._cache.surroundings.storage
        wanted = {(claim.metadata.namespace, claim.metadata.name) for claim in to_bind(pod, storage)}
        heard: set[tuple[str, str]] = set()  # the claims that have been seen to name the node
        try:
            for key in sorted(wanted):
                await self._begin(storage.claims[key], node)
            async with asyncio.timeout(PATIENCE_S):
                while not all((claim := storage.claims.get(key)) is not None and claim.bound for key in wanted):
                    self._check(wanted, node, heard)
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            raise NotProvisioned(f"volumes were not provisioned within {PATIENCE_S:g} s") from None

    def give_up(self, pod: Pod) -> None:
        """It was not bound after all: what its claims were to have is free for others."""
        for volume in pod.spec.volumes:
            if name := claim_name(pod, volume):
                self._assumed.release(f"claim/{pod.metadata.namespace}/{name}")

    def forget(self, volumes: Iterable[Needed]) -> None:
        """The same for one that is not there any more."""
        for volume in volumes:
            self._assumed.release(volume.handle)

    async def _begin(self, claim: Claim, node: str) -> None:
        known = self._node(node)
        if known is None:
            raise NotProvisioned(f"node {node} has gone")
        key = (claim.metadata.namespace, claim.metadata.name)
        handle, storage = claim_handle(claim), self._cache.surroundings.storage
        of_others = {volume for other, volume in self._assumed.claims().items() if other != handle}
        volume = volume_on(known, claim, storage, of_others, first=self._assumed.of(handle))
        if volume is not None:
            self._assumed.take(volume.metadata.name, handle)
            if volume.spec.claim_ref is None:
                await self._actor.promise_volume(volume, claim)
        elif not self._can_be_made(claim):
            raise NotProvisioned(f"no volume is left for the claim {'/'.join(key)} on node {node}")
        elif claim.metadata.annotations.get(SELECTED_NODE) != node:
            await self._actor.choose_node(claim, node)

    def _can_be_made(self, claim: Claim) -> bool:
        cls = self._cache.classes.all.get(claim.class_name)
        return cls is not None and cls.provisioner not in ("", NO_PROVISIONER)

    def _check(self, wanted: set[tuple[str, str]], node: str, heard: set[tuple[str, str]]) -> None:
        """Whoever makes volumes takes the node's name off a claim that it can make none for there."""
        claims = self._cache.claims.all
        for key in wanted:
            claim = claims.get(key)
            if claim is None:
                raise NotProvisioned(f"the claim {'/'.join(key)} has gone")
            chosen = claim.metadata.annotations.get(SELECTED_NODE)
            if chosen == node:
                heard.add(key)
            elif not claim.bound and chosen is not None:
                raise NotProvisioned(f"the claim {'/'.join(key)} is made for node {chosen}")
            elif not claim.bound and key in heard:
                raise NotProvisioned(f"no volume can be made for the claim {'/'.join(key)} on node {node}")

    def _storage_moved(self, claim: Claim | None) -> None:
        self._moved.set()
        if self._assumed:
            self._see()

    def _see(self) -> None:
        """What the cluster shows need not be assumed any more."""
        claims, volumes = self._cache.claims.all, self._cache.volumes.all
        for handle, name in self._assumed.claims().items():
            _, namespace, claim = handle.split("/", 2)
            volume = volumes.get(name)
            if volume is None or volume.spec.claim_ref is not None or (namespace, claim) not in claims:
                self._assumed.release(handle)


# ----------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
BINDINGS, REPORTS, DELETIONS = 64, 16, 32
# With more bindings than this on their way it is better to wait and to know more before the next decision.
_ENOUGH = 4 * BINDINGS
_TRIES = 8
_CALM_S = 5.0
# Stops that need no eviction: of a pod that goes by itself (only pods that are gone or going are cancelled here), and of
# those for whom room is made, who are deleted as the plan's evictions say.
_SEEN_TO = ("cancelled", "preempted")


class SchedulerLoop:
    def __init__(
        self,
        api: Api,
        controller: Controller,
        pods: Pods,
        cache: ClusterCache,
        actor: PodApi,
        telling: StatusReporter,
        metrics: Metrics,
        now_ms: Callable[[], int],
        assumed: AssumedVolumes | None = None,
    ) -> None:
        self._api, self.controller, self.pods, self.cache = api, controller, pods, cache
        self._actor, self._telling, self._metrics, self._now_ms = actor, telling, metrics, now_ms
        self._stirred = asyncio.Event()
        self._bindings, self._reports, self._deletions = (
            RequestQueue(BINDINGS),
            RequestQueue(REPORTS),
            RequestQueue(DELETIONS),
        )
        self._bindings.quiet = self._go_on
        self._held_back = False
        self._provisioning = Provisioning(cache, actor, pods.node, assumed)
        self._removals = Removals(actor, pods, self._deletions)
        self.went_round = time.monotonic()
        self._lines = list(controller.queues.values())
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
            if isinstance(act, WithdrawStop):
                self._spare(act.run)
            elif isinstance(act, Stop) and not self._removals.again(act.run) and act.reason.code not in _SEEN_TO:
                for entry in self.pods.of_job(job_of(act.run)):
                    self._removals.evict(entry, act.reason.text)
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
            self.pods.give([StopWithdrawn(run=run)])
            self._stirred.set()

    async def _quietly(self, telling: Coroutine[Any, Any, None]) -> None:
        """What is only told may be lost; it must not hold anything up."""
        try:
            await telling
        except ApiError as error:
            if not is_gone(error):
                _log.warning("not told: %s", error.message)
