"""Any graph, any order of events: nobody starts before what it waits for, nobody waits in vain, nobody is given up too soon.

What is met is worked out a second time here, naively, from the history alone. Backends are played by the test.
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


class Life:
    """A controller, what it saved, and what has happened."""

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
        self.learn([NodeJoined(self.node)])

    def learn(self, facts: list[Fact]) -> None:
        self.now_ms += 1
        step = self.controller.step(self.now_ms, facts)
        for save in step.saves:
            if isinstance(save, SaveJob):
                self.jobs[save.job.id] = save.job
            elif isinstance(save, SaveRun):
                self.runs[save.run.id] = save.run
        stopped = []
        for act in step.acts:
            if isinstance(act, Start):
                self.live.append(act.run.id)
                self.order.append(act.run.job)
                assert self.met(act.run.job) >= self.jobs[act.run.job].spec.after.needed, f"{act.run.job} is too early"
            elif isinstance(act, Stop) and act.run in self.live:
                stopped.append(act.run)
        if stopped:
            self.live = [run for run in self.live if run not in stopped]
            self.learn([RunObserved(run, "stopped", self.now_ms, 143) for run in stopped])

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
        self.learn([RunObserved(run, state, self.now_ms, 0 if state == "succeeded" else 1)])

    def restart(self) -> None:
        """As a server would: what has not ended comes back, with a word on what it waits for."""
        self.controller = Controller({"default": build_profile("default")})
        dependency_statuses = {
            job.id: DependencyStatus(job.id, job.state, job.id in self.saved) for job in self.jobs.values()
        }
        facts: list[Fact] = []
        for id, job in sorted(self.jobs.items()):
            if job.state not in JOB_ENDED:
                told = tuple(dependency_statuses[one.job] for one in job.spec.after.of if one.job)
                runs = tuple(run for run in self.runs.values() if run.job == id)
                facts.append(JobRestored(job, runs, told))
        for fact in facts:
            self.learn([fact])
        self.learn([NodeJoined(self.node), *(DataAppeared(what) for what in sorted(self.appeared))])


@st.composite
def graphs(draw: Any) -> list[Dependencies]:
    size = draw(st.integers(1, 12))
    out = []
    for place in range(size):
        ons = st.sampled_from(["succeeded", "completed", "failed", "checkpointed"])
        of = {Dependency("exists", what=what) for what in draw(st.sets(st.sampled_from(DATA), max_size=1))}
        if place:
            pairs = st.tuples(ons, st.integers(1, place))
            of |= {Dependency(on, job=job) for on, job in draw(st.sets(pairs, max_size=4))}
        need = draw(st.integers(0, max(len(of) - 1, 0)))
        out.append(Dependencies(tuple(sorted(of, key=str)), need))
    return out


@examples(100)
@given(graphs(), st.integers(0, 2**32), st.booleans())
def test_no_dependent_job_starts_too_early_waits_in_vain_or_fails_too_soon(
    graph: list[Dependencies], seed: int, at_once: bool
) -> None:
    chance, life = random.Random(seed), Life()
    jobs = [a_job(id, at_ms=NOW_MS, queued_ms=NOW_MS, after=after) for id, after in enumerate(graph, 1)]
    life.jobs = {job.id: job for job in jobs}
    facts: list[Fact] = [JobSubmitted(job) for job in jobs]
    if at_once:
        chance.shuffle(facts)
        life.learn(facts)
    else:
        for fact in facts:
            life.learn([fact])
    for _ in range(200):
        todo = ["restart", "twin"] if chance.random() < 0.1 else []
        todo += ["end"] * 3 * bool(life.live) + ["save"] * bool(life.live)
        todo += ["data"] * (len(life.appeared) < len(DATA))
        waiting = [job.id for job in life.jobs.values() if job.state == "pending"]
        todo += ["cancel"] if waiting and chance.random() < 0.1 else []
        if not todo:
            break
        match chance.choice(todo):
            case "end":
                life.end(chance.choice(life.live), chance.choice(["succeeded", "succeeded", "failed"]))
            case "save":
                run = chance.choice(life.live)
                life.saved.add(int(run.split(".")[0]))
                life.learn([RunObserved(run, "running", life.now_ms, checkpoint_ms=life.now_ms)])
            case "data":
                what = chance.choice([what for what in DATA if what not in life.appeared])
                life.appeared.add(what)
                life.learn([DataAppeared(what)])
            case "cancel":
                life.learn([JobCancelled(chance.choice(waiting))])
            case "restart":
                life.restart()
            case "twin":
                life.controller = clone_controller(life.controller)
    assert not life.live
    for job in life.jobs.values():
        assert job.state in JOB_ENDED, f"job {job.id} waits in vain: {job.reason}"
        if job.reason_code == "DEPENDENCY_NEVER_MET":
            lost = sum(life.is_met(one) is False for one in job.spec.after.of)
            assert len(job.spec.after.of) - lost < job.spec.after.needed, f"job {job.id} was given up too soon"
            assert job.reason
    assert len(life.controller.dependencies) == 0
    assert not list(life.controller.dependencies.data)


def test_ten_thousand_jobs_in_a_graph_run_in_the_right_order() -> None:
    seed = 20261116
    chance, size = random.Random(seed), 10_000
    life = Life()
    edges = 0
    jobs = []
    for id in range(1, size + 1):
        before = (
            sorted({chance.randint(max(1, id - 500), id - 1) for _ in range(chance.randint(0, 4))}) if id > 1 else []
        )
        edges += len(before)
        after = Dependencies(tuple(Dependency("succeeded", job=job) for job in before))
        jobs.append(a_job(id, at_ms=NOW_MS, queued_ms=NOW_MS, after=after))
    life.jobs = {job.id: job for job in jobs}
    chance.shuffle(jobs)
    heard = _counted(life)
    life.learn([JobSubmitted(job) for job in jobs])
    while life.live:
        runs, life.live = life.live, []
        life.learn([RunObserved(run, "succeeded", life.now_ms, 0) for run in runs])
    assert len(life.order) == size, f"seed {seed}"
    place = {job: number for number, job in enumerate(life.order)}
    for job in life.jobs.values():
        assert all(place[one.job] < place[job.id] for one in job.spec.after.of), f"seed {seed}"
    # The work is that of the edges, each looked at once.
    assert sum(heard) == edges


def _counted(life: Life) -> list[int]:
    """Counts how often a dependency is judged."""
    dependencies, counts = life.controller.dependencies, list[int]()
    judge = dependencies._set_status

    def counting(*args: Any, **named: Any) -> None:
        counts.append(1)
        judge(*args, **named)

    dependencies._set_status = counting  # type: ignore[method-assign]
    return counts
