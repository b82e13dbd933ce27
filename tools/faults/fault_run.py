"""One run: faults with checks after every step, then a quiet phase in which every job must end."""

from __future__ import annotations

from collections import deque
from random import Random

from msgspec import structs

from hodei.control.capacity.planner import plan_capacity
from hodei.control.clone import clone_controller
from hodei.control.controller import Controller
from hodei.model.facts import (
    CapacityPlanned,
    Fact,
    JobCancelled,
    JobCheckpointRequested,
    JobHeld,
    JobMigrated,
    JobReleased,
    JobRequeued,
    JobSubmitted,
    JobSuspended,
    NodeOverridden,
    RunObserved,
)
from hodei.model.job import JOB_ENDED, Job
from hodei.store.memory import MemoryStore
from tools.faults import cloud, rules
from tools.faults.audit import Auditor, require
from tools.faults.backend import NEVER, FakeBackend
from tools.faults.cloud import CloudBackend
from tools.faults.server import Crashed, Server
from tools.faults.setup import TAINTS, Chance, InvariantViolated, draw_duration_ms, draw_setup, draw_spec

BEGIN_MS = 1_700_000_000_000
_RECENT = 20
_MAX_QUIET_STEPS = 600


class FaultRun:
    """`step` counts the steps; `recent` has the last facts and acts, for the report of a failure. `elastic`: one more backend
    has nodes that are ordered and released."""

    def __init__(self, seed: int, *, elastic: bool = False) -> None:
        rng = self._rng = Random(seed)
        self.seed, self.now_ms, self.step = seed, BEGIN_MS, 0
        self.recent: deque[tuple[int, int, object]] = deque(maxlen=_RECENT)
        setup = self.setup = draw_setup(rng)
        self._chance = Chance(rng, setup.odds)
        by_backend = {
            name: [n for n in setup.nodes if n.backend == name] for name in sorted({n.backend for n in setup.nodes})
        }
        self.backends = {
            name: FakeBackend(name, nodes, self._chance, lambda spec: draw_duration_ms(rng, spec, setup.calm))
            for name, nodes in by_backend.items()
        }
        self._planned_ms = BEGIN_MS
        if elastic and not setup.calm:
            own = Random(f"{seed} elastic")
            setup.cloud = cloud.draw_nodes(own)
            setup.odds |= {fault: odds for fault, odds in cloud.FAULTS.items() if own.random() < 0.6}
            self.backends[cloud.CLOUD] = CloudBackend(
                setup.cloud, self._chance, lambda spec: draw_duration_ms(rng, spec, setup.calm)
            )
        self.auditor = Auditor(reserves_starts=setup.calm)
        self.server = Server(setup, MemoryStore(), self.backends, self._chance)
        self._to_come = setup.jobs
        self._next_arrival_ms = BEGIN_MS

    def run(self) -> None:
        """Raises InvariantViolated."""
        while self._to_come or self._rng.random() < 0.9:
            self._tick()
        self._settle()

    def _tick(self) -> None:
        self._move_clock()
        for backend in self.backends.values():
            backend.advance(self.now_ms)
            self._break(backend)
        try:
            if not self._chance.over:
                self._act_as_users()
            self._plan_capacity()
            self._serve()
        except Crashed as crash:
            self._note(f"the server crashed: {crash}")
            self._restart()

    def _plan_capacity(self) -> None:
        """The plan of a server is made beside it, so it is applied later and may be outdated by then."""
        controller = self.server.controller
        if self.setup.cloud and self.now_ms >= self._planned_ms + cloud.INTERVAL_MS:
            self._planned_ms = self.now_ms
            plan = plan_capacity(clone_controller(controller), self.now_ms)
            if not controller.scaling.is_known(plan):
                self._send([CapacityPlanned(plan)])

    def _serve(self) -> None:
        server = self.server
        for link in server.links.values():
            server.inbox += link.poll(server.controller, self.now_ms)
        self._decide()
        for link in server.links.values():
            server.inbox += link.send_orders(self.now_ms)
        self.auditor.check_backends(self.backends)
        if self._chance("crash between act and observation"):
            raise Crashed("between act and observation")

    def _decide(self) -> None:
        server = self.server
        self.step += 1
        for fact in server.inbox:
            self._note(fact)
        facts, step = server.decide(self.now_ms)
        server.commit(step.saves)
        self.auditor.committed(facts, step, self.now_ms)
        self.auditor.compare(server.controller, server.store)
        if self._chance("crash between commit and act"):
            raise Crashed("between commit and act")
        for act in step.acts:
            self._note(act)
        server.send(step.acts)

    def _restart(self) -> None:
        old = self.server
        for backend in self.backends.values():
            backend.drop_messages()
        while True:
            self.server = Server(self.setup, MemoryStore(of=old.store), self.backends, self._chance)
            self.auditor.restarted()
            self.server.inbox = self.server.stored_facts()
            try:
                self._decide()
                return
            except Crashed as crash:
                self._note(f"the server crashed again: {crash}")

    def _move_clock(self) -> None:
        rng = self._rng
        if self._chance("clock jumps"):
            self.now_ms += rng.choice((60_000, 3_600_000))
            return
        due = [backend.next_ms() for backend in self.backends.values()]
        wake_ms = self.server.controller.next_wakeup_ms(self.now_ms)
        due.append(NEVER if wake_ms is None else wake_ms)
        due.append(self._next_arrival_ms if self._to_come else NEVER)
        if self.server.inbox or any(link.orders or not link.up for link in self.server.links.values()):
            due.append(self.now_ms + (0 if self.setup.calm else rng.randint(0, 500)))
        if self.setup.cloud and self._unfinished():
            due.append(self._planned_ms + cloud.INTERVAL_MS)
        self.now_ms = max(self.now_ms, min(min(due), self.now_ms + 60_000))
        if self._chance("step comes late"):
            self.now_ms += rng.randint(1, 5000)

    def _break(self, backend: FakeBackend) -> None:
        chance, rng = self._chance, self._rng
        if chance.over:
            return
        if backend.offered and chance("node lost"):
            name = rng.choice(list(backend.offered))
            backend.lose_node(name, self.now_ms)
            self._note(f"{name} is lost")
            if chance("node silently back"):
                backend.bring_back(name)
                self._note(f"{name} is back before the next poll")
        elif backend.lost_nodes and rng.random() < 0.2:
            backend.bring_back(rng.choice(list(backend.lost_nodes)))
        if backend.offered and chance("node unready"):
            name = rng.choice(list(backend.offered))
            node = backend.offered[name]
            backend.offered[name] = structs.replace(node, ready=not node.ready)
        if isinstance(backend, CloudBackend) and (on := backend.on) and chance("node is taken back"):
            name = rng.choice(on)
            backend.lose_node(name, self.now_ms)
            self._note(f"{name} is taken back")
        if not backend.reachable:
            backend.reachable = rng.random() < 0.3
        elif chance("backend away"):
            backend.reachable = False
            self._note(f"{backend.name} is unreachable")

    def _act_as_users(self) -> None:
        if self._to_come and self.now_ms >= self._next_arrival_ms:
            number = min(self._to_come, self._rng.choice((1, 1, 2, 4)))
            self._to_come -= number
            for _ in range(number):
                self._submit()
            self._next_arrival_ms = self.now_ms + self._rng.choice((0, 1000, 10_000))
        if self._chance("user"):
            self._send(self._user())
        if self._chance("operator"):
            self._send(self._operator())

    def _send(self, facts: list[Fact]) -> None:
        self.server.inbox += facts

    def _submit(self) -> None:
        server, now = self.server, self.now_ms
        server.last_job += 1
        spec = draw_spec(self._rng, self.setup)
        self._send([JobSubmitted(Job(server.last_job, spec, "pending", now, now, queued_ms=now))])

    def _user(self) -> list[Fact]:
        if not self.auditor.jobs:
            return []
        job = self._rng.choice(list(self.auditor.jobs.values()))
        what = self._rng.choice(("cancel", "hold", "release", "requeue", "suspend", "migrate", "save"))
        if what == "requeue" and job.state not in ("pending", "held"):
            return [JobRequeued(job.id, job if job.state in JOB_ENDED else None)]
        if what == "cancel" and job.state not in JOB_ENDED:
            return [JobCancelled(job.id)]
        if what == "hold" and job.state == "pending":
            return [JobHeld(job.id)]
        if what == "suspend" and job.state not in JOB_ENDED:
            return [JobSuspended(job.id)]
        if what == "migrate" and job.state == "running":
            return [JobMigrated(job.id, force=self._rng.random() < 0.3)]
        if what == "save":
            return [JobCheckpointRequested(job.id)]
        return [JobReleased(job.id)] if job.state == "held" or job.suspend_requested else []

    def _operator(self) -> list[Fact]:
        names = sorted(self.server.controller.cluster.nodes)
        if not names:
            return []
        name, taint = self._rng.choice(names), self._rng.choice(TAINTS)
        overrides = (
            NodeOverridden(name, cordon=True),
            NodeOverridden(name, cordon=False),
            NodeOverridden(name, drain=True),
            NodeOverridden(name, add_taints=(taint,)),
            NodeOverridden(name, remove_taints=(taint,)),
        )
        return [self._rng.choice(overrides)]

    def _note(self, what: object) -> None:
        self.recent.append((self.step, self.now_ms - BEGIN_MS, what))

    def _settle(self) -> None:
        """Faults are over: everything comes back, every job that can run ends, and no state is left."""
        self._chance.stop()
        self._note("the faults are over")
        for backend in self.backends.values():
            backend.end_faults(self.now_ms)
        self._undo_user_changes()
        for _ in range(_MAX_QUIET_STEPS):
            self._end_what_never_ends()
            self._tick()
            if self._is_quiet():
                unschedulable = self._unschedulable()
                if not unschedulable:
                    break
                self._send([JobCancelled(id, "it can never run here") for id in unschedulable])
        else:
            raise InvariantViolated(f"no end in {_MAX_QUIET_STEPS} quiet steps: {self._unfinished()}")
        self._check_nothing_left()

    def _undo_user_changes(self) -> None:
        for node in (*self.setup.nodes, *self.setup.cloud):
            self._send([NodeOverridden(node.name, cordon=False, remove_taints=TAINTS)])
        for job in self.auditor.jobs.values():
            if job.state == "held" or job.suspend_requested:
                self._send([JobReleased(job.id)])

    def _end_what_never_ends(self) -> None:
        for job in self.auditor.jobs.values():
            if job.spec.restart == "always" and job.state not in JOB_ENDED and not job.cancel_requested:
                self._send([JobCancelled(job.id, "it would run forever")])

    def _unfinished(self) -> list[str]:
        return [f"job {job.id} {job.state}" for job in self.auditor.jobs.values() if job.state not in JOB_ENDED]

    def _is_quiet(self) -> bool:
        """Nothing runs, no message is in flight, and no job waits for a time."""
        server, auditor = self.server, self.auditor
        if server.inbox or any(link.orders or not link.up for link in server.links.values()):
            return False
        if any(link.nodes_changed for link in server.links.values()):
            return False  # reconciled with a response from before the nodes came back
        if any(backend.next_ms() < NEVER for backend in self.backends.values()):
            return False
        if auditor.node_orders or self._may_order(server.controller):
            return False  # they are released when they are idle
        if auditor.live:
            unknown = [id for id, run in auditor.live.items() if id not in self.backends[run.backend].journal]
            raise InvariantViolated(
                f"nothing will ever happen to {sorted(auditor.live)}; their backends do not know {unknown}"
            )
        controller = server.controller
        wake_ms = controller.next_wakeup_ms(self.now_ms)
        if wake_ms is None:
            return True
        # Wake-ups that help no job are ignored.
        late = [
            job
            for job in auditor.jobs.values()
            if job.state == "pending" and (job.not_before_ms > self.now_ms or job.move)
        ]
        return not late and not controller.gangs.repairs and not controller.preemption.holds and wake_ms > self.now_ms

    def _may_order(self, controller: Controller) -> bool:
        """Whether pending jobs may get nodes: in the next plan, or when a group is tried again."""
        if not self.setup.cloud or not any(controller.pending().values()):
            return False
        if any(found.until_ms > self.now_ms for found in controller.scaling.set_aside.values()):
            return True
        return bool(plan_capacity(clone_controller(controller), self.now_ms).order)

    def _unschedulable(self) -> list[int]:
        """Pending jobs on the idle cluster. Raises InvariantViolated if one of them fits."""
        auditor = self.auditor
        waiting = [job for job in auditor.jobs.values() if job.state not in JOB_ENDED]
        nodes = list(auditor.offered.values())
        for job in waiting:
            require(job.state == "pending", f"job {job.id} is {job.state} forever, and none of its runs is live")
            by_number = any(task.binding or task.request.get("gpu") for task in job.spec.tasks)
            if by_number:
                fits = self.server.controller.gate.never_fits(job.spec) is None
            else:
                fits = rules.can_start(job.spec, nodes, auditor.overrides)
            require(not fits, f"job {job.id} waits forever although it fits: {job.reason_code} {job.reason}")
        return [job.id for job in waiting]

    def _check_nothing_left(self) -> None:
        controller, cluster = self.server.controller, self.server.controller.cluster
        for link in self.server.links.values():
            link.up = False
            facts = link.poll(controller, self.now_ms)
            strange = [fact for fact in facts if not isinstance(fact, RunObserved)]
            require(not strange, f"at the end {link.backend.name} still has observations: {strange}")
            link.send_orders(self.now_ms)
            require(not link.backend.journal, f"{link.backend.name} remembers {sorted(link.backend.journal)} forever")
            if isinstance(link.backend, CloudBackend):
                require(not link.backend.on, f"{link.backend.on} are on and nothing needs them")
        require(not cluster.node_orders, f"node orders are left: {sorted(cluster.node_orders)}")
        require(not self._unfinished(), f"not ended: {self._unfinished()}")
        require(
            not controller.relocation.held,
            f"capacity is held for {sorted(controller.relocation.held)}, which do not come",
        )
        require(not controller.preemption.holds, f"holds are left: {sorted(controller.preemption.holds)}")
        require(not controller.gangs.repairs, f"repairs are left: {sorted(controller.gangs.repairs)}")
        require(not controller.gangs.growing, f"gangs that would grow are left: {sorted(controller.gangs.growing)}")
        require(not any(controller.pending().values()), f"a job is still in a queue: {controller.pending()}")
        require(
            not cluster.availability.start_reservations,
            f"start reservations are left: {sorted(cluster.availability.start_reservations)}",
        )
        require(not cluster.jobs and not cluster.runs, f"still known: {sorted(cluster.jobs)} {sorted(cluster.runs)}")
        require(not any(cluster.on_node.values()), f"runs are left on nodes: {cluster.on_node}")
        table = cluster.table
        for row, name in enumerate(table.names):
            require(not table.usage(row), f"{name} is not released: {table.usage(row)}")
        acknowledged = len(self.auditor.jobs)
        counts = self.server.store.counts()
        require(
            sum(counts[state] for state in JOB_ENDED) == acknowledged, f"{acknowledged} jobs, and stored are {counts}"
        )
