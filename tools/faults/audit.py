"""Checks the invariants after every step. The auditor reads what was committed and what the backends really run, and keeps
its own account of jobs, runs and capacity; the controller's state is only compared with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hodei.control.controller import Controller, Step
from hodei.model.capacity import NodeOrder
from hodei.model.effects import (
    Act,
    Forget,
    ReleaseNodes,
    SaveEvent,
    SaveJob,
    SaveNodeOrder,
    SaveRun,
    Start,
    Stop,
    WantNodes,
)
from hodei.model.facts import Fact, JobRequeued, JobSubmitted, NodeJoined, NodeLost, NodeOverridden
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import JOB_ENDED, RUN_ENDED, RUN_TRANSITIONS, Job, Run
from hodei.model.node import Grant, Node
from hodei.model.resources import Resources
from hodei.ports import Store
from tools.faults import rules
from tools.faults.backend import Entry, FakeBackend
from tools.faults.rules import Overrides
from tools.faults.setup import InvariantViolated


def require(holds: object, what: str) -> None:
    if not holds:
        raise InvariantViolated(what)


class Auditor:
    def __init__(self, *, reserves_starts: bool) -> None:
        self.jobs: dict[JobId, Job] = {}
        self.live: dict[RunId, Run] = {}
        self.ended: dict[RunId, Run] = {}
        self.offered: dict[NodeName, Node] = {}
        self.overrides: dict[NodeName, Overrides] = {}
        self.node_orders: dict[NodeName, NodeOrder] = {}
        self.last_event = 0
        self._reserves_starts = reserves_starts
        self._reserved: dict[JobId, int] = {}

    def committed(self, facts: Sequence[Fact], step: Step, now_ms: int) -> None:
        self._note_facts(facts)
        started = self._read(facts, step)
        self._orders(started, step.acts, {fact.node for fact in facts if isinstance(fact, NodeLost)})
        self._gangs(started)
        self._places(started)
        self._check_reservations(started, now_ms)

    def _note_facts(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            if isinstance(fact, NodeJoined):
                self.offered[fact.node.name] = fact.node
            elif isinstance(fact, NodeLost):
                self.offered.pop(fact.node, None)
            elif isinstance(fact, NodeOverridden):
                self.overrides.setdefault(fact.node, Overrides()).apply(fact)
            elif isinstance(fact, JobSubmitted):
                require(fact.job.id not in self.jobs, f"job {fact.job.id} is submitted twice")

    def _read(self, facts: Sequence[Fact], step: Step) -> list[Run]:
        again = {fact.job for fact in facts if isinstance(fact, JobRequeued)}
        started = []
        for save in step.saves:
            if isinstance(save, SaveRun):
                self._run(save)
                if save.new:
                    started.append(save.run)
        for save in step.saves:
            if isinstance(save, SaveJob):
                self._job(save, again)
            elif isinstance(save, SaveNodeOrder):
                self.node_orders.pop(save.order.name, None)
                if not save.deleted:
                    self.node_orders[save.order.name] = save.order
            elif isinstance(save, SaveEvent):
                require(save.event.seq == self.last_event + 1, f"event {save.event.seq} follows {self.last_event}")
                self.last_event = save.event.seq
        for fact in facts:
            if isinstance(fact, JobSubmitted):
                require(fact.job.id in self.jobs, f"job {fact.job.id} was submitted and is not stored")
        return started

    def _run(self, save: SaveRun) -> None:
        run = save.run
        old = self.live.get(run.id) or self.ended.get(run.id)
        require(save.new == (old is None), f"run {run.id} is saved as {'new' if save.new else 'known'}")
        if old is not None:
            require(
                run.state == old.state or run.state in RUN_TRANSITIONS[old.state],
                f"run {run.id}: {old.state} to {run.state}",
            )
            same = (run.node, run.backend, run.attempt, run.member, run.grant)
            require(same == (old.node, old.backend, old.attempt, old.member, old.grant), f"run {run.id} has moved")
        self.live.pop(run.id, None)
        (self.ended if run.state in RUN_ENDED else self.live)[run.id] = run

    def _job(self, save: SaveJob, again: set[JobId]) -> None:
        job, old = save.job, self.jobs.get(save.job.id)
        require(save.new == (old is None), f"job {job.id} is saved as {'new' if save.new else 'known'}")
        if old is not None:
            require(job.version > old.version, f"job {job.id}: version {job.version} after {old.version}")
            require(
                old.attempt <= job.attempt <= old.attempt + 2,
                f"job {job.id}: attempt {job.attempt} after {old.attempt}",
            )
            if old.state in JOB_ENDED:
                require(job.id in again, f"job {job.id} had {old.state} and is {job.state} without a request")
        self.jobs[job.id] = job
        if job.state in JOB_ENDED:
            alive = [run.id for run in self.live.values() if run.job == job.id]
            require(not alive, f"job {job.id} has {job.state} and {alive} still run")

    def _orders(self, started: Iterable[Run], acts: Sequence[Act], lost: set[NodeName]) -> None:
        ordered = {act.run.id: act for act in acts if isinstance(act, Start)}
        require(len(ordered) == sum(isinstance(act, Start) for act in acts), "a run is ordered twice in one step")
        for run in started:
            require(
                run.id in ordered and ordered[run.id].run == run, f"run {run.id} is placed and not ordered like that"
            )
        for act in acts:
            if isinstance(act, Start):
                require(act.run.id in self.live, f"run {act.run.id} is ordered and not stored as live")
                require(act.task == act.spec.task_of(act.run.member), f"run {act.run.id} is started as another task")
            elif isinstance(act, Stop):
                stopped = self.live.get(act.run) or self.ended.get(act.run)
                require(stopped is not None and stopped.stop_reason, f"run {act.run} is stopped and that is not stored")
            elif isinstance(act, Forget):
                require(act.run not in self.live, f"run {act.run} is forgotten alive")
            elif isinstance(act, WantNodes):
                for name in set(act.nodes) - lost:  # if it starts after all, it is adopted and released
                    order = self.node_orders.get(name)
                    require(order and order.phase == "starting", f"{name} is ordered and that is not stored: {order}")
            elif isinstance(act, ReleaseNodes):
                for name in act.nodes:
                    here = [run.id for run in self.live.values() if run.node == name]
                    require(not here, f"{name} is released and {here} are live on it")

    def _gangs(self, started: Sequence[Run]) -> None:
        for id in sorted({run.job for run in started}):
            job = self.jobs[id]
            first = [run for run in started if run.job == id and run.attempt == job.first_attempt]
            joined = [run for run in started if run.job == id and run.attempt > job.first_attempt]
            if first:
                require(job.state == "scheduled", f"job {id} was started and is {job.state}")
                for task in job.spec.tasks:
                    placed = sum(run.task == task.name for run in first)
                    require(
                        placed >= task.needed, f"a partial gang: job {id} has {placed} of {task.needed} of {task.name}"
                    )
                ranks = sorted(run.rank for run in first)
                require(ranks == list(range(len(first))), f"job {id} has the ranks {ranks}")
            if joined:
                gang = job.spec.gang
                require(job.state in ("scheduled", "running"), f"members joined job {id}, which is {job.state}")
                require(gang.elastic or gang.on_failure == "repair", f"members joined job {id}, which wants none")
            require(len(first) + len(joined) == sum(run.job == id for run in started), f"job {id} starts what is over")
            self._one_place(job)
        members = Counter((run.job, run.member) for run in self.live.values())
        for (id, member), times in members.items():
            require(times == 1, f"member {member} of job {id} has {times} live runs")
        for run in self.live.values():
            job = self.jobs[run.job]
            require(job.state in ("scheduled", "running"), f"job {job.id} is {job.state} and {run.id} is live")
            require(run.attempt >= job.first_attempt, f"{run.id} is live and its attempt is over")

    def _one_place(self, job: Job) -> None:
        gang = job.spec.gang
        if gang.topology and gang.topology_required:
            nodes = {run.node for run in self.live.values() if run.job == job.id} & self.offered.keys()
            values = {self.offered[node].labels.get(gang.topology) for node in nodes}
            require(len(values) <= 1, f"job {job.id} is to be in one {gang.topology} and is in {len(values)}")

    def _places(self, started: Sequence[Run]) -> None:
        for run in started:
            node, spec = self.offered.get(run.node), self.jobs[run.job].spec
            require(node is not None, f"{run.id} was put on {run.node}, which does not exist")
            assert node is not None
            task = spec.task_of(run.member)
            broken = rules.refusals(spec, task, node, self.overrides.get(node.name, Overrides()))
            require(not broken, f"{run.id} was put on {run.node}: {', '.join(broken)}")
            order = self.node_orders.get(run.node)
            require(order is None or order.phase == "ready", f"{run.id} was put on {run.node}, which is {order}")
            require(not (text := rules.wrong_grant(task, run.grant)), f"{run.id}: {text}")

    def _check_reservations(self, started: Sequence[Run], now_ms: int) -> None:
        for run in started:
            reserved_ms = self._reserved.pop(run.job, None)
            require(
                reserved_ms is None or now_ms <= reserved_ms,
                f"a start reservation is broken: job {run.job} starts at {now_ms}, reserved was {reserved_ms}",
            )

    def compare(self, controller: Controller, store: Store) -> None:
        """The controller's state against the store, against this account, and against itself."""
        cluster = controller.cluster
        for id, job in self.jobs.items():
            stored = store.job(id)
            require(stored is not None, f"job {id} was acknowledged and is lost")
            assert stored is not None
            require(
                (stored.version, stored.state) == (job.version, job.state),
                f"job {id} is not stored as it was committed",
            )
            known = cluster.jobs.get(id)
            if job.state in JOB_ENDED:
                require(known is None, f"job {id} has {job.state} and is still known")
            else:
                require(known == job, f"the controller knows another job {id} than the store")
        stored_orders = {order.name: order for order in store.node_orders()}
        require(cluster.node_orders == self.node_orders, "the controller has other node orders than were committed")
        require(stored_orders == self.node_orders, "node orders are not stored as they were committed")
        live = {run.id: run for runs in cluster.runs.values() for run in runs.values() if run.state not in RUN_ENDED}
        require(live == self.live, f"live runs differ: {sorted(live.keys() ^ self.live.keys())}")
        self._check_queues(controller)
        self._check_capacity(controller)
        if self._reserves_starts:
            for id, start_reservation in cluster.availability.start_reservations.items():
                self._reserved[id] = min(start_reservation.start_ms, self._reserved.get(id, start_reservation.start_ms))

    def _check_queues(self, controller: Controller) -> None:
        """Every pending job is in one queue, or has a hold."""
        waiting = Counter(id for queue in controller.queues.values() for id in queue.gangs)
        waiting.update(id for id, hold in controller.preemption.holds.items() if not hold.gang.is_joining)
        pending = {id for id, job in self.jobs.items() if job.state == "pending"}
        require(
            waiting.keys() == pending, f"pending and in no queue, or the reverse: {sorted(waiting.keys() ^ pending)}"
        )
        require(all(times == 1 for times in waiting.values()), f"in two queues: {waiting}")

    def _check_capacity(self, controller: Controller) -> None:
        table = controller.cluster.table
        requests: dict[NodeName, list[Resources]] = {}
        grants: dict[NodeName, Counter[Grant]] = {}

        def hold(node: NodeName, request: Resources, grant: Grant | None) -> None:
            requests.setdefault(node, []).append(request)
            if grant is not None:
                grants.setdefault(node, Counter())[grant] += 1

        for run in self.live.values():
            hold(run.node, self.jobs[run.job].spec.task_of(run.member).request, run.grant)
        places = [place for held in controller.preemption.holds.values() for place in held.places]
        places += [place for kept in controller.relocation.held.values() for place in kept]
        for place in (*places, *(place for repair in controller.gangs.repairs.values() for place in repair.kept)):
            hold(place.node, place.member.task.request, place.grant)
        table.settle()
        for row, name in enumerate(table.names):
            here = requests.get(name, [])
            used = rules.total(here)
            require(table.usage(row) == used, f"{name}: {table.usage(row)} in the table, {used} by the account")
            require(
                table.node_usage[row].runs == len(here),
                f"{name}: {table.node_usage[row].runs} runs in the table, {len(here)}",
            )
            mine = table.node_usage[row].grants
            require(
                mine == grants.get(name, {}), f"{name}: {mine} given in the table, {grants.get(name)} by the account"
            )

    def check_backends(self, backends: Mapping[str, FakeBackend]) -> None:
        """What the backends really run."""
        running: dict[NodeName, dict[RunId, Entry]] = {}
        members: Counter[tuple[JobId, int]] = Counter()
        for backend in backends.values():
            for id, entry in backend.journal.items():
                if entry.state == "running":
                    running.setdefault(entry.run.node, {})[id] = entry
                    members[entry.run.job, entry.run.member] += 1
        for (job, member), times in members.items():
            require(times == 1, f"member {member} of job {job} runs {times} times at once")
        for name, node in self.offered.items():
            here = {id: (entry.task.request, entry.run.grant) for id, entry in running.get(name, {}).items()}
            for run in self.live.values():
                if run.node == name:
                    here[run.id] = (self.jobs[run.job].spec.task_of(run.member).request, run.grant)
            text = rules.overcommitted(node, [request for request, _ in here.values()])
            text = text or rules.granted_twice(node, [grant for _, grant in here.values()])
            require(not text, f"{name} is over-committed in {text} by {sorted(here)}")

    def restarted(self) -> None:
        """After a restart nodes join again; everything else is in the store."""
        self.offered = {}
