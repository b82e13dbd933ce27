"""`whatif` compares two forecasts of clones and leaves the live state unchanged."""

from __future__ import annotations

import pytest

from builders import a_job_spec
from hodei.control.clone import clone_controller
from hodei.control.explain.whatif import Question, what_if
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.errors import InvalidInput, NotFound
from hodei.plugins.registry import check_trial_policy
from hodei.wiring import make_controller
from unit.control.explain.test_lookahead import state_of
from unit.control.harness import Harness, a_harness
from unit.control.scenarios import mark_running

MINUTE = 60_000


def ask(harness: Harness, question: Question, **more):
    before = state_of(harness)
    answer = what_if(clone_controller(harness.controller), question, harness.now_ms, **more)
    assert state_of(harness) == before
    return answer


def busy_cluster() -> Harness:
    """Two nodes of two cores, full for ten more minutes; jobs 3 and 4 wait for one node each."""
    harness = a_harness(2, 2)
    harness.submit(1, 2, cpu="2", estimate_ms=11 * MINUTE)
    mark_running(harness, "1.0.1", "2.0.1")
    harness.now_ms += MINUTE
    harness.submit(3, cpu="2", estimate_ms=20 * MINUTE)
    harness.submit(4, cpu="2", estimate_ms=5 * MINUTE)
    return harness


def test_a_new_job_starts_after_the_pending_ones():
    harness = busy_cluster()
    answer = ask(harness, Question((a_job_spec("new", cpu="2", estimate_ms=MINUTE),)))
    assert [(job.name, job.start_ms - harness.now_ms) for job in answer.jobs] == [("new", 15 * MINUTE)]
    assert (answer.same, answer.sooner, answer.later, answer.evicted) == (2, (), (), ())


def test_a_higher_job_names_its_victims_and_delayed_jobs():
    harness = busy_cluster()
    answer = ask(harness, Question((a_job_spec("urgent", cpu="2", priority="critical", estimate_ms=MINUTE),)))
    assert answer.jobs[0].start_ms == harness.now_ms
    (evicted,) = answer.evicted
    assert (evicted.job in (1, 2), evicted.by, evicted.by_name) == (True, 0, "urgent")
    assert evicted.again_ms > harness.now_ms


def test_with_more_nodes_pending_jobs_start_sooner():
    harness = busy_cluster()
    answer = ask(harness, Question(add_nodes=2, like="n1"))
    assert [(job.job, job.start_ms == harness.now_ms, job.nodes) for job in answer.sooner] == [
        (3, True, ("n1-new-1",)),
        (4, True, ("n1-new-2",)),
    ]
    assert answer.same == 0


def test_without_a_node_its_jobs_move_and_others_start_later():
    harness = busy_cluster()
    answer = ask(harness, Question(remove_nodes=("n1",)))
    assert len(answer.evicted) == 1
    assert {job.job for job in answer.later} == {3, 4}


def test_another_policy_is_tried_on_the_same_jobs():
    harness = a_harness(2)
    harness.submit(1, cpu="1", estimate_ms=10 * MINUTE)
    mark_running(harness, "1.0.1")
    harness.submit(2, cpu="2", estimate_ms=20 * MINUTE)
    harness.submit(3, cpu="1", estimate_ms=30 * MINUTE)
    assert harness.state(3) == "scheduled", "a priority queue lets the small job pass the large one"
    harness.submit(4, cpu="1", estimate_ms=5 * MINUTE)
    easy = SchedulingConfig(profiles={"default": ProfileConfig(queue="batch", options={"batch": {"order": "sjf"}})})
    answer = ask(harness, Question(), under=make_controller(easy))
    assert answer.same + len(answer.sooner) + len(answer.later) == 2


def test_missing_estimates_are_noted():
    harness = a_harness(2)
    harness.submit(1, 2, cpu="2")
    answer = ask(harness, Question(add_nodes=1))
    assert any("neither estimate nor timeout: assumed never to end" in note for note in answer.notes)
    usual = ask(harness, Question(remove_nodes=()), default_ms=MINUTE)
    assert any("as long as such jobs usually did" in note for note in usual.notes)


@pytest.mark.parametrize(
    ("question", "error"),
    [
        (Question(remove_nodes=("n9",)), NotFound),
        (Question(add_nodes=1, like="n9"), NotFound),
        (Question(add_nodes=-1), InvalidInput),
        (Question(add_nodes=10_001), InvalidInput),
        (Question((a_job_spec(profile="nope"),)), InvalidInput),
    ],
    ids=["an unknown node to remove", "an unknown node to copy", "a negative count", "too many", "an unknown profile"],
)
def test_an_invalid_question_is_refused(question, error):
    with pytest.raises(error):
        ask(busy_cluster(), question)


@pytest.mark.parametrize(
    "profile",
    [
        ProfileConfig(plugins=("os:system",)),
        ProfileConfig(worker_selection="os:system"),
        ProfileConfig(scores={"os:system": 1}),
        ProfileConfig(queue="os:system"),
        ProfileConfig(secondary="os:system"),
        ProfileConfig(score_plugins=("os:system",)),
        ProfileConfig(options={"fgd": {"typical": "x" * 1000}}),
    ],
    ids=[
        "as a plugin",
        "as a strategy",
        "as a score",
        "as a queue",
        "as a second order",
        "as the only score",
        "as a huge option",
    ],
)
def test_a_trial_policy_may_name_only_plugins_of_the_server(profile):
    with pytest.raises(InvalidInput):
        check_trial_policy(SchedulingConfig(profiles={"default": profile}), SchedulingConfig())
    live = SchedulingConfig(profiles={"default": profile})
    assert check_trial_policy(live, live) is live, "what the server already uses may be tried"
