"""Every pod of the cluster as the controller's jobs: what the watches tell becomes facts, what it starts becomes bindings.

A pod that has a node is a job that runs, whoever bound it. A pod of ours without one is a job that waits; pods of a gang are
one job together until they are placed, and from then on each is a job of its own, because each lives and dies alone.
Nothing here opens a connection, and nothing here decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from msgspec import structs

from hodei.kube.api.objects import Node, Pod
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.api.quantities import readable
from hodei.kube.scheduler.cache import ClusterCache, said
from hodei.kube.scheduler.gangs import GangAssembly, as_job, gather, membership
from hodei.kube.scheduler.groups import (
    Entry,
    GroupIndex,
    GroupKey,
    WaitingGang,
    differs,
    has_claims,
    node_differs,
    same_hold,
    same_spec,
    tied_together,
)
from hodei.kube.scheduler.pod_reader import Reader, at_ms
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
from hodei.model.resources import Resources

# --------------------------------------------------------------------------------------- prebind check
# The last look before a binding: has somebody else taken the room since it was decided?


class PrebindCheck:
    """Counts those who come to nodes without having been sent there by us; a decision remembers how far the count was."""

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[NodeName, int] = {}

    def came(self, node: NodeName) -> None:
        self.count += 1
        self._last[node] = self.count

    def since(self, node: NodeName, count: int) -> bool:
        return self._last.get(node, 0) > count

    def forget(self, node: NodeName) -> None:
        self._last.pop(node, None)


def lacking(node: Node, wanted: Resources, there: Iterable[Resources]) -> str:
    """The first resource, of those that are `wanted`, of which all that are `there` ask for more than the node has; "" if
    there is none. Whoever wants it is one of them."""
    room, _ = readable(node.status.allocatable)
    held = list(there)
    for name in sorted(wanted.keys() & room.keys()):
        if sum(one.get(name, 0) for one in held) > room[name]:
            return name
    return ""


# ----------------------------------------------------------------------------------------------------

BACKEND = "kubernetes"
START_FAILED = "start_failed"
# When a pod came that takes the place of a lost member: before all others of its priority.
FIRST_MS = 1
_LONGEST_PAST_MS = 366 * 86_400_000


class Pods(GroupIndex):
    def __init__(self, scheduler: str, cache: ClusterCache, reader: Reader, now_ms: Callable[[], int]) -> None:
        self._scheduler, self._reader, self._now_ms = scheduler, reader, now_ms
        super().__init__(cache)
        self.by_job: dict[JobId, Entry] = {}
        self._on_node: dict[NodeName, dict[str, None]] = {}
        self.nodes: dict[NodeName, KubeNode] = {}
        self._arrivals = PrebindCheck()
        # Pods of ours that read differently when storage changes: those that cannot be placed at all, and those with claims.
        self._unread: dict[str, None] = {}
        self._read_at = 0
        self._facts: list[Fact] = []
        self._untold = False
        self.arrivals = 0  # how many times a pod has come into the line
        self._ids = count(1)
        # Pods of ours that came or changed and have not been told anything yet.
        self.fresh: dict[str, None] = {}
        self.learns = False  # whether anybody wants to know when pods begin to run
        cache.drivers_moved = self._drivers_moved

    # ------------------------------------------------------------------------------------------- watching

    def moved(self, uid: str, before: Pod | None, after: Pod | None) -> None:
        entry = self.entries.get(uid)
        if after is None or after.over:
            if entry is not None:
                self._drop(entry, after)
        elif entry is not None and not differs(entry.pod, after):
            if self.learns and entry.stage == "bound" and after.status.start_time and not entry.pod.status.start_time:
                self._tell(RunObserved(run=entry.run, state="running", at_ms=self._since(after.status.start_time)))
            if entry.group is not None and entry.pod.status.phase != after.status.phase:
                self.touched[entry.group.key] = None
            entry.pod = after
        elif after.spec.node_name:
            self._has_node(uid, entry, after)
        elif after.leaving or after.spec.scheduler_name != self._scheduler:
            if entry is not None:
                self._drop(entry, after)
        elif entry is not None and entry.stage == "placed":
            entry.pod = after  # its binding is on its way
        else:
            if entry is not None:
                self._drop(entry, after)
            self._wants_node(uid, after)

    def node_moved(self, name: NodeName, before: KubeNode | None, after: KubeNode | None) -> None:
        if after is None:
            self.nodes.pop(name, None)
            self._arrivals.forget(name)
            for uid in list(self._on_node.get(name, ())):
                entry = self.entries[uid]
                if entry.holds:
                    self._let_go(entry)
                    entry.stage = "aside"  # the pod is there still; should its node come back, so does it
                    self._on_node.setdefault(name, {})[uid] = None
            self._tell(NodeLost(node=name, reason="the node was deleted"))
            return
        new = name not in self.nodes
        self.nodes[name] = after
        if before is None or node_differs(before, after):
            self._tell(NodeJoined(node=self._reader.node(after, self._cache.drivers.all.get(name))))
        if new:
            for uid in list(self._on_node.get(name, ())):
                entry = self.entries[uid]
                if entry.stage == "aside" and entry.pod.spec.node_name:
                    self._restore(entry, again=True)

    def _drivers_moved(self, name: NodeName) -> None:
        node = self.nodes.get(name)
        if node is not None:
            self._tell(NodeJoined(node=self._reader.node(node, self._cache.drivers.all.get(name))))

    def _has_node(self, uid: str, entry: Entry | None, pod: Pod) -> None:
        if entry is not None and entry.holds and entry.node == pod.spec.node_name:
            wanted = entry.wanted
            entry.stage = "bound"
            if not same_spec(entry.pod, pod):
                wanted = self._reader.pod(pod, ours=self._ours(pod))
            entry.pod = pod
            if same_hold(wanted.job, entry.wanted.job):
                self._leave(entry)
                return
        held = entry is not None and entry.holds
        if entry is not None:
            self._drop(entry, pod)
        made = Entry(uid, pod, self._reader.pod(pod, ours=self._ours(pod)), node=pod.spec.node_name)
        self.entries[uid] = made
        self._arrivals.came(made.node)
        self._join_group(made)
        if made.node in self.nodes:
            self._restore(made, again=held)
        else:
            self._on_node.setdefault(made.node, {})[uid] = None  # until there is such a node

    def _wants_node(self, uid: str, pod: Pod) -> None:
        entry = self.entries[uid] = Entry(uid, pod, self._reader.pod(pod, ours=True))
        if entry.wanted.gates:
            return
        self._join_group(entry)
        self._consider(entry)

    def _consider(self, entry: Entry) -> None:
        """A pod of ours that nothing holds back: into the line, with its group if it has one."""
        self._freshen(entry)
        if entry.wanted.refused:
            entry.reasons = entry.wanted.refused
        if entry.wanted.refused or has_claims(entry.pod):
            self._unread[entry.uid] = None
        if entry.group is not None:
            self.look_again(entry)
        elif not entry.reasons:
            self._submit(entry)

    def _join_group(self, entry: Entry) -> None:
        found = membership(entry.pod)
        if isinstance(found, Reason):
            entry.reasons = (found,)
        elif found is not None and (found.declared or self._ours(entry.pod)):
            # Of pods of other schedulers a bare name is no more than a name: they were not placed as a gang.
            self.join_group(entry, found)

    def _ours(self, pod: Pod) -> bool:
        return pod.spec.scheduler_name == self._scheduler

    # ---------------------------------------------------------------------------------------------- facts

    def take_facts(self) -> list[Fact]:
        """All that has happened since this was last asked, once groups are gathered and what could not be read is read."""
        if self._unread and self._read_at != self._cache.version:
            self._read_again()
        self._read_at = self._cache.version
        self._lose_patience()
        for namespace, name in self._cache.take_groups():
            for key in self._members:
                if key[1] == namespace and key[2].partition("/")[0] == name:
                    self._dirty[key] = None
        self._sizes_moved()
        while self._dirty:
            key = next(iter(self._dirty))
            del self._dirty[key]
            self._gather(key)
        self._untold = False
        facts, self._facts = self._facts, []
        return facts

    @property
    def stirred(self) -> bool:
        """Whether there is anything to take."""
        if self._facts or self._dirty or self._untold or self._cache.groups_moved or self._cache.sizes_moved:
            return True
        due = self.patience.next_ms()
        return (due is not None and due <= self._now_ms()) or (
            bool(self._unread) and self._read_at != self._cache.version
        )

    def _lose_patience(self) -> None:
        """Gangs that have waited for as long as they may let go of what is kept for them."""
        late, back = self.patience.run_out(self._now_ms())
        for key, why in late:
            self._dissolve(key)
            for entry in self.members(key):
                if entry.stage == "placed":
                    self.not_bound(entry.uid, entry.run, why)
        self._dirty.update(dict.fromkeys([*(key for key, _ in late), *back]))

    def _read_again(self) -> None:
        for uid in list(self._unread):
            entry = self.entries[uid]
            if entry.holds:
                del self._unread[uid]
                continue
            wanted = self._reader.pod(entry.pod, ours=True)
            if wanted != entry.wanted:
                del self._unread[uid]
                self._withdraw(entry)
                entry.wanted, entry.reasons = wanted, ()
                self._consider(entry)

    def _withdraw(self, entry: Entry) -> None:
        """One that waits is taken out of the line."""
        if entry.stage == "queued":
            self._tell(JobWithdrawn(job=entry.id, reason="what the pod refers to has changed"))
            self.by_job.pop(entry.id, None)
            entry.stage, entry.id = "aside", 0
        elif entry.stage == "gang" and entry.group is not None:
            self._dissolve(entry.group.key)

    def _gather(self, key: GroupKey) -> None:
        """The waiting pods of a group as one job, made anew if they are not the same as before."""
        members = self.members(key)
        self.touched[key] = None
        holding = [entry for entry in members if entry.holds and not entry.leaving]
        self.tied(key, *tied_together(holding, self.past.of(key), self._cache.groups))
        pods = [
            structs.replace(entry.pod, spec=structs.replace(entry.pod.spec, node_name=entry.node or "?"))
            if entry.stage in ("queued", "placed", "bound")
            else entry.pod
            for entry in members
        ]
        for gathering in self._gathered([*pods, *self.past.of(key)]) or [GangAssembly([])]:
            waiting = [self.entries[pod.metadata.uid] for pod in gathering.waiting]
            late = self.late(key, gathering, self._now_ms())
            unread = next((entry.reasons for entry in waiting if entry.wanted.refused), ())
            if gathering.group is None and gathering.reason is None and not unread:
                self._dissolve(key)
                for entry in waiting:
                    entry.reasons = ()
                    self._submit(entry)
            elif gathering.reason is not None or unread or late is not None or not waiting:
                self._dissolve(key)
                for entry in waiting:
                    why = late or gathering.reason
                    reasons = entry.wanted.refused or unread or ((why,) if why else ())
                    if entry.reasons != reasons:
                        entry.reasons = reasons
                        self._freshen(entry)
            else:
                self._line_up(key, waiting, gathering)

    def _gathered(self, pods: list[Pod]) -> list[GangAssembly]:
        try:
            return gather(pods, self._cache.groups)
        except Exception as error:  # the group's object says what nobody foresaw: its pods wait, and are told
            why = Reason("gang", "INVALID_POD_GROUP", f"the pod's group cannot be read: {said(error)}"[:500])
            waiting = [pod for pod in pods if not pod.spec.node_name and pod.metadata.uid in self.entries]
            return [GangAssembly(waiting, reason=why)]

    def _line_up(self, key: GroupKey, waiting: list[Entry], gathering: GangAssembly) -> None:
        uids, gang = tuple(entry.uid for entry in waiting), self._gangs.get(key)
        needed, first = gathering.needed, gathering.lacks_members
        if gang is not None and gang.uids == uids and gang.needed == needed and gang.first == first:
            return
        self._dissolve(key)
        spec, order = as_job([entry.wanted for entry in waiting], needed, gathering.group)
        id, now_ms = next(self._ids), self._now_ms()
        # The members that run wait for the one that is missing: it comes before all others of its priority.
        since = FIRST_MS if first else min(self._since(one.pod.metadata.creation_timestamp) for one in waiting)
        self._gangs[key] = WaitingGang(id, uids, tuple(uids[number] for number in order), needed, first)
        self.of_gang[id] = key
        self.arrivals += len(waiting)
        for entry in waiting:
            entry.stage, entry.id, entry.reasons = "gang", id, ()
            self._freshen(entry)
        self._tell(JobSubmitted(job=Job(id, spec, "pending", since, now_ms)))

    def _dissolve(self, key: GroupKey) -> None:
        gang = self._gangs.pop(key, None)
        if gang is None:
            return
        self.of_gang.pop(gang.id, None)
        self._tell(JobWithdrawn(job=gang.id, reason="the pods of the gang have changed"))
        for uid in gang.uids:
            entry = self.entries.get(uid)
            if entry is not None and entry.stage == "gang":
                entry.stage, entry.id = "aside", 0

    def _submit(self, entry: Entry) -> None:
        id, now_ms = next(self._ids), self._now_ms()
        entry.stage, entry.id = "queued", id
        self.arrivals += 1
        self.by_job[id] = entry
        since = self._since(entry.pod.metadata.creation_timestamp)
        self._tell(JobSubmitted(job=Job(id, entry.wanted.job, "pending", since, now_ms)))

    def _restore(self, entry: Entry, *, again: bool = False) -> None:
        """Report a bound pod as a running job. `again`: its usage so far is already counted."""
        job, run = self._running_job(entry, again=again)
        self._tell(JobRestored(job=job, runs=(run,)))
        self._leave(entry)

    def _running_job(self, entry: Entry, *, placed_ms: int = 0, again: bool = False) -> tuple[Job, Run]:
        """A new job for a pod with a node: bound, or placed with its gang at `placed_ms`."""
        id = next(self._ids)
        entry.id, entry.run = id, run_id(id, 0, 1)
        entry.stage = "placed" if placed_ms else "bound"
        self._takes_room(entry)
        self.look_again(entry)
        created = self._since(entry.pod.metadata.creation_timestamp)
        since = placed_ms or (self._since(entry.pod.status.start_time) if entry.pod.status.start_time else created)
        run = Run(
            entry.run, id, "pod", 0, 1, entry.node, BACKEND, "placed" if placed_ms else "running",
            self._now_ms() if again else since, started_ms=0 if placed_ms else since,
        )  # fmt: skip
        job = Job(
            id, entry.wanted.job, "scheduled" if placed_ms else "running", created, since,
            attempt=1, first_attempt=1, scheduled_ms=since, nodes=entry.node,
        )  # fmt: skip
        return job, run

    def _since(self, stamp: str | None) -> int:
        """A time of the past. None is later than now, and none longer ago than counts for anything: what is used is
        counted hour by hour."""
        now_ms = self._now_ms()
        return max(now_ms - _LONGEST_PAST_MS, min(at_ms(stamp, now_ms), now_ms))

    def _takes_room(self, entry: Entry) -> None:
        self.by_job[entry.id] = entry
        self._on_node.setdefault(entry.node, {})[entry.uid] = None
        entry.seen = self._arrivals.count
        self._cache.budgets.watch(entry.id, entry.pod.metadata)

    def _leave(self, entry: Entry) -> None:
        if entry.pod.leaving and not entry.leaving:
            entry.leaving = True
            self.look_again(entry)
            self._tell(JobCancelled(job=entry.id, reason="the pod is being deleted"))

    def _let_go(self, entry: Entry, after: Pod | None = None) -> None:
        """The controller hears that it is over with what it held."""
        self._on_node.get(entry.node, {}).pop(entry.uid, None)
        self._cache.budgets.forget(entry.id)
        self.look_again(entry)
        done = after is not None and after.status.phase == "Succeeded"
        if not done and not entry.leaving:
            self._tell(JobCancelled(job=entry.id, reason="the pod is gone"))
        self._tell(RunObserved(run=entry.run, state="succeeded" if done else "stopped", at_ms=self._now_ms()))
        self.by_job.pop(entry.id, None)

    def _drop(self, entry: Entry, after: Pod | None) -> None:
        del self.entries[entry.uid]
        self.fresh.pop(entry.uid, None)
        self._unread.pop(entry.uid, None)
        self._on_node.get(entry.node, {}).pop(entry.uid, None)
        self.leave_group(entry)
        if entry.holds:
            self._let_go(entry, after)
        elif entry.stage == "queued":
            self._tell(JobCancelled(job=entry.id, reason="the pod is gone"))
            self.by_job.pop(entry.id, None)

    def _freshen(self, entry: Entry) -> None:
        self.fresh[entry.uid] = None
        self._untold = True

    def _tell(self, fact: Fact) -> None:
        self._facts.append(fact)

    # --------------------------------------------------------------------------------------------- acting

    def placed(self, orders: Iterable[Start], now_ms: int) -> list[Entry]:
        """The pods that the controller has found nodes for, to be bound. A gang's become jobs of their own."""
        out, gangs = [], dict[JobId, list[Start]]()
        for order in orders:
            if order.run.job in self.of_gang:
                gangs.setdefault(order.run.job, []).append(order)
                continue
            entry = self.by_job.get(order.run.job)
            if entry is not None:
                entry.stage, entry.node, entry.run = "placed", order.run.node, order.run.id
                self._takes_room(entry)
                self.look_again(entry)
                out.append(entry)
        for id, members in gangs.items():
            out += self._gang_placed(id, members, now_ms)
        return out

    def _gang_placed(self, id: JobId, orders: list[Start], now_ms: int) -> list[Entry]:
        key = self.of_gang.pop(id)
        gang = self._gangs.pop(key)
        self._dirty[key] = None  # members without a node stay pending
        for uid in gang.uids:
            entry = self.entries.get(uid)
            if entry is not None and entry.stage == "gang":
                entry.stage, entry.id = "aside", 0
        out, members = [], []
        for order in orders:
            entry = self.entries.get(gang.order[order.run.member])
            if entry is not None:
                entry.node = order.run.node
                members.append(self._running_job(entry, placed_ms=now_ms))
                out.append(entry)
        self._tell(GangSplit(job=id, at_ms=now_ms, members=tuple(members)))
        for entry in out:
            self._leave(entry)
        return out

    def bound(self, uid: str, run: RunId) -> None:
        entry = self.entries.get(uid)
        if entry is not None and entry.run == run and entry.stage == "placed":
            entry.stage = "bound"
            self.touch(entry)

    def not_bound(self, uid: str, run: RunId, reason: str, *, gone: bool = False) -> None:
        """The cluster would not have it: its room is free again, and it waits for another try unless it is `gone`."""
        entry = self.entries.get(uid)
        if entry is None or entry.run != run or entry.stage not in ("placed", "aside"):
            return
        if gone or entry.stage == "aside":
            self._drop(entry, None)
            if not gone:  # its node has gone meanwhile, and its room with it
                self._wants_node(uid, entry.pod)
            return
        self._on_node.get(entry.node, {}).pop(uid, None)
        self._cache.budgets.forget(entry.id)
        entry.stage, entry.node = "queued", ""
        if has_claims(entry.pod):  # what it found may be gone
            self._unread[uid], self._read_at = None, -1
        self._tell(
            RunObserved(run=run, state="failed", at_ms=self._now_ms(), reason_code=START_FAILED, reason=reason)
        )  # fmt: skip

    def crowded(self, entry: Entry) -> str:
        """What is not there any more for a pod that is to be bound, because others came to its node; "" if all is."""
        if not self._arrivals.since(entry.node, entry.seen) or entry.node not in self.nodes:
            return ""
        there = (self.entries[uid].wanted.request for uid in self._on_node.get(entry.node, ()))
        return lacking(self.nodes[entry.node], entry.wanted.request, there)

    def of_job(self, id: JobId) -> list[Entry]:
        """The pods that a job stands for; none if it is over."""
        key = self.of_gang.get(id)
        if key is not None:
            return [self.entries[uid] for uid in self._gangs[key].uids if uid in self.entries]
        entry = self.by_job.get(id)
        return [entry] if entry is not None else []

    def name_of(self, id: JobId) -> str:
        """A job as people know it; "" if it is over."""
        entries = self.of_job(id)
        if not entries:
            return ""
        return f"pod {entries[0].name}" + (f" and {len(entries) - 1} more" if len(entries) > 1 else "")

    def give(self, facts: Iterable[Fact]) -> None:
        """Facts of others for the next step."""
        self._facts += facts

    def node(self, name: NodeName) -> KubeNode | None:
        return self.nodes.get(name)

    def find(self, namespace: str, name: str) -> Entry | None:
        for entry in self.entries.values():
            if entry.pod.metadata.name == name and entry.pod.metadata.namespace == namespace:
                return entry
        return None
