"""Fault runs: a fixed set of seeds runs clean, a seed is reproducible, and planted bugs are found.

They drive the real controller and the memory store; the backends are models. They do not cover SQLite, processes or the
asyncio loop.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from hodei.control.capacity.scaling import NodeScaling
from hodei.control.controller import Controller
from hodei.control.lifecycle import runs as lifecycle_runs
from hodei.control.lifecycle.gangs import Gangs
from hodei.control.lifecycle.preemption import PreemptionControl
from hodei.control.state import ClusterState
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.model.effects import SaveEvent, SaveJob, Start
from hodei.model.job import JOB_ENDED
from hodei.plugins.fit import Fit
from hodei.plugins.start_reservations import StartReservations
from hodei.plugins.taints import Taints
from hodei.store.memory import MemoryStore
from tools.faults import server
from tools.faults.fault_run import FaultRun
from tools.faults.seeds import main, try_seed
from tools.faults.setup import FAULTS

ROOT = Path(__file__).parents[2]
# Seeds that have found a bug.
REGRESSIONS = (76, 434, 574, 833, 1094, 1178, 1291, 5035, 6115, 6941, 6950, 7826, 9740)
TRIED = 120


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_two_hundred_seeds_run_clean(first):
    wrong = [verdict.problem for seed in range(first, first + 50) if (verdict := try_seed(seed)).problem]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
def test_seeds_with_nodes_that_come_and_go_run_clean():
    wrong = [verdict.problem for seed in range(60) if (verdict := try_seed(seed, elastic=True)).problem]
    assert not wrong, "\n\n".join(wrong)


def test_a_node_that_is_never_released_is_found(monkeypatch):
    monkeypatch.setattr(NodeScaling, "_spare", lambda scaling, order: False)
    assert any(try_seed(seed, elastic=True).problem for seed in range(12))


def test_a_release_of_a_node_in_use_is_found(monkeypatch):
    def release(scaling, run, spec):
        order = scaling._cluster.node_orders.get(run.node)
        if order is not None and order.phase == "ready":
            scaling._release(order, run.placed_ms, "a planted bug")

    opened = NodeScaling._run_opened
    monkeypatch.setattr(NodeScaling, "_run_opened", lambda s, run, spec: (opened(s, run, spec), release(s, run, spec)))
    assert any(try_seed(seed, elastic=True).problem for seed in range(12))


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_found_a_bug_runs_clean(seed):
    assert not try_seed(seed).problem


def trace_of(seed: int) -> list[str]:
    run = FaultRun(seed)
    run.recent = type(run.recent)()
    run.run()
    return [f"{step} {at_ms} {what}" for step, at_ms, what in run.recent]


def test_a_seed_reproduces_the_same_run():
    assert trace_of(7) == trace_of(7)
    assert trace_of(7) != trace_of(8)


@pytest.mark.slow
def test_a_seed_reproduces_the_same_run_in_another_process_with_other_hashes():
    code = "from tools.faults.fault_run import FaultRun; run = FaultRun(7); run.run(); print(run.step, run.now_ms, *run.recent)"
    results = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            timeout=60,
        )
        for hashes in ("1", "2")
    ]
    assert [one.returncode for one in results] == [0, 0], results
    assert results[0].stdout == results[1].stdout


def test_every_kind_of_fault_occurs_in_some_seed():
    seen: set[str] = set()
    for seed in range(40):
        seen |= FaultRun(seed).setup.odds.keys()
    assert seen == FAULTS.keys()


def first_problem() -> str:
    """The problem of the first failing seed; "" if there is none."""
    return next((verdict.problem for seed in range(TRIED) if (verdict := try_seed(seed)).problem), "")


def leaking_capacity(monkeypatch):
    release, times = Table.release, iter(range(10**9))

    def release_most(table, row, request, member=None, grant=None):
        if next(times) % 7:
            release(table, row, request, member, grant)

    monkeypatch.setattr(Table, "release", release_most)


def no_capacity_checked(monkeypatch):
    monkeypatch.setattr(Fit, "filter", lambda fit, member, nodes, view: ())


def duplicate_starts(monkeypatch):
    """After a restart a live run is started again under another id."""

    def reconcile(cluster, backend, known, now_ms):
        facts, orders = lifecycle_runs.reconcile(cluster, backend, known, now_ms)
        for run in [run for runs in cluster.runs.values() for run in runs.values() if run.backend == backend]:
            if run.id in known and known[run.id].state == "running":
                job, member, attempt = run.id.split(".")
                duplicate = structs.replace(run, id=f"{job}.{member}.{int(attempt) + 50}")
                spec = cluster.jobs[run.job].spec
                orders.append(Start(duplicate, spec, spec.task_of(run.member)))
        return facts, orders

    monkeypatch.setattr(server, "reconcile", reconcile)


def missing_starts(monkeypatch):
    """After a restart a placed run that was never started is not started."""

    def reconcile(cluster, backend, known, now_ms):
        facts, orders = lifecycle_runs.reconcile(cluster, backend, known, now_ms)
        return facts, [order for order in orders if not isinstance(order, Start)]

    monkeypatch.setattr(server, "reconcile", reconcile)


def forgotten_repairs(monkeypatch):
    monkeypatch.setattr(Gangs, "_start_repair", lambda gangs, job, missing, now_ms, pause_ms: None)


def leaked_holds(monkeypatch):
    """A dropped hold keeps its capacity."""
    monkeypatch.setattr(PreemptionControl, "drop", lambda preempting, job: preempting.holds.pop(job, None) is not None)


def lost_jobs(monkeypatch):
    """The store accepts a new job and does not save it."""
    commit = MemoryStore.commit

    def forgetful(store, saves):
        commit(store, [save for save in saves if not (isinstance(save, SaveJob) and save.new and save.job.id == 2)])

    monkeypatch.setattr(MemoryStore, "commit", forgetful)


def revived_jobs(monkeypatch):
    """After a restart ended jobs are pending again."""
    active = MemoryStore.active

    def with_ended_jobs(store):
        ended = [job for job in store._memory.jobs.values() if job.state in JOB_ENDED]
        return [*active(store), *((structs.replace(job, state="pending"), ()) for job in ended)]

    monkeypatch.setattr(MemoryStore, "active", with_ended_jobs)


def partial_gangs(monkeypatch):
    try_gang = Engine.try_gang

    def all_but_one(engine, gang, view):
        placed = try_gang(engine, gang, view)
        if isinstance(placed, list) and len(placed) > 1:
            engine.undo(placed[-1:])
            return placed[:-1]
        return placed

    monkeypatch.setattr(Engine, "try_gang", all_but_one)


def taints_ignored(monkeypatch):
    monkeypatch.setattr(Taints, "filter", lambda taints, member, nodes, view: ())


def no_fencing(monkeypatch):
    monkeypatch.setattr(MemoryStore, "_fence", lambda store: None)


def reservations_ignored(monkeypatch):
    monkeypatch.setattr(StartReservations, "layouts", lambda plugin, gang, table, view: None)
    monkeypatch.setattr(StartReservations, "permit", lambda plugin, gang, placements, view: None)


def lost_wakeups(monkeypatch):
    monkeypatch.setattr(ClusterState, "wake", lambda cluster, trigger: None)


def gaps_in_history(monkeypatch):
    step = Controller.step

    def with_gaps(controller, now_ms, facts=()):
        done = step(controller, now_ms, facts)
        records = [save for save in done.saves if isinstance(save, SaveEvent)]
        if len(records) > 2:
            done.saves.remove(records[1])
        return done

    monkeypatch.setattr(Controller, "step", with_gaps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant_bug", "message"),
    [
        (leaking_capacity, "in the table"),
        (no_capacity_checked, "over-committed"),
        (duplicate_starts, "runs 2 times at once"),
        (missing_starts, "nothing will ever happen"),
        (forgotten_repairs, "forever"),
        (leaked_holds, ""),
        (lost_jobs, ""),
        (revived_jobs, "without a request"),
        (partial_gangs, "a partial gang"),
        (taints_ignored, "taint"),
        (no_fencing, "a closed store was written"),
        (reservations_ignored, "a start reservation is broken"),
        (lost_wakeups, "forever although it fits"),
        (gaps_in_history, "follows"),
    ],
)
def test_a_planted_bug_is_found(monkeypatch, plant_bug, message):
    plant_bug(monkeypatch)
    problem = first_problem()
    assert problem, f"{plant_bug.__name__} was not noticed in {TRIED} seeds"
    assert message in problem, problem


def test_a_failing_seed_is_reported_with_its_command(monkeypatch, capsys):
    lost_wakeups(monkeypatch)
    seed = next(seed for seed in range(TRIED) if try_seed(seed).problem)
    assert main(["--seed", str(seed)]) == 1
    out = capsys.readouterr().out
    assert f"seed {seed}, step " in out
    assert "the last facts and acts:" in out
    assert f"python -m tools.faults --seed {seed}" in out


def test_clean_seeds_are_counted_on_several_processes(capsys):
    assert main(["--seeds", "4", "--first", "10", "--jobs", "2"]) == 0
    captured = capsys.readouterr()
    assert "4 seeds: all clean" in captured.out
    assert "4 of 4 seeds" in captured.err
    assert "seeds/s" in captured.err


def test_a_crash_of_the_controller_is_a_failure_too(monkeypatch):
    monkeypatch.setattr(Controller, "_expire", lambda controller, now_ms: 1 // 0)
    verdict = try_seed(0)
    assert "ZeroDivisionError" in verdict.problem
