"""Every pod of the cluster as a job of the controller: watch events become facts, starts become bindings.

A pod with a node is a running job, whichever scheduler bound it. A pod of ours without a node is a pending job. The pods of a
gang are one job until they are placed; from then on each is a job of its own, because pods end one by one. This module opens
no connection and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from msgspec import structs

from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.api.objects import Pod
from hodei.kube.api.quantities import readable
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.gangs import GangAssembly, as_job, assemble, membership
from hodei.kube.scheduler.groups import (
    Entry,
    GroupIndex,
    GroupKey,
    PendingGang,
    has_claims,
    node_differs,
    only_bound,
    pod_differs,
    preemption_units,
)
from hodei.kube.scheduler.translate import Reader, at_ms, describe_error
from hodei.model.effects import Start
from hodei.model.facts import (
    Fact,
    GangSplit,
    JobCancelled,
    JobRestored,
    JobSubmitted,
    JobWithdrawn,
    NodeJoined,
    NodeLost,
    RunObserved,
)
from hodei.model.ids import JobId, NodeName, RunId, run_id
from hodei.model.job import Job, Reason, Run

BACKEND = "kubernetes"
START_FAILED = "start_failed"
# Submission time of a pod that replaces a lost member: ahead of all others of its priority.
FIRST_MS = 1
_LONGEST_PAST_MS = 366 * 86_400_000


class Pods(GroupIndex):
    def __init__(
        self,
        scheduler: str,
        cache: ClusterCache,
        reader: Reader,
        now_ms: Callable[[], int],
        *,
        link_members: Callable[[GroupKey, Sequence[JobId], Sequence[JobId]], None],
        observe_starts: bool,
    ) -> None:
        """`observe_starts`: report when the containers of a pod start, for estimates that learn from run times."""
        self._scheduler, self._reader, self._now_ms, self._observe_starts = scheduler, reader, now_ms, observe_starts
        super().__init__(cache, link_members)
        self.by_job: dict[JobId, Entry] = {}
        self._on_node: dict[NodeName, dict[str, None]] = {}
        self.nodes: dict[NodeName, KubeNode] = {}
        # Pods that other schedulers bound, counted: the number of the last one on each node.
        self._arrivals, self._last_arrival = 0, dict[NodeName, int]()
        # Pods of ours to translate again when storage changes: refused ones, and those with claims.
        self._depends_on_storage: dict[str, None] = {}
        self._translated_version = 0
        self._facts: list[Fact] = []
        self._has_unreported = False
        self.queued_count = 0  # how often a pod was queued, for the metrics
        self._ids = count(1)
        # Pods of ours that are new or changed, and have no status reported yet.
        self.unreported: dict[str, None] = {}
        cache.drivers_changed.append(self._drivers_changed)

    def pod_changed(self, uid: str, before: Pod | None, after: Pod | None) -> None:
        entry = self.entries.get(uid)
        if after is None or after.terminal:
            if entry is not None:
                self._remove(entry, after)
        elif entry is not None and not pod_differs(entry.pod, after):
            if (
                self._observe_starts
                and entry.stage == "bound"
                and after.status.start_time
                and not entry.pod.status.start_time
            ):
                started_ms = self._past_ms(after.status.start_time)
                self._add(RunObserved(run=entry.run, state="running", at_ms=started_ms))
            if entry.pod.status.phase != after.status.phase:
                self.mark_status_dirty(entry)
            entry.pod = after
        elif after.spec.node_name:
            self._pod_assigned(uid, entry, after)
        elif after.terminating or not self._is_ours(after):
            if entry is not None:
                self._remove(entry, after)
        elif entry is not None and entry.stage == "placed":
            entry.pod = after  # its binding is under way
        else:
            if entry is not None:
                self._remove(entry, after)
            self._pod_pending(uid, after)

    def node_changed(self, name: NodeName, before: KubeNode | None, after: KubeNode | None) -> None:
        if after is None:
            self.nodes.pop(name, None)
            self._last_arrival.pop(name, None)
            for uid in list(self._on_node.get(name, ())):
                entry = self.entries[uid]
                if entry.assigned:
                    self._release(entry, "the node was deleted")
                    # The pod still exists; it counts again if its node comes back.
                    entry.stage = "inactive"
                    self._on_node.setdefault(name, {})[uid] = None
            self._add(NodeLost(node=name, reason="the node was deleted"))
            return
        new = name not in self.nodes
        self.nodes[name] = after
        if before is None or node_differs(before, after):
            self._drivers_changed(name)
        if new:
            for uid in list(self._on_node.get(name, ())):
                entry = self.entries[uid]
                if entry.stage == "inactive" and entry.pod.spec.node_name:
                    self._restore(entry, again=True)

    def _drivers_changed(self, name: NodeName) -> None:
        node = self.nodes.get(name)
        if node is not None:
            self._add(NodeJoined(node=self._reader.node(node, self._cache.drivers.objects.get(name))))

    def _pod_assigned(self, uid: str, entry: Entry | None, pod: Pod) -> None:
        if entry is not None and entry.assigned and entry.node == pod.spec.node_name:
            info = entry.info
            entry.stage = "bound"
            if not only_bound(entry.pod, pod):
                info = self._reader.pod(pod, ours=self._is_ours(pod))
            entry.pod = pod
            if info.job is entry.info.job or info.job == entry.info.job:
                self._check_terminating(entry)
                return
        was_assigned = entry is not None and entry.assigned
        if entry is not None:
            self._remove(entry, pod)
        info = self._reader.pod(pod, ours=self._is_ours(pod))
        entry = self.entries[uid] = Entry(uid, pod, info, node=pod.spec.node_name)
        self._arrivals += 1
        self._last_arrival[entry.node] = self._arrivals
        self._join_group(entry)
        if entry.node in self.nodes:
            self._restore(entry, again=was_assigned)
        else:
            self._on_node.setdefault(entry.node, {})[uid] = None  # until the node appears

    def _pod_pending(self, uid: str, pod: Pod) -> None:
        entry = self.entries[uid] = Entry(uid, pod, self._reader.pod(pod, ours=True))
        if entry.info.gates:
            return
        self._join_group(entry)
        self._queue(entry)

    def _queue(self, entry: Entry) -> None:
        """Submit a pod of ours without scheduling gates, or have its group assembled."""
        self._mark_unreported(entry)
        if entry.info.refused:
            entry.reasons = entry.info.refused
        if entry.info.refused or has_claims(entry.pod):
            self._depends_on_storage[entry.uid] = None
        if entry.group is not None:
            self.mark_dirty(entry)
        elif not entry.reasons:
            self._submit(entry)

    def _join_group(self, entry: Entry) -> None:
        found = membership(entry.pod)
        if isinstance(found, Reason):
            entry.reasons = (found,)
        elif found is not None and (found.declared or self._is_ours(entry.pod)):
            # A bare name on a pod of another scheduler means nothing: it was not placed as a gang.
            self.join_group(entry, found)

    def _is_ours(self, pod: Pod) -> bool:
        return pod.spec.scheduler_name == self._scheduler

    def take_facts(self) -> list[Fact]:
        """Everything since the last call, after assembling changed groups and translating pods again where needed."""
        if self._depends_on_storage and self._translated_version != self._cache.version:
            self._translate_again()
        self._translated_version = self._cache.version
        self._expire_gangs()
        self._mark_changed_groups()
        while self._dirty:
            key = next(iter(self._dirty))
            del self._dirty[key]
            self._assemble(key)
        self._has_unreported = False
        facts, self._facts = self._facts, []
        return facts

    def add_facts(self, facts: Iterable[Fact]) -> None:
        self._facts += facts

    def _add(self, fact: Fact) -> None:
        self._facts.append(fact)

    @property
    def has_work(self) -> bool:
        """Whether the next step has something to learn or to report."""
        cache = self._cache
        if self._facts or self._dirty or self._has_unreported or cache.changed_groups or cache.resized_workloads:
            return True
        due = self.timeouts.next_ms()
        if due is not None and due <= self._now_ms():
            return True
        return bool(self._depends_on_storage) and self._translated_version != cache.version

    def _expire_gangs(self) -> None:
        """Gangs that timed out release their nodes."""
        late, back = self.timeouts.expire(self._now_ms())
        for key, why in late:
            self._withdraw_gang(key)
            for entry in self.members(key):
                if entry.stage == "placed":
                    self.mark_not_bound(entry.uid, entry.run, why)
        self._dirty.update(dict.fromkeys([*(key for key, _ in late), *back]))

    def _translate_again(self) -> None:
        for uid in list(self._depends_on_storage):
            entry = self.entries[uid]
            if entry.assigned:
                del self._depends_on_storage[uid]
                continue
            info = self._reader.pod(entry.pod, ours=True)
            if info != entry.info:
                del self._depends_on_storage[uid]
                if entry.stage == "queued":
                    self._add(JobWithdrawn(job=entry.id, reason="what the pod refers to has changed"))
                    self.by_job.pop(entry.id, None)
                    entry.stage, entry.id = "inactive", 0
                elif entry.stage == "gang" and entry.group is not None:
                    self._withdraw_gang(entry.group.key)
                entry.info, entry.reasons = info, ()
                self._queue(entry)

    def _assemble(self, key: GroupKey) -> None:
        """Submit the pending pods of a group as one job, again if they have changed."""
        members, ended = self.members(key), self.ended_members.of(key)
        self.status_dirty[key] = None
        active = [entry for entry in members if entry.assigned and not entry.terminating]
        self.link_members(key, *preemption_units(active, ended, self._cache.groups))
        pods = [
            structs.replace(entry.pod, spec=structs.replace(entry.pod.spec, node_name=entry.node or "?"))
            if entry.stage in ("queued", "placed", "bound")
            else entry.pod
            for entry in members
        ]
        for assembly in self._assemblies([*pods, *ended]) or [GangAssembly([])]:
            pending = [self.entries[pod.metadata.uid] for pod in assembly.pending]
            late = self.timeout_reason(key, assembly, self._now_ms())
            refused = next((entry.reasons for entry in pending if entry.info.refused), ())
            if assembly.group is None and assembly.reason is None and not refused:
                self._withdraw_gang(key)
                for entry in pending:
                    entry.reasons = ()
                    self._submit(entry)
            elif assembly.reason is not None or refused or late is not None or not pending:
                self._withdraw_gang(key)
                why = late or assembly.reason
                for entry in pending:
                    reasons = entry.info.refused or refused or ((why,) if why else ())
                    if entry.reasons != reasons:
                        entry.reasons = reasons
                        self._mark_unreported(entry)
            else:
                self._submit_gang(key, pending, assembly)

    def _assemblies(self, pods: list[Pod]) -> list[GangAssembly]:
        try:
            return assemble(pods, self._cache.groups)
        except Exception as error:  # the group's object is malformed in an unforeseen way: its pods wait, with a reason
            text = f"the pod's group cannot be read: {describe_error(error)}"[:500]
            pending = [pod for pod in pods if not pod.spec.node_name and pod.metadata.uid in self.entries]
            return [GangAssembly(pending, reason=Reason("gang", "INVALID_POD_GROUP", text))]

    def _submit_gang(self, key: GroupKey, pending: list[Entry], assembly: GangAssembly) -> None:
        uids, gang = tuple(entry.uid for entry in pending), self._gangs.get(key)
        needed, urgent = assembly.needed, assembly.lacks_members
        if gang is not None and gang.uids == uids and gang.needed == needed and gang.urgent == urgent:
            return
        self._withdraw_gang(key)
        spec, order = as_job([entry.info for entry in pending], needed, assembly.group)
        id = next(self._ids)
        created = [self._past_ms(entry.pod.metadata.creation_timestamp) for entry in pending]
        submitted_ms = FIRST_MS if urgent else min(created)
        self._gangs[key] = PendingGang(id, uids, tuple(uids[number] for number in order), needed, urgent)
        self.group_of_job[id] = key
        self.queued_count += len(pending)
        for entry in pending:
            entry.stage, entry.id, entry.reasons = "gang", id, ()
            self._mark_unreported(entry)
        self._add(JobSubmitted(job=Job(id, spec, "pending", submitted_ms, self._now_ms())))

    def _withdraw_gang(self, key: GroupKey) -> None:
        gang = self._gangs.pop(key, None)
        if gang is not None:
            self.group_of_job.pop(gang.id, None)
            self._add(JobWithdrawn(job=gang.id, reason="the pods of the gang have changed"))
            self._detach_members(gang)

    def _detach_members(self, gang: PendingGang) -> None:
        for uid in gang.uids:
            entry = self.entries.get(uid)
            if entry is not None and entry.stage == "gang":
                entry.stage, entry.id = "inactive", 0

    def _submit(self, entry: Entry) -> None:
        id = next(self._ids)
        entry.stage, entry.id = "queued", id
        self.queued_count += 1
        self.by_job[id] = entry
        created_ms = self._past_ms(entry.pod.metadata.creation_timestamp)
        self._add(JobSubmitted(job=Job(id, entry.info.job, "pending", created_ms, self._now_ms())))

    def _restore(self, entry: Entry, *, again: bool = False) -> None:
        """Report a bound pod as a running job. `again`: its usage so far is already counted."""
        job, run = self._running_job(entry, again=again)
        self._add(JobRestored(job=job, runs=(run,)))
        self._check_terminating(entry)

    def _running_job(self, entry: Entry, *, placed_ms: int = 0, again: bool = False) -> tuple[Job, Run]:
        """A new job for a pod with a node: bound, or placed with its gang at `placed_ms`."""
        id = next(self._ids)
        entry.id, entry.run = id, run_id(id, 0, 1)
        entry.stage = "placed" if placed_ms else "bound"
        self._assign(entry)
        created = self._past_ms(entry.pod.metadata.creation_timestamp)
        since = placed_ms or (self._past_ms(entry.pod.status.start_time) if entry.pod.status.start_time else created)
        run = Run(
            entry.run, id, "pod", 0, 1, entry.node, BACKEND, "placed" if placed_ms else "running",
            self._now_ms() if again else since, started_ms=0 if placed_ms else since,
        )  # fmt: skip
        job = Job(
            id, entry.info.job, "scheduled" if placed_ms else "running", created, since,
            attempt=1, first_attempt=1, scheduled_ms=since, nodes=entry.node,
        )  # fmt: skip
        return job, run

    def _past_ms(self, stamp: str | None) -> int:
        """A timestamp, limited to the last year up to now: usage is counted hour by hour since then."""
        now_ms = self._now_ms()
        return max(now_ms - _LONGEST_PAST_MS, min(at_ms(stamp, now_ms), now_ms))

    def _assign(self, entry: Entry) -> None:
        """The pod holds capacity of its node from now on."""
        self.by_job[entry.id] = entry
        self._on_node.setdefault(entry.node, {})[entry.uid] = None
        entry.arrivals_seen = self._arrivals
        self._cache.budgets.watch(entry.id, entry.pod.metadata)
        self.mark_dirty(entry)

    def _check_terminating(self, entry: Entry) -> None:
        if entry.pod.terminating and not entry.terminating:
            entry.terminating = True
            self.mark_dirty(entry)
            self._add(JobCancelled(job=entry.id, reason="the pod is being deleted"))

    def _release(self, entry: Entry, why: str, *, succeeded: bool = False) -> None:
        """End the job of a pod that holds capacity."""
        self._on_node.get(entry.node, {}).pop(entry.uid, None)
        self._cache.budgets.forget(entry.id)
        self.mark_dirty(entry)
        if not succeeded and not entry.terminating:
            self._add(JobCancelled(job=entry.id, reason=why))
        self._add(RunObserved(run=entry.run, state="succeeded" if succeeded else "stopped", at_ms=self._now_ms()))
        self.by_job.pop(entry.id, None)

    def _remove(self, entry: Entry, after: Pod | None) -> None:
        """Forget an entry: its pod was deleted, has ended (`after`), or is about to be added again as it is now."""
        del self.entries[entry.uid]
        self.unreported.pop(entry.uid, None)
        self._depends_on_storage.pop(entry.uid, None)
        self._on_node.get(entry.node, {}).pop(entry.uid, None)
        self.leave_group(entry)
        phase = after.status.phase if after is not None else ""
        if entry.assigned:
            why = "the pod has failed" if phase == "Failed" else "the pod was deleted or replaced"
            self._release(entry, why, succeeded=phase == "Succeeded")
        elif entry.stage == "queued":
            if after is None or after.terminating or after.terminal:
                self._add(JobCancelled(job=entry.id, reason="the pod was deleted"))
            else:
                self._add(JobWithdrawn(job=entry.id, reason="the pod has changed"))
            self.by_job.pop(entry.id, None)

    def _mark_unreported(self, entry: Entry) -> None:
        self.unreported[entry.uid] = None
        self._has_unreported = True

    def place(self, starts: Iterable[Start], now_ms: int) -> list[Entry]:
        """The pods to bind, by the controller's start orders. A gang is split into jobs of one pod each."""
        out, gangs = [], dict[JobId, list[Start]]()
        for start in starts:
            if start.run.job in self.group_of_job:
                gangs.setdefault(start.run.job, []).append(start)
                continue
            entry = self.by_job.get(start.run.job)
            if entry is not None:
                entry.stage, entry.node, entry.run = "placed", start.run.node, start.run.id
                self._assign(entry)
                out.append(entry)
        for id, members in gangs.items():
            out += self._split_gang(id, members, now_ms)
        return out

    def _split_gang(self, id: JobId, starts: list[Start], now_ms: int) -> list[Entry]:
        key = self.group_of_job.pop(id)
        gang = self._gangs.pop(key)
        self._dirty[key] = None  # members without a node stay pending
        self._detach_members(gang)
        out, members = [], []
        for start in starts:
            entry = self.entries.get(gang.order[start.run.member])
            if entry is not None:
                entry.node = start.run.node
                members.append(self._running_job(entry, placed_ms=now_ms))
                out.append(entry)
        self._add(GangSplit(job=id, at_ms=now_ms, members=tuple(members)))
        for entry in out:
            self._check_terminating(entry)
        return out

    def mark_bound(self, uid: str, run: RunId) -> None:
        entry = self.entries.get(uid)
        if entry is not None and entry.run == run and entry.stage == "placed":
            entry.stage = "bound"
            self.mark_status_dirty(entry)

    def mark_not_bound(self, uid: str, run: RunId, reason: str, *, removed: bool = False) -> None:
        """The binding failed: its capacity is released and the pod is queued again, unless it was `removed`."""
        entry = self.entries.get(uid)
        if entry is None or entry.run != run or entry.stage not in ("placed", "inactive"):
            return
        if removed or entry.stage == "inactive":
            self._remove(entry, None)
            if not removed:  # its node was deleted meanwhile
                self._pod_pending(uid, entry.pod)
            return
        self._on_node.get(entry.node, {}).pop(uid, None)
        self._cache.budgets.forget(entry.id)
        entry.stage, entry.node = "queued", ""
        if has_claims(entry.pod):  # its volumes may have changed
            self._depends_on_storage[uid], self._translated_version = None, -1
        self._add(
            RunObserved(run=run, state="failed", at_ms=self._now_ms(), reason_code=START_FAILED, reason=reason)
        )  # fmt: skip

    def lacking_resource(self, entry: Entry) -> str:
        """A resource that the node lacks since the placement, because of other schedulers; "" if none."""
        node = self.nodes.get(entry.node)
        if node is None or self._last_arrival.get(entry.node, 0) <= entry.arrivals_seen:
            return ""
        capacity, _ = readable(node.status.allocatable)
        requests = [self.entries[uid].info.request for uid in self._on_node.get(entry.node, ())]
        for name in sorted(entry.info.request.keys() & capacity.keys()):
            if sum(request.get(name, 0) for request in requests) > capacity[name]:
                return name
        return ""

    def entries_of(self, id: JobId) -> list[Entry]:
        """The pods of a job; empty if it has ended."""
        key = self.group_of_job.get(id)
        if key is not None:
            return [self.entries[uid] for uid in self._gangs[key].uids if uid in self.entries]
        entry = self.by_job.get(id)
        return [entry] if entry is not None else []

    def name_of(self, id: JobId) -> str:
        """A job by the name of its first pod; "" if it has ended."""
        entries = self.entries_of(id)
        if not entries:
            return ""
        return f"pod {entries[0].name}" + (f" and {len(entries) - 1} more" if len(entries) > 1 else "")

    def find(self, namespace: str, name: str) -> Entry | None:
        for entry in self.entries.values():
            if entry.pod.metadata.name == name and entry.pod.metadata.namespace == namespace:
                return entry
        return None
