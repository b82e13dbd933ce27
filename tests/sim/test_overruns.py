"""Enforced estimates of backfilled jobs, and reservations that evict runs, over simulated time."""

from __future__ import annotations

import random

from msgspec import structs

from hodei.control.controller import Controller
from hodei.model.facts import ReservationMade
from hodei.model.reservation import Reservation
from hodei.model.resources import CPU
from hodei.sim.driver import Simulation
from hodei.sim.metrics import Result
from hodei.sim.policies import policy
from hodei.wiring import make_controller
from sim.machines import pool, waits_s
from sim.reference import Job

# id, submission, run time, estimate, processors: the third job is backfilled ahead of the second and far exceeds its estimate.
LATE = [Job(1, 0, 60, 60, 3), Job(2, 1, 60, 60, 4), Job(3, 2, 500, 30, 1)]


def controller(overrun: str, name: str = "easy") -> Controller:
    config = policy(name)
    profile = config.profiles["default"]
    options = {"batch": {**profile.options["batch"], "overrun": overrun}}
    return make_controller(structs.replace(config, profiles={"default": structs.replace(profile, options=options)}))


def run(jobs: list[Job], procs: int, overrun: str, name: str = "easy", *reservations: Reservation) -> Result:
    scheduler = controller(overrun, name)
    scheduler.step(0, [ReservationMade(reservation) for reservation in reservations])
    return Simulation(pool(jobs, procs), scheduler, policy=name).run()


def test_a_start_reservation_is_kept_when_overruns_are_enforced():
    assert waits_s(run(LATE, 4, "let")) == {1: 0, 2: 501, 3: 0}
    result = run(LATE, 4, "stop")
    assert waits_s(result) == {1: 0, 2: 59, 3: 0}
    assert [(o.id, o.ended_ms // 1000) for o in result.outcomes] == [(1, 60), (2, 120), (3, 60)]
    assert result.unplaced == 0


def bad_estimates(seed: int) -> tuple[list[Job], int]:
    """A third of the jobs run up to four times as long as estimated."""
    draw = random.Random(seed)
    procs, submit, jobs = draw.choice([4, 8, 10]), 0, []
    for id in range(1, 41):
        submit += draw.choice([0, 0, 1, 1, 2, 3, 5])
        estimate = draw.choice([1, 2, 3, 4, 5, 8, 10, 20])
        run_time = draw.randint(1, estimate) * (1 if draw.random() < 0.67 else 4)
        jobs.append(Job(id, submit, run_time, estimate, draw.randint(1, procs)))
    return jobs, procs


def test_no_job_is_lost_however_wrong_estimates_are():
    stopped = 0
    for seed in range(15):
        jobs, procs = bad_estimates(seed)
        for name in ("easy", "easy-sjbf", "conservative", "wfp3"):
            result = run(jobs, procs, "stop", name)
            assert result.start_reservations_broken == 0, (name, seed)
            assert len(result.outcomes) == len(jobs), (name, seed)
            run_time = {job.id: job.run for job in jobs}
            for outcome in result.outcomes:
                assert outcome.ended_ms >= 0, (name, seed, outcome.id)
                if outcome.run_ms != run_time[outcome.id] * 1000:
                    stopped += 1
                    assert outcome.run_ms >= outcome.estimate_ms, "stopped within its estimate"
                    assert outcome.kind == "backfill"
    assert stopped > 10


def test_a_reservation_evicts_runs_from_its_nodes_and_they_run_after_it():
    jobs = [Job(1, 0, 100, 100, 4)]
    window = (50_000, 80_000, (("pool", {CPU: 4000}),))
    reservation = Reservation("demo", "sales", *window)
    assert [o.ended_ms for o in run(jobs, 4, "let", "easy", reservation).outcomes] == [180_000], (
        "it would not end before the window"
    )
    underestimated = [Job(1, 0, 100, 40, 4)]
    assert [o.ended_ms for o in run(underestimated, 4, "let", "easy", reservation).outcomes] == [100_000], (
        "it runs into the window"
    )
    cleared = structs.replace(reservation, at_start="stop")
    (outcome,) = run(underestimated, 4, "let", "easy", cleared).outcomes
    assert (outcome.preemptions, outcome.started_ms, outcome.ended_ms) == (1, 80_000, 180_000)
