"""An independent check of facts and effects with its own records; its messages state the invariants.

It uses no code of the engine or the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from hodei.model.effects import Act, Forget, Save, SaveEvent, SaveJob, SaveOverrides, SaveRun, Start, Stop
from hodei.model.facts import Fact, JobRequeued, JobSubmitted, NodeJoined, NodeLost, NodeOverridden
from hodei.model.job import Job, Run
from hodei.model.node import Node, NodeOverrides, Taint
from property import reference_rules as naive

LIVE = ("placed", "running")
ENDED_JOB = ("succeeded", "failed", "cancelled")
FORWARD = {"placed": 0, "running": 1, "succeeded": 2, "failed": 2, "stopped": 2, "lost": 2}


class Overrides:
    """The overrides of one node by operators."""

    def __init__(self) -> None:
        self.cordoned = False
        self.labels: dict[str, str | None] = {}
        self.taints: dict[tuple[str, str], Taint | None] = {}

    def apply(self, fact: NodeOverridden) -> None:
        if fact.cordon is not None:
            self.cordoned = fact.cordon
        if fact.drain:
            self.cordoned = True
        self.labels |= fact.labels
        for taint in fact.remove_taints:
            self.taints[taint.key, taint.effect] = None
        for taint in fact.add_taints:
            self.taints[taint.key, taint.effect] = taint

    def applied_to(self, node: Node) -> Node:
        labels = {**node.labels, **self.labels}
        taints = {(taint.key, taint.effect): taint for taint in node.taints} | self.taints
        return structs.replace(
            node,
            cordoned=node.cordoned or self.cordoned,
            labels={key: value for key, value in labels.items() if value is not None},
            taints=tuple(taint for taint in taints.values() if taint is not None),
        )


class Auditor:
    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.runs: dict[str, Run] = {}
        self.saved_overrides: dict[str, NodeOverrides] = {}
        self.offered: dict[str, Node] = {}
        self.overrides: dict[str, Overrides] = {}
        self.ends: dict[int, int] = {}
        self.last_event = 0

    def nodes(self) -> list[Node]:
        return [self.overrides.get(name, Overrides()).applied_to(self.offered[name]) for name in sorted(self.offered)]

    def live(self) -> list[Run]:
        return [run for run in self.runs.values() if run.state in LIVE]

    def used(self) -> dict[str, dict[str, int]]:
        used: dict[str, dict[str, int]] = {name: {} for name in self.offered}
        for run in self.live():
            request = naive.members(self.jobs[run.job].spec)[run.member].request
            on_node = used.setdefault(run.node, {})
            for name, amount in request.items():
                on_node[name] = on_node.get(name, 0) + amount
        return used

    def attempt(self, job: int) -> list[Run]:
        return sorted(
            (run for run in self.runs.values() if run.job == job and run.attempt >= self.jobs[job].first_attempt),
            key=lambda run: (run.attempt, run.member),
        )

    def restarted(self) -> None:
        """The nodes have to join again; everything else is in the store."""
        self.offered = {}

    def step(self, facts: Sequence[Fact], saves: Sequence[Save], acts: Sequence[Act]) -> None:
        self._read_facts(facts)
        requeued = {fact.job for fact in facts if isinstance(fact, JobRequeued)}
        jobs = {save.job.id: save for save in saves if isinstance(save, SaveJob)}
        runs = {save.run.id: save for save in saves if isinstance(save, SaveRun)}
        before = dict(self.runs)
        for save in runs.values():
            self._run(save)
        for save in jobs.values():
            self._job(save, requeued)
        for save in saves:
            if isinstance(save, SaveOverrides):
                self.saved_overrides[save.overrides.node] = save.overrides
            elif isinstance(save, SaveEvent):
                assert save.event.seq == self.last_event + 1, f"event {save.event.seq} follows {self.last_event}"
                self.last_event = save.event.seq
        started = {save.run.id: save.run for save in runs.values() if save.new}
        self._starts(started, acts)
        self._gangs(started, before)
        self._rules(started)
        self._one_attempt()

    def _read_facts(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            if isinstance(fact, NodeJoined):
                self.offered[fact.node.name] = fact.node
            elif isinstance(fact, NodeLost):
                self.offered.pop(fact.node, None)
            elif isinstance(fact, NodeOverridden):
                self.overrides.setdefault(fact.node, Overrides()).apply(fact)
            elif isinstance(fact, JobSubmitted):
                assert fact.job.id not in self.jobs

    def _run(self, save: SaveRun) -> None:
        run, old = save.run, self.runs.get(save.run.id)
        assert save.new == (old is None), f"run {run.id} is saved as {'new' if save.new else 'known'}"
        if old is not None:
            forward = FORWARD[run.state] > FORWARD[old.state] or run.state == old.state
            assert forward, f"run {run.id} goes back from {old.state} to {run.state}"
            assert (run.node, run.backend, run.attempt) == (old.node, old.backend, old.attempt), f"run {run.id} moved"
        self.runs[run.id] = run

    def _job(self, save: SaveJob, requeued: set[int]) -> None:
        job, old = save.job, self.jobs.get(save.job.id)
        assert save.new == (old is None), f"job {job.id} is saved as {'new' if save.new else 'known'}"
        if old is not None:
            assert job.version > old.version, f"the version of job {job.id} does not count up"
            assert job.attempt in (old.attempt, old.attempt + 1), f"job {job.id} skips an attempt"
            if old.state in ENDED_JOB:
                assert job.id in requeued, f"job {job.id} had {old.state} and is {job.state} without a requeue"
        self.jobs[job.id] = job
        if job.state in ENDED_JOB:
            alive = [run.id for run in self.live() if run.job == job.id]
            assert not alive, f"job {job.id} has {job.state} while {alive} are live"
            assert job.finished_ms, f"job {job.id} has ended without an end time"

    def _starts(self, started: Mapping[str, Run], acts: Sequence[Act]) -> None:
        ordered = [act for act in acts if isinstance(act, Start)]
        assert len(ordered) == len(started), "starts and newly saved runs differ in number"
        for act in ordered:
            saved = started.get(act.run.id)
            assert saved == act.run, f"start of {act.run.id}, which is not saved like that"
            assert saved.state == "placed", f"start of {act.run.id}, which is {saved.state}"
            assert act.spec == self.jobs[act.run.job].spec
            assert act.task == naive.members(act.spec)[act.run.member], f"{act.run.id} is started as another task"
        for act in acts:
            if isinstance(act, Stop):
                assert self.runs[act.run].stop_reason, f"stop of {act.run} without a saved stop reason"
                assert self.runs[act.run].backend == act.backend
            elif isinstance(act, Forget):
                assert self.runs[act.run].state not in LIVE, f"{act.run} is forgotten while it is live"

    def _gangs(self, started: Mapping[str, Run], before: Mapping[str, Run]) -> None:
        for id in {run.job for run in started.values()}:
            members, job = [run for run in started.values() if run.job == id], self.jobs[id]
            assert {run.attempt for run in members} == {job.attempt}, f"job {id} started two attempts at once"
            assert not [run for run in before.values() if run.job == id and run.attempt == job.attempt]
            if job.attempt == job.first_attempt:
                assert job.state == "scheduled", f"job {id} was started and is {job.state}"
                first = 0
                for task in job.spec.tasks:
                    numbers = sorted(run.member for run in members if first <= run.member < first + task.count)
                    assert numbers == list(range(first, first + len(numbers))), f"job {id} started with gaps"
                    assert len(numbers) >= task.needed, f"job {id} started below its minimum"
                    first += task.count
                assert sorted(run.rank for run in members) == list(range(len(members))), f"job {id} has ranks with gaps"
            else:
                assert job.state in ("scheduled", "running"), f"members joined job {id}, which is {job.state}"
                assert job.spec.gang.elastic or job.spec.gang.on_failure == "repair", f"members joined job {id}"

    def _rules(self, started: Mapping[str, Run]) -> None:
        nodes, used = {node.name: node for node in self.nodes()}, self.used()
        for run in started.values():
            spec = self.jobs[run.job].spec
            task = naive.members(spec)[run.member]
            node = nodes.get(run.node)
            assert node is not None, f"{run.id} was put on {run.node}, which is unknown"
            assert run.backend == node.backend
            broken = naive.refusals(spec, task, node)
            assert not broken, f"{run.id} was put on {run.node} against {broken}"
            for name, amount in task.request.items():
                if amount:
                    assert used[run.node][name] <= node.capacity.get(name, 0), f"{run.node} is over-committed in {name}"

    def _one_attempt(self) -> None:
        members: dict[int, list[int]] = {}
        for run in self.live():
            members.setdefault(run.job, []).append(run.member)
            assert run.attempt >= self.jobs[run.job].first_attempt, f"{run.id} is left from an attempt that is over"
        for job, numbers in members.items():
            assert len(numbers) == len(set(numbers)), f"a member of job {job} runs twice: {numbers}"
            ranks = [run.rank for run in self.live() if run.job == job]
            assert len(ranks) == len(set(ranks)), f"two members of job {job} have one rank: {ranks}"
            assert self.jobs[job].state in ("scheduled", "running"), (
                f"job {job} is {self.jobs[job].state} with live runs"
            )
