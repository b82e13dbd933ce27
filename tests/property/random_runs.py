"""Drives a controller through random facts. Every choice is a number that is interpreted in the current state.

So any list of numbers is a valid run, and Hypothesis can shrink it. Starts and stops are reported on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import structs

from builders import NOW_MS, a_job
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller, Step
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.runs import START_FAILED
from hodei.engine.preemption.victims import Place
from hodei.model.facts import (
    Fact,
    JobCancelled,
    JobHeld,
    JobMigrated,
    JobReleased,
    JobRequeued,
    JobRestored,
    JobSubmitted,
    JobSuspended,
    NodeJoined,
    NodeLost,
    NodeOverridden,
    OverridesRestored,
    RunObserved,
)
from hodei.model.node import Node
from property import clusters
from property.auditor import LIVE, Auditor

pick = st.integers(0, 11)
events = st.one_of(
    st.tuples(st.just("submit"), clusters.specs()),
    st.tuples(st.just("submit"), clusters.specs()),
    st.tuples(st.just("submit"), clusters.specs()),
    st.tuples(st.just("join"), clusters.nodes()),
    st.tuples(
        st.sampled_from(("runs", "succeeds", "fails", "is lost", "does not start", "is refused", "stops", "repeats")),
        pick,
    ),
    st.tuples(st.sampled_from(("succeeds", "fails", "stops")), pick),
    st.tuples(st.sampled_from(("cancel", "hold", "release", "requeue", "suspend", "migrate", "force")), pick),
    st.tuples(st.sampled_from(("lose", "cordon", "uncordon", "taint", "untaint", "label", "unlabel", "drain")), pick),
    st.tuples(st.just("wait"), st.sampled_from((1, 1500, 40_000))),
)
restarts = st.tuples(st.just("restart"), st.just(0))
steps = st.lists(events, min_size=1, max_size=3)
crash = st.lists(restarts, min_size=1, max_size=1)
random_runs = st.tuples(
    clusters.clusters(), st.lists(st.one_of(steps, steps, steps, steps, crash), min_size=6, max_size=20)
)
runs_without_restarts = st.tuples(clusters.clusters(), st.lists(steps, min_size=3, max_size=15))


class RandomRun:
    """`between` is called after every step and must not change the state."""

    def __init__(
        self, between: Callable[[RandomRun], None] | None = None, *, max_tries: int = 5000, preemption: bool = False
    ) -> None:
        self.now_ms = NOW_MS
        self.max_tries = max_tries
        self.preemption = preemption
        self.auditor = Auditor()
        self.controller = self._new()
        self.encoded_steps: list[bytes] = []
        self.steps: list[Step] = []
        self.last: Step | None = None
        self._last_job = 0
        self._between = between

    def _new(self) -> Controller:
        return Controller(
            clusters.profiles(),
            admission=AdmissionPolicy("wait"),
            preemption=PreemptionPolicy(enabled=self.preemption),
            last_event=self.auditor.last_event,
            max_tries=self.max_tries,
        )

    def run(self, cluster: Sequence[Any], steps: Sequence[Sequence[tuple[str, Any]]]) -> RandomRun:
        self.step([NodeJoined(node) for node in cluster])
        for step in steps:
            if step[0][0] == "restart":
                self.restart()
                continue
            facts: list[Fact] = []
            for what, which in step:
                facts += self.facts(what, which)
            self.step(facts)
        return self

    def step(self, facts: Sequence[Fact]) -> Step:
        done = self.last = self.controller.step(self.now_ms, facts)
        self.steps.append(done)
        self.encoded_steps.append(msgspec.json.encode([done.plan, done.saves, done.acts]))
        self.auditor.step(facts, done.saves, done.acts)
        self._compare_usage()
        if self._between is not None:
            self._between(self)
        return done

    def restart(self) -> None:
        """A new controller restores the store; the nodes join again after that."""
        auditor, offered = self.auditor, list(self.auditor.offered.values())
        self.controller = self._new()
        auditor.restarted()
        active = [job for job in sorted(auditor.jobs.values(), key=lambda job: job.id) if not job.finished_ms]
        facts: list[Fact] = [OverridesRestored(one) for one in auditor.saved_overrides.values()]
        self.step(facts + [JobRestored(job, tuple(auditor.attempt(job.id))) for job in active])
        self.step([NodeJoined(node) for node in offered])

    def facts(self, what: str, which: Any) -> list[Fact]:
        auditor, now = self.auditor, self.now_ms
        if what == "submit":
            self._last_job += 1
            return [JobSubmitted(a_job(self._last_job, spec=which, at_ms=now, queued_ms=now))]
        if what == "join":
            return [NodeJoined(which)]
        if what == "wait":
            self.now_ms += which
            return []
        if what in ("cancel", "hold", "release", "requeue", "suspend", "migrate", "force"):
            return self._job_facts(what, which)
        if what in ("lose", "cordon", "uncordon", "taint", "untaint", "label", "unlabel", "drain"):
            return self._node_facts(what, clusters.NODE_NAMES[which % len(clusters.NODE_NAMES)], which)
        runs = sorted(run.id for run in auditor.runs.values() if (run.state in LIVE) == (what != "repeats"))
        if what == "stops":
            runs = [run for run in runs if auditor.runs[run].stop_reason] or runs
        if not runs:
            return []
        run = runs[which % len(runs)]
        reports: dict[str, RunObserved] = {
            "runs": RunObserved(run, "running", now),
            "succeeds": RunObserved(run, "succeeded", now, 0),
            "fails": RunObserved(run, "failed", now, 3),
            "is lost": RunObserved(run, "lost", now, reason_code="lost", reason="vanished"),
            "does not start": RunObserved(run, "failed", now, reason_code=START_FAILED, reason="timeout"),
            "is refused": RunObserved(run, "failed", now, reason_code=START_FAILED, reason="never", permanent=True),
            "stops": RunObserved(run, "stopped", now, 143, "killed"),
            "repeats": RunObserved(run, "succeeded", now, 0),
        }
        return [reports[what]]

    def _job_facts(self, what: str, which: int) -> list[Fact]:
        jobs = sorted(self.auditor.jobs)
        if not jobs:
            return []
        id = jobs[which % len(jobs)]
        if what == "requeue":
            job = self.auditor.jobs[id]
            return [JobRequeued(id, job if job.finished_ms else None)]
        commands: dict[str, Fact] = {
            "cancel": JobCancelled(id),
            "hold": JobHeld(id),
            "release": JobReleased(id),
            "suspend": JobSuspended(id),
            "migrate": JobMigrated(id),
            "force": JobMigrated(id, force=True),
        }
        return [commands[what]]

    def _node_facts(self, what: str, name: str, which: int) -> list[Fact]:
        if name not in self.auditor.offered:
            return []
        taint = clusters.TAINTS[which % len(clusters.TAINTS)]
        facts: dict[str, Fact] = {
            "lose": NodeLost(name, "unplugged"),
            "cordon": NodeOverridden(name, cordon=True),
            "uncordon": NodeOverridden(name, cordon=False),
            "taint": NodeOverridden(name, add_taints=(taint,)),
            "untaint": NodeOverridden(name, remove_taints=(taint,)),
            "label": NodeOverridden(name, labels={"disk": "ssd", "zone": "a"}),
            "unlabel": NodeOverridden(name, labels={"disk": None}),
            "drain": NodeOverridden(name, drain=True),
        }
        return [facts[what]]

    def held(self) -> list[Place]:
        """Capacity held for preemptors, for migrations and for repairs."""
        held = [place for hold in self.controller.preemption.holds.values() for place in hold.places]
        held += [place for places in self.controller.relocation.held.values() for place in places]
        held += [place for repair in self.controller.gangs.repairs.values() for place in repair.kept]
        return held

    def used(self) -> dict[str, dict[str, int]]:
        """By node and resource: what the saved runs use, and what is held."""
        used = self.auditor.used()
        for name, member, _ in self.held():
            on_node = used.setdefault(name, {})
            for resource, amount in member.task.request.items():
                on_node[resource] = on_node.get(resource, 0) + amount
        return used

    def _compare_usage(self) -> None:
        """The usage in the table equals the saved runs plus the held capacity."""
        table, used, held = self.controller.cluster.table, self.used(), self.held()
        for row, name in enumerate(table.names):
            expected = {resource: amount for resource, amount in used.get(name, {}).items() if amount}
            assert table.usage(row) == expected, (
                f"{name}: {table.usage(row)} in the table, {expected} by the saved runs"
            )
            assert table.runs[row] == sum(run.node == name for run in self.auditor.live()) + sum(
                place.node == name for place in held
            )
        assert table.names == sorted(self.auditor.offered)
        ours, theirs = ([_taints_in_order(node) for node in side] for side in (table.nodes, self.auditor.nodes()))
        assert ours == theirs, "the table and the auditor disagree about a node"


def _taints_in_order(node: Node) -> Node:
    """The order of taints has no meaning."""
    return structs.replace(node, taints=tuple(sorted(node.taints, key=str)))
