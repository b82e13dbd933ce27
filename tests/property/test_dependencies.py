"""Random dependency graphs and random events: no job starts before its dependencies, waits forever or fails too soon.

Whether a dependency is met is computed again here, from the history alone. The test reports as the backends.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from builders import NOW_MS, a_job, a_node
from hodei.control.clone import clone_controller
from hodei.control.controller import Controller
from hodei.model.dependency import Dependencies, Dependency, DependencyStatus
from hodei.model.effects import SaveJob, SaveRun, Start, Stop
from hodei.model.facts import DataAppeared, Fact, JobCancelled, JobRestored, JobSubmitted, NodeJoined, RunObserved
from hodei.model.job import JOB_ENDED, Job, Run
from hodei.plugins.registry import build_profile
from property.examples import examples

DATA = ("/data/a", "/data/b")


class GraphRun:
    """A controller, what it saved, and what was reported to it."""

    def __init__(self, cpu: int = 1_000_000) -> None:
        self.node = a_node("n1", cpu, "64Ti")
        self.controller = Controller({"default": build_profile("default")}, max_tries=100_000)
        self.now_ms = NOW_MS
        self.jobs: dict[int, Job] = {}
        self.runs: dict[str, Run] = {}
        self.live: list[str] = []
        self.saved: set[int] = set()
        self.appeared: set[str] = set()
        self.order: list[int] = []
        self.step([NodeJoined(self.node)])

    def step(self, facts: list[Fact]) -> None:
        self.now_ms += 1
        done = self.controller.step(self.now_ms, facts)
        for save in done.saves:
            if isinstance(save, SaveJob):
                self.jobs[save.job.id] = save.job
            elif isinstance(save, SaveRun):
                self.runs[save.run.id] = save.run
        stopped = []
        for act in done.acts:
            if isinstance(act, Start):
                self.live.append(act.run.id)
                self.order.append(act.run.job)
                assert self.met(act.run.job) >= self.jobs[act.run.job].spec.after.needed, f"{act.run.job} is too early"
            elif isinstance(act, Stop) and act.run in self.live:
                stopped.append(act.run)
        if stopped:
            self.live = [run for run in self.live if run not in stopped]
            self.step([RunObserved(run, "stopped", self.now_ms, 143) for run in stopped])

    def met(self, job: int) -> int:
        return sum(self.is_met(one) is True for one in self.jobs[job].spec.after.of)

    def is_met(self, one: Dependency) -> bool | None:
        if one.on == "exists":
            return True if one.what in self.appeared else None
        state = self.jobs[one.job].state
        if one.on == "checkpointed" and (one.job in self.saved or state == "succeeded"):
            return True
        if state not in JOB_ENDED:
            return None
        return one.on == "completed" or one.on == state

    def end(self, run: str, state: str) -> None:
        self.live.remove(run)
        self.step([RunObserved(run, state, self.now_ms, 0 if state == "succeeded" else 1)])

    def restart(self) -> None:
        """Like a server: jobs that have not ended are restored with the status of their dependencies."""
        self.controller = Controller({"default": build_profile("default")})
        dependency_statuses = {
            job.id: DependencyStatus(job.id, job.state, job.id in self.saved) for job in self.jobs.values()
        }
        facts: list[Fact] = []
        for id, job in sorted(self.jobs.items()):
            if job.state not in JOB_ENDED:
                statuses = tuple(dependency_statuses[one.job] for one in job.spec.after.of if one.job)
                runs = tuple(run for run in self.runs.values() if run.job == id)
                facts.append(JobRestored(job, runs, statuses))
        for fact in facts:
            self.step([fact])
        self.step([NodeJoined(self.node), *(DataAppeared(what) for what in sorted(self.appeared))])


@st.composite
def graphs(draw: Any) -> list[Dependencies]:
    size = draw(st.integers(1, 12))
    out = []
    for position in range(size):
        ons = st.sampled_from(["succeeded", "completed", "failed", "checkpointed"])
        of = {Dependency("exists", what=what) for what in draw(st.sets(st.sampled_from(DATA), max_size=1))}
        if position:
            pairs = st.tuples(ons, st.integers(1, position))
            of |= {Dependency(on, job=job) for on, job in draw(st.sets(pairs, max_size=4))}
        need = draw(st.integers(0, max(len(of) - 1, 0)))
        out.append(Dependencies(tuple(sorted(of, key=str)), need))
    return out


@examples(100)
@given(graphs(), st.integers(0, 2**32), st.booleans())
def test_no_dependent_job_starts_too_early_waits_forever_or_fails_too_soon(
    graph: list[Dependencies], seed: int, at_once: bool
) -> None:
    rng, graph_run = random.Random(seed), GraphRun()
    jobs = [a_job(id, at_ms=NOW_MS, queued_ms=NOW_MS, after=after) for id, after in enumerate(graph, 1)]
    graph_run.jobs = {job.id: job for job in jobs}
    facts: list[Fact] = [JobSubmitted(job) for job in jobs]
    if at_once:
        rng.shuffle(facts)
        graph_run.step(facts)
    else:
        for fact in facts:
            graph_run.step([fact])
    for _ in range(200):
        todo = ["restart", "clone"] if rng.random() < 0.1 else []
        todo += ["end"] * 3 * bool(graph_run.live) + ["save"] * bool(graph_run.live)
        todo += ["data"] * (len(graph_run.appeared) < len(DATA))
        waiting = [job.id for job in graph_run.jobs.values() if job.state == "pending"]
        todo += ["cancel"] if waiting and rng.random() < 0.1 else []
        if not todo:
            break
        match rng.choice(todo):
            case "end":
                graph_run.end(rng.choice(graph_run.live), rng.choice(["succeeded", "succeeded", "failed"]))
            case "save":
                run = rng.choice(graph_run.live)
                graph_run.saved.add(int(run.split(".")[0]))
                graph_run.step([RunObserved(run, "running", graph_run.now_ms, checkpoint_ms=graph_run.now_ms)])
            case "data":
                what = rng.choice([what for what in DATA if what not in graph_run.appeared])
                graph_run.appeared.add(what)
                graph_run.step([DataAppeared(what)])
            case "cancel":
                graph_run.step([JobCancelled(rng.choice(waiting))])
            case "restart":
                graph_run.restart()
            case "clone":
                graph_run.controller = clone_controller(graph_run.controller)
    assert not graph_run.live
    for job in graph_run.jobs.values():
        assert job.state in JOB_ENDED, f"job {job.id} waits forever: {job.reason}"
        if job.reason_code == "DEPENDENCY_NEVER_MET":
            lost = sum(graph_run.is_met(one) is False for one in job.spec.after.of)
            assert len(job.spec.after.of) - lost < job.spec.after.needed, f"job {job.id} failed too soon"
            assert job.reason
    assert len(graph_run.controller.dependencies) == 0
    assert not list(graph_run.controller.dependencies.data)


def test_ten_thousand_jobs_in_a_graph_run_in_the_right_order() -> None:
    seed = 20261116
    rng, size = random.Random(seed), 10_000
    graph_run = GraphRun()
    edges = 0
    jobs = []
    for id in range(1, size + 1):
        before = sorted({rng.randint(max(1, id - 500), id - 1) for _ in range(rng.randint(0, 4))}) if id > 1 else []
        edges += len(before)
        after = Dependencies(tuple(Dependency("succeeded", job=job) for job in before))
        jobs.append(a_job(id, at_ms=NOW_MS, queued_ms=NOW_MS, after=after))
    graph_run.jobs = {job.id: job for job in jobs}
    rng.shuffle(jobs)
    evaluated = _count_evaluations(graph_run)
    graph_run.step([JobSubmitted(job) for job in jobs])
    while graph_run.live:
        runs, graph_run.live = graph_run.live, []
        graph_run.step([RunObserved(run, "succeeded", graph_run.now_ms, 0) for run in runs])
    assert len(graph_run.order) == size, f"seed {seed}"
    position = {job: number for number, job in enumerate(graph_run.order)}
    for job in graph_run.jobs.values():
        assert all(position[one.job] < position[job.id] for one in job.spec.after.of), f"seed {seed}"
    # Each edge is evaluated once.
    assert sum(evaluated) == edges


def _count_evaluations(graph_run: GraphRun) -> list[int]:
    """Counts how often a dependency is evaluated."""
    dependencies, counts = graph_run.controller.dependencies, list[int]()
    original = dependencies._set_status

    def counting(*args: Any, **named: Any) -> None:
        counts.append(1)
        original(*args, **named)

    dependencies._set_status = counting  # type: ignore[method-assign]
    return counts
