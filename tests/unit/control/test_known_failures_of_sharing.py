"""What broke in other schedulers where many share one cluster, played again here. Each says in one line what went wrong
elsewhere and what is promised. The simulator plays nodes and time: runs take as long as they say, and no node breaks."""

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


def played(arrivals, cores=4, **scheduling):
    """When each job started, by name; those that never did are not in it."""
    config = {"preemption": {"enabled": False}, **scheduling}
    ordered = [Arrival(at, id, spec, run) for id, (at, spec, run) in enumerate(sorted(arrivals, key=lambda a: a[0]), 1)]
    workload = Workload("played", ordered, tuple(a_node(f"n{i}", 1, "4Gi") for i in range(cores)))
    result = Simulation(workload, make_controller(msgspec.convert(config, SchedulingConfig))).run()
    return {outcome.name: outcome.started_ms for outcome in result.outcomes if outcome.started_ms >= 0}


def a_flood(project="flood", jobs=400, run=30 * MINUTE):
    """All at once, and more than the cluster does in two days."""
    return [(0, a_job_spec(f"{project}-{i}", project=project, user="f", estimate_ms=run), run) for i in range(jobs)]


def now_and_then(project, jobs=10, every=HOUR, run=10 * MINUTE):
    return [
        (i * every, a_job_spec(f"{project}-{i}", project=project, user="u", estimate_ms=run), run)
        for i in range(1, jobs + 1)
    ]


def line(queue, **options):
    return {"profiles": {"default": {"queue": queue, "options": {queue: options} if options else {}}}}


def longest_wait(started, arrivals, project):
    return max(started[spec.name] - at for at, spec, _ in arrivals if spec.project == project)


def test_first_come_first_served_lets_one_project_starve_all_others():
    """What went wrong elsewhere: a student's loop submitted 400 jobs at night, and nobody else ran until noon next day."""
    arrivals = a_flood() + now_and_then("web")
    started = played(arrivals, **line("fifo"))
    assert longest_wait(started, arrivals, "web") > 40 * HOUR


@pytest.mark.parametrize("formula", ["fair_tree", "classic", "drf"])
def test_with_fair_share_a_light_user_waits_for_the_next_free_core_only(formula):
    """Elsewhere: see above. Here: whoever has had less goes first, however many others wait."""
    arrivals = a_flood() + now_and_then("web") + now_and_then("physics", every=2 * HOUR)
    shares = {"enabled": True, "formula": formula, "refresh": "1m"}
    started = played(arrivals, **line("multifactor"), shares=shares)
    assert longest_wait(started, arrivals, "web") <= 31 * MINUTE
    assert longest_wait(started, arrivals, "physics") <= 31 * MINUTE
    assert len(started) == len(arrivals), "and the flood runs too"


def test_a_user_who_submits_under_many_names_of_one_project_gains_nothing():
    """Elsewhere: shares were counted for each user, so 200 names got 200 parts. Here: a project has its part first, and its
    many who have had nothing yet are in front of another's for as long as age makes a difference, five hours, at most."""
    arrivals = now_and_then("web") + [
        (0, a_job_spec(f"many-{i}", project="many", user=f"u{i}", estimate_ms=HOUR), HOUR) for i in range(200)
    ]
    shares = {"enabled": True, "refresh": "1m"}
    started = played(arrivals, **line("multifactor"), shares=shares)
    assert longest_wait(started, arrivals, "web") <= 6 * HOUR
    without = played(arrivals, **line("fifo"))
    assert longest_wait(without, arrivals, "web") > 38 * HOUR


