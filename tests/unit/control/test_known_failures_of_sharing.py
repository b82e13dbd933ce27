"""Failures of sharing known from other schedulers. Each test names the failure elsewhere and the guarantee here. They run in the
simulator: runs last as long as their estimates, and no node fails."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import a_job_spec, a_node
from hodei.control.accounting.accounts import accounts_policy
from hodei.model.config import SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.plugins.registry import build_profile
from hodei.sim.driver import Simulation
from hodei.sim.traces import Arrival, Workload
from hodei.wiring import make_controller
from property.examples import examples
from unit.control.harness import Harness, some_nodes

MINUTE = 60_000
HOUR = 60 * MINUTE


def simulate(arrivals, cores=4, **scheduling):
    """The start time of each job that started, by name."""
    config = {"preemption": {"enabled": False}, **scheduling}
    ordered = [Arrival(at, id, spec, run) for id, (at, spec, run) in enumerate(sorted(arrivals, key=lambda a: a[0]), 1)]
    workload = Workload("sharing", ordered, tuple(a_node(f"n{i}", 1, "4Gi") for i in range(cores)))
    result = Simulation(workload, make_controller(msgspec.convert(config, SchedulingConfig))).run()
    return {outcome.name: outcome.started_ms for outcome in result.outcomes if outcome.started_ms >= 0}


def a_flood(project="flood", jobs=400, run=30 * MINUTE):
    """Jobs submitted at once, for more than two days of the whole cluster."""
    return [(0, a_job_spec(f"{project}-{i}", project=project, user="f", estimate_ms=run), run) for i in range(jobs)]


def a_trickle(project, jobs=10, every=HOUR, run=10 * MINUTE):
    return [
        (i * every, a_job_spec(f"{project}-{i}", project=project, user="u", estimate_ms=run), run)
        for i in range(1, jobs + 1)
    ]


def with_queue(queue, **options):
    return {"profiles": {"default": {"queue": queue, "options": {queue: options} if options else {}}}}


def longest_wait(started, arrivals, project):
    return max(started[spec.name] - at for at, spec, _ in arrivals if spec.project == project)


def test_a_fifo_queue_lets_one_project_starve_all_others():
    """The failure itself: one user submits 400 jobs at night, and no other job starts for almost two days."""
    arrivals = a_flood() + a_trickle("web")
    started = simulate(arrivals, **with_queue("fifo"))
    assert longest_wait(started, arrivals, "web") > 40 * HOUR


@pytest.mark.parametrize("formula", ["fair_tree", "classic", "drf"])
def test_with_fair_share_a_light_user_waits_for_the_next_free_core_only(formula):
    """Elsewhere: see above. Here: the account with less usage is first, however many jobs of others wait."""
    arrivals = a_flood() + a_trickle("web") + a_trickle("physics", every=2 * HOUR)
    shares = {"enabled": True, "formula": formula, "refresh": "1m"}
    started = simulate(arrivals, **with_queue("multifactor"), shares=shares)
    assert longest_wait(started, arrivals, "web") <= 31 * MINUTE
    assert longest_wait(started, arrivals, "physics") <= 31 * MINUTE
    assert len(started) == len(arrivals), "the flood runs too"


def test_a_user_who_submits_under_many_names_of_one_project_gains_nothing():
    """Elsewhere: shares were counted per user, so 200 names got 200 shares. Here: shares are counted per project first. New
    users of the project are ahead of another project only while age makes a difference, for at most five hours."""
    arrivals = a_trickle("web") + [
        (0, a_job_spec(f"many-{i}", project="many", user=f"u{i}", estimate_ms=HOUR), HOUR) for i in range(200)
    ]
    shares = {"enabled": True, "refresh": "1m"}
    started = simulate(arrivals, **with_queue("multifactor"), shares=shares)
    assert longest_wait(started, arrivals, "web") <= 6 * HOUR
    without = simulate(arrivals, **with_queue("fifo"))
    assert longest_wait(without, arrivals, "web") > 38 * HOUR


@pytest.mark.parametrize(
    ("hard", "borrow", "requested", "fits"),
    [
        ({"cpu": 2}, {"cpu": 1}, {"cpu": "1"}, 3),
        ({"cpu": "2000m"}, {"cpu": "1000m"}, {"cpu": 1}, 3),
        ({"cpu": "2"}, {"cpu": "500m"}, {"cpu": "250m"}, 10),
        ({"memory": "4Gi"}, {"memory": "2048Mi"}, {"cpu": "100m", "memory": "2Gi"}, 3),
        ({"memory": "4G"}, {"memory": "0"}, {"cpu": "100m", "memory": "2Gi"}, 1),
    ],
    ids=["whole cores", "thousandths", "parts of a core", "binary sizes", "decimal against binary"],
)
def test_the_limit_of_borrowing_holds_whatever_unit_amounts_are_written_in(hard, borrow, requested, fits):
    """Elsewhere: a limit in cores was compared with usage in thousandths, and a project borrowed a thousand times too much.
    Here: one parser reads every amount into a whole number of one unit."""
    (resource,) = hard
    config = {"quotas": {"a": {"hard": hard, "borrow": borrow, "cohort": "lab"},
                         "b": {"hard": {resource: "64" if resource == "cpu" else "64Gi"}, "cohort": "lab"}}}  # fmt: skip
    profiles = {"default": build_profile("default", plugins=("quota",))}
    harness = Harness(
        *some_nodes(64, 64), profiles=profiles, accounts=accounts_policy(msgspec.convert(config, SchedulingConfig))
    )
    harness.submit(*range(1, 21), project="a", **{"memory": "1Mi", **requested})
    assert sum(harness.state(id) == "scheduled" for id in range(1, 21)) == fits


@pytest.mark.parametrize("amount", ["2 cores", "2x", "", "-1", "nan", "1e400"])
def test_an_amount_in_an_unknown_unit_is_refused_and_not_read_as_zero(amount):
    """Elsewhere: an unreadable amount became 0, which meant no limit. Here: it is a configuration error."""
    with pytest.raises(InvalidInput, match=r"scheduling\.quotas\.ml"):
        accounts_policy(msgspec.convert({"quotas": {"ml": {"hard": {"cpu": amount}}}}, SchedulingConfig))


STREAM_HOURS = 60


def a_stream(random_, priorities, every, run):
    """A continuous stream of jobs, more than one core can run."""
    arrivals, at = [], 0
    while at < STREAM_HOURS * HOUR:
        spec = a_job_spec(f"stream-{len(arrivals)}", priority=random_.choice(priorities), estimate_ms=run)
        arrivals.append((at, spec, run))
        at += random_.randrange(every // 2, every + 1)
    return arrivals


def a_low_job(priority, at=0):
    return (at, a_job_spec("low", priority=priority, estimate_ms=MINUTE), MINUTE)


def test_plain_priorities_let_a_stream_of_higher_jobs_starve_a_lower_one():
    """The failure itself: with priorities alone the low job starts only after the stream has ended."""
    arrivals = [*a_stream(random.Random(1), ["high"], 10 * MINUTE, 10 * MINUTE), a_low_job("low", 1)]
    assert simulate(arrivals, cores=1, **with_queue("priority"))["low"] > STREAM_HOURS * HOUR


@examples(25)
@given(
    seed=st.integers(0, 10**6), own=st.integers(0, 500), above=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    rate=st.integers(20, 200), run=st.integers(2, 20),
)  # fmt: skip
def test_no_job_waits_longer_than_its_age_explains(seed, own, above, rate, run):
    """Elsewhere: a low job waited for months behind a stream of higher ones. Here: it starts when its age makes up for the
    difference to the highest priority of the stream, after the jobs ahead of it at that time."""
    random_, run_ms = random.Random(seed), run * MINUTE
    highest = own + max(above)
    stream = a_stream(random_, [own + more for more in above], run_ms, run_ms)
    points = {"age_per_hour": rate, "age_max": 1000, "share": 0}
    arrivals = [*stream, a_low_job(own, 1)]
    started = simulate(arrivals, cores=1, **with_queue("multifactor", **points))
    # From then on no new job can have more points. The jobs ahead are also bounded: only those submitted before that time,
    # and each takes one run.
    overtaken_ms = (highest - own) * HOUR // rate + 1
    ahead = sum(at <= overtaken_ms for at, _, _ in stream)
    assert started["low"] <= max(overtaken_ms, ahead * run_ms) + 2 * run_ms
