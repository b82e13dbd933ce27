"""Profiles share the nodes: no job starts while one of higher priority in another profile could use the same capacity."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from builders import NOW_MS, a_job, a_node
from hodei.model.config import PreemptionConfig, ProfileConfig, SchedulingConfig
from hodei.model.facts import Fact, JobSubmitted, NodeJoined, RunObserved
from hodei.model.resources import CPU
from hodei.wiring import make_controller
from property.examples import examples

# Each of these queues tries the highest priority first, so the property holds for any two jobs of different profiles.
PROFILES = ("aaa", "compute", "default", "points", "zzz")
CONFIG = SchedulingConfig(
    preemption=PreemptionConfig(enabled=False),
    profiles={
        "aaa": ProfileConfig(),
        "zzz": ProfileConfig(worker_selection="bin_packing"),
        "points": ProfileConfig(
            queue="multifactor", options={"multifactor": {"age_per_hour": 0, "age_max": 0, "share": 0}}
        ),
    },
)
jobs = st.tuples(st.sampled_from(PROFILES), st.sampled_from((0, 100, 250, 500, 900)), st.integers(1, 4))
events = st.lists(st.one_of(jobs, st.integers(0, 7)), max_size=40)


@examples(150)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), events)
def test_no_job_starts_while_a_higher_one_of_another_profile_could_use_its_capacity(cpus, history):
    controller = make_controller(CONFIG)
    controller.step(NOW_MS, [NodeJoined(a_node(f"n{i}", cpu, "64Gi")) for i, cpu in enumerate(cpus)])
    free = {f"n{i}": cpu * 1000 for i, cpu in enumerate(cpus)}
    waiting: dict[int, tuple[str, int, int]] = {}
    running: dict[str, tuple[str, int]] = {}
    batch: list[Fact] = []
    for id, event in enumerate(history, 1):
        now_ms = NOW_MS + id
        if isinstance(event, tuple):
            profile, priority, cpu = event
            waiting[id] = (profile, priority, cpu * 1000)
            batch.append(JobSubmitted(a_job(id, profile=profile, priority=priority, cpu=cpu, at_ms=now_ms)))
            if id % 3:
                continue  # several submissions in one step
        elif running:
            run = sorted(running)[event % len(running)]
            node, held = running.pop(run)
            free[node] += held
            batch.append(RunObserved(run, "succeeded", now_ms, 0))
        step = controller.step(now_ms, batch)
        batch = []
        started = [(bind.job, bind.node) for bind in step.plan.binds]
        started_jobs = {job: waiting.pop(job) for job, _ in started}
        for job, node in started:
            free[node] -= started_jobs[job][2]
            running[f"{job}.0.1"] = (node, started_jobs[job][2])
        for job, node in started:
            profile, priority, held = started_jobs[job]
            for other, (its_profile, its_priority, requested) in waiting.items():
                if its_profile != profile and its_priority > priority:
                    available = free[node] + held
                    assert requested > available, f"job {other} waits for capacity that job {job} got"
    table = controller.cluster.table
    assert {name: table.usage(row).get(CPU, 0) for row, name in enumerate(table.names)} == {
        f"n{i}": cpu * 1000 - free[f"n{i}"] for i, cpu in enumerate(cpus)
    }