@pytest.mark.parametrize(
    ("hard", "borrow", "asked", "fits"),
    [
        ({"cpu": 2}, {"cpu": 1}, {"cpu": "1"}, 3),
        ({"cpu": "2000m"}, {"cpu": "1000m"}, {"cpu": 1}, 3),
        ({"cpu": "2"}, {"cpu": "500m"}, {"cpu": "250m"}, 10),
        ({"memory": "4Gi"}, {"memory": "2048Mi"}, {"cpu": "100m", "memory": "2Gi"}, 3),
        ({"memory": "4G"}, {"memory": "0"}, {"cpu": "100m", "memory": "2Gi"}, 1),
    ],
    ids=["whole cores", "thousandths", "parts of a core", "binary sizes", "decimal against binary"],
)
def test_no_more_is_borrowed_whatever_unit_each_side_is_written_in(hard, borrow, asked, fits):
    """Elsewhere: a limit of 2 cores met a use in thousandths, and a project borrowed a thousand times what it might.
    Here: every amount comes in by one parser, and is a whole number of one unit from then on."""
    (resource,) = hard
    config = {"quotas": {"a": {"hard": hard, "borrow": borrow, "cohort": "lab"},
                         "b": {"hard": {resource: "64" if resource == "cpu" else "64Gi"}, "cohort": "lab"}}}  # fmt: skip
    profiles = {"default": build_profile("default", plugins=("quota",))}
    harness = Harness(
        *some_nodes(64, 64), profiles=profiles, accounts=accounts_policy(msgspec.convert(config, SchedulingConfig))
    )
    harness.submit(*range(1, 21), project="a", **{"memory": "1Mi", **asked})
    assert sum(harness.state(id) == "scheduled" for id in range(1, 21)) == fits


@pytest.mark.parametrize("amount", ["2 cores", "2x", "", "-1", "nan", "1e400"])
def test_an_amount_in_no_known_unit_is_refused_and_not_taken_for_nothing(amount):
    """Elsewhere: what could not be read became 0, which meant no limit at all. Here: the server does not start with it."""
    with pytest.raises(InvalidInput, match=r"scheduling\.quotas\.ml"):
        accounts_policy(msgspec.convert({"quotas": {"ml": {"hard": {"cpu": amount}}}}, SchedulingConfig))


STREAM_HOURS = 60


def a_stream(random_, priorities, every, run):
    """Work of some importance that never stops: more of it all the time than one core can do."""
    arrivals, at = [], 0
    while at < STREAM_HOURS * HOUR:
        spec = a_job_spec(f"stream-{len(arrivals)}", priority=random_.choice(priorities), estimate_ms=run)
        arrivals.append((at, spec, run))
        at += random_.randrange(every // 2, every + 1)
    return arrivals


def one_that_is_lower(priority, at=0):
    return (at, a_job_spec("low", priority=priority, estimate_ms=MINUTE), MINUTE)


def test_plain_priorities_let_a_stream_of_higher_jobs_starve_a_lower_one():
    """What goes wrong with priorities alone: the low one starts when the stream is over, and not before."""
    arrivals = [*a_stream(random.Random(1), ["high"], 10 * MINUTE, 10 * MINUTE), one_that_is_lower("low", 1)]
    assert played(arrivals, cores=1, **line("priority"))["low"] > STREAM_HOURS * HOUR


@examples(25)
@given(
    seed=st.integers(0, 10**6), own=st.integers(0, 500), above=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    rate=st.integers(20, 200), run=st.integers(2, 20),
)  # fmt: skip
def test_no_job_waits_longer_than_its_age_explains(seed, own, above, rate, run):
    """Elsewhere: a low job waited for months behind a stream of better ones. Here: it starts as soon as its age makes up for
    the difference to the most important of the stream, when a core is next free and those before it have gone."""
    random_, run_ms = random.Random(seed), run * MINUTE
    most = own + max(above)
    stream = a_stream(random_, [own + more for more in above], run_ms, run_ms)
    points = {"age_per_hour": rate, "age_max": 1000, "share": 0}
    arrivals = [*stream, one_that_is_lower(own, 1)]
    started = played(arrivals, cores=1, **line("multifactor", **points))
    # By then nobody who comes later can have more points. Who came before and stands in front is bounded too: it is those
    # who came before the moment at which the low one outgrows newcomers, and each takes one run.
    outgrown_ms = (most - own) * HOUR // rate + 1
    in_front = sum(at <= outgrown_ms for at, _, _ in stream)
    assert started["low"] <= max(outgrown_ms, in_front * run_ms) + 2 * run_ms
