"""Who waits, who is next, who sleeps, and what wakes them."""

from __future__ import annotations

import pytest

from builders import NOW_MS, a_job_spec
from hodei.control.queue.base import SchedulingQueue
from hodei.engine.plan import Refusal
from hodei.engine.profile import make_profile
from hodei.engine.view import gang_of
from hodei.model.facts import JobCancelled, JobHeld, JobReleased, NodeJoined, NodeOverridden
from hodei.model.job import Reason, Verdict
from hodei.plugins.fit import Fit
from hodei.plugins.queues import Fifo
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, a_harness, some_nodes


def _gang(id, at=0, **fields):
    return gang_of(id, a_job_spec(f"job-{id}", **fields), at)


def _line(queue="fifo", **arguments):
    return SchedulingQueue(build_profile("default", queue=queue, queue_arguments=arguments))


def _add(line, *gangs, **when):
    for gang in gangs:
        line.add(gang, **when)


def _try_all(line, fits=lambda gang: True, requeue_on=("run_ended",)):
    """What a cycle does: each that is ready either starts or is refused."""
    tried = []
    for gang in line.ready():
        tried.append(gang.id)
        if fits(gang):
            line.started(gang)
        else:
            line.refused(gang, Refusal(gang.id, (), requeue_on=requeue_on))
    return tried


def _never(_):
    return False


def test_fifo_is_in_order_of_submission_whatever_the_priority():
    line = _line("fifo")
    _add(line, _gang(1, at=30, priority="critical"), _gang(2, at=10, priority="low"), _gang(3, at=20))
    assert _try_all(line) == [2, 3, 1]


def test_priority_goes_critical_high_medium_low_and_by_submission_within():
    line = _line("priority")
    _add(
        line,
        _gang(1, at=1, priority="low"),
        _gang(2, at=2, priority="medium"),
        _gang(3, at=3, priority="high"),
        _gang(4, at=4, priority="critical"),
        _gang(5, at=0, priority="medium"),
        _gang(6, at=9, priority=751),
    )
    assert _try_all(line) == [4, 6, 3, 5, 2, 1]


def test_equal_times_are_told_apart_by_the_number():
    line = _line("fifo")
    _add(line, _gang(2), _gang(1), _gang(3))
    assert _try_all(line) == [1, 2, 3]


def _by_tenant(ids):
    return "".join("r" if id < 100 else "b" for id in ids)


def test_fair_takes_turns_between_tenants():
    line = _line("fair")
    _add(
        line, *(_gang(id, project="red") for id in range(1, 5)), *(_gang(id, project="blue") for id in range(100, 104))
    )
    assert _by_tenant(_try_all(line)) == "brbrbrbr"


def test_weights_are_kept_over_many_starts():
    line = _line("fair", weights={"red": 3})
    _add(
        line, *(_gang(id, project="red") for id in range(1, 61)), *(_gang(id, project="blue") for id in range(100, 160))
    )
    order = _by_tenant(_try_all(line))
    for end in range(8, 81, 8):
        assert abs(order[:end].count("r") - end * 3 // 4) <= 1, order[:end]


def test_weights_are_kept_also_when_room_comes_one_by_one():
    """Between two starts everyone sleeps and is woken: that must not count as being idle."""
    line = _line("fair", weights={"red": 3})
    _add(
        line, *(_gang(id, project="red") for id in range(1, 61)), *(_gang(id, project="blue") for id in range(100, 160))
    )
    order = []
    for _ in range(40):
        room = [1]
        tried = _try_all(line, fits=lambda gang, room=room: bool(room) and (order.append(gang.id), room.pop()))
        assert tried
        line.wake("run_ended")
    assert _by_tenant(order).count("r") == 30


def test_an_idle_tenant_saves_nothing_up():
    line = _line("fair")
    _add(line, *(_gang(id, project="red") for id in range(1, 21)))
    _try_all(line)
    _add(
        line,
        *(_gang(id, project="red") for id in range(21, 31)),
        *(_gang(id, project="blue") for id in range(100, 110)),
    )
    assert _by_tenant(_try_all(line)[:10]).count("b") in (5, 6)


def test_a_tenant_that_waits_keeps_its_turn_also_when_more_of_its_work_comes():
    line = _line("fair")
    _add(line, _gang(100, project="blue", cpu="8"), *(_gang(id, project="red") for id in range(1, 11)))
    assert len(_try_all(line, fits=lambda gang: gang.id < 100)) == 11
    _add(line, *(_gang(id, project="blue", cpu="8") for id in range(101, 105)))
    _add(line, *(_gang(id, project="red") for id in range(11, 16)))
    line.wake("run_ended")
    assert _by_tenant(_try_all(line)) == "bbbbb" + "rrrrr"


def test_a_tenant_that_was_busy_alone_is_not_punished_for_it():
    line = _line("fair")
    _add(line, *(_gang(id, project="red") for id in range(1, 51)))
    assert len(_try_all(line)) == 50
    _add(
        line, _gang(100, project="blue"), _gang(101, project="blue"), _gang(51, project="red"), _gang(52, project="red")
    )
    assert _by_tenant(_try_all(line)) in ("brbr", "rbrb", "bbrr", "brrb")


def test_long_work_uses_up_more_turns_by_the_quantum():
    line = _line("fair", quantum_ms=60_000)
    _add(line, *(_gang(id, project="red", estimate_ms=180_000) for id in range(1, 10)))
    _add(line, *(_gang(id, project="blue", estimate_ms=1) for id in range(100, 130)))
    order = _by_tenant(_try_all(line))
    assert order[:12].count("b") == 9


def test_wide_gangs_use_up_more_turns():
    line = _line("fair")
    _add(line, *(_gang(id, project="red", count=3) for id in range(1, 10)))
    _add(line, *(_gang(id, project="blue") for id in range(100, 130)))
    assert _by_tenant(_try_all(line))[:12].count("b") == 9


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        pytest.param("project", {"project": "a"}, {"project": "b"}, id="by project"),
        pytest.param("user", {"user": "a"}, {"user": "b"}, id="by user"),
        pytest.param("label:team", {"labels": {"team": "a"}}, {"labels": {"team": "b"}}, id="by a label"),
        pytest.param("label:team", {"labels": {"team": "a"}}, {}, id="by a label that not all have"),
    ],
)
def test_tenants_are_told_apart_by_the_key(key, one, other):
    line = _line("fair", tenant_key=key)
    _add(line, *(_gang(id, **one) for id in range(1, 4)), *(_gang(id, **other) for id in range(100, 103)))
    assert _by_tenant(_try_all(line)) in ("rbrbrb", "brbrbr")


def test_a_refused_head_puts_its_equals_to_sleep():
    line = _line()
    _add(line, *(_gang(id, cpu="8") for id in range(1, 1000)), _gang(1000, cpu="1"))
    assert _try_all(line, _never) == [1, 1000]
    assert _try_all(line, _never) == []


def test_a_group_is_woken_by_its_own_trigger_only_and_then_only_its_head_is_tried():
    line = _line()
    _add(line, *(_gang(id) for id in range(1, 6)))
    assert _try_all(line, _never, requeue_on=("node_joined", "run_ended")) == [1]
    for other in ("node_changed", "job_ended", "time"):
        line.wake(other)
        assert _try_all(line, _never) == []
    line.wake("node_joined")
    assert _try_all(line, _never) == [1]


def test_a_woken_group_goes_on_as_long_as_there_is_room():
    line = _line()
    _add(line, *(_gang(id) for id in range(1, 6)))
    _try_all(line, _never)
    line.wake("run_ended")
    room = [1, 1]
    assert _try_all(line, lambda gang: bool(room) and room.pop()) == [1, 2, 3]
    assert len(line) == 3


def test_one_that_comes_while_its_equals_sleep_sleeps_too():
    line = _line("priority")
    _add(line, _gang(1))
    _try_all(line, _never)
    _add(line, _gang(2, priority=501))
    assert _try_all(line, _never) == []
    line.wake("run_ended")
    assert _try_all(line, _never) == [2]


def test_one_of_a_higher_class_is_tried_although_its_equals_sleep_for_it_may_take_a_place():
    line = _line("priority")
    _add(line, _gang(1))
    _try_all(line, _never)
    _add(line, _gang(2, priority="critical"))
    assert _try_all(line, _never) == [2]


def test_gangs_of_other_size_or_tenant_or_rules_do_not_sleep_with_them():
    line = _line("fair")
    _add(line, _gang(1), _gang(2, count=2), _gang(3, project="blue"), _gang(4, arch="arm64"), _gang(5))
    assert sorted(_try_all(line, _never)) == [1, 2, 3, 4]


def test_when_no_node_has_room_for_one_none_is_asked_again_for_its_like_of_another_tenant():
    line = _line("fair")
    _add(line, _gang(1), _gang(2, project="blue"), _gang(3, project="blue", cpu="2"))
    full = Verdict(Reason("fit", "INSUFFICIENT_CPU", "Insufficient cpu"), 1, ("n1",))
    tried = []
    for gang in line.ready():
        tried.append(gang.id)
        line.refused(gang, Refusal(gang.id, (full,), requeue_on=("run_ended",)))
    assert sorted(tried) == [2, 3], "blue has the first turn"
    assert line.refusal_of(line.gangs[1]) is not None
    line.wake("node_joined")
    assert _try_all(line) == []
    line.wake("run_ended")
    assert sorted(_try_all(line)) == [1, 2, 3]


def test_a_refusal_can_be_read_while_it_lasts():
    line = _line()
    gang = _gang(1)
    _add(line, gang)
    assert line.refusal_of(gang) is None
    _try_all(line, _never)
    assert line.refusal_of(gang).job == 1
    line.wake("run_ended")
    assert line.refusal_of(gang) is None


def test_one_in_its_pause_is_not_tried_before_its_time_and_the_others_go_on():
    line = _line()
    _add(line, _gang(1), not_before_ms=500, now_ms=100)
    _add(line, _gang(2))
    assert line.next_due_ms() == 500
    assert _try_all(line, _never) == [2]
    line.wake("run_ended")
    line.wake_due(499)
    assert _try_all(line, _never) == [2]
    line.wake_due(500)
    assert _try_all(line, _never) == []  # it joins its equals, which sleep
    line.wake("run_ended")
    assert _try_all(line) == [1, 2]
    assert line.next_due_ms() is None


def test_a_pause_that_is_over_already_is_none():
    line = _line()
    _add(line, _gang(1), not_before_ms=100, now_ms=100)
    assert _try_all(line) == [1]


def test_one_that_steps_aside_lets_its_equals_pass():
    line = _line()
    first = _gang(1)
    _add(line, first, _gang(2))
    ready = line.ready()
    assert next(ready).id == 1
    line.back_off(first, 1000)
    assert next(ready).id == 2
    assert line.backing_off_until(1) == 1000


@pytest.mark.parametrize("gone", [1, 2, 3], ids=["the head", "the middle", "the tail"])
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_removals_keep_the_order_of_the_others(gone, asleep):
    line = _line()
    _add(line, *(_gang(id, at=id) for id in (1, 2, 3)))
    if asleep:
        _try_all(line, _never)
    line.remove(gone)
    line.wake("run_ended")
    assert _try_all(line) == [id for id in (1, 2, 3) if id != gone]
    assert len(line) == 0


def test_one_that_leaves_in_its_pause_does_not_come_back():
    line = _line()
    _add(line, _gang(1), not_before_ms=500)
    line.remove(1)
    line.wake_due(1000)
    assert line.next_due_ms() is None
    assert _try_all(line) == []


def test_one_that_leaves_and_returns_is_tried_once():
    line = _line()
    _add(line, *(_gang(id, at=id) for id in (1, 2, 3)))
    line.remove(2)
    _add(line, _gang(2, at=2))
    assert _try_all(line) == [1, 2, 3]
    line.remove(2)
    _add(line, _gang(2, at=2), not_before_ms=10)
    assert _try_all(line) == []


def test_leaving_twice_or_never_having_been_there_is_nothing():
    line = _line()
    assert line.remove(7) is None


def test_the_position_counts_gangs_ahead():
    line = _line("priority")
    gangs = {1: _gang(1, at=1, priority="low"), 2: _gang(2, at=2, priority="high"), 3: _gang(3, at=3, priority="low")}
    _add(line, *gangs.values())
    assert {id: line.position(gang) for id, gang in gangs.items()} == {2: 1, 1: 2, 3: 3}


def test_the_position_in_a_fair_queue_is_the_order_of_tries():
    line = _line("fair", weights={"red": 2})
    gangs = [_gang(id, project="red") for id in range(1, 8)] + [_gang(id, project="blue") for id in range(100, 105)]
    _add(line, *gangs)
    order = sorted(gangs, key=line.position)
    assert [line.position(gang) for gang in order] == list(range(1, 13))
    assert [gang.id for gang in order] == _try_all(line)


def test_a_waiting_job_starts_when_a_run_ends():
    harness = a_harness(1)
    harness.submit(1, 2)
    assert (harness.state(1), harness.state(2)) == ("scheduled", "pending")
    harness.see("1.0.1", "succeeded", 0)
    assert harness.started() == ["2.0.1"]


def test_a_waiting_job_starts_when_a_node_joins_or_changes():
    harness = Harness()
    harness.submit(1, 2, node_selector={"disk": "ssd"})
    assert harness.reason() == ("NO_NODES", "no nodes have joined yet")
    harness.learn(NodeJoined(some_nodes(1)[0]))
    assert harness.reason()[0] == "SELECTOR_MISMATCH"
    harness.learn(NodeOverridden("n1", labels={"disk": "ssd"}))
    assert harness.started() == ["1.0.1"]
    harness.learn(NodeJoined(some_nodes(4)[0]))
    assert harness.started() == ["2.0.1"]


def test_one_waiting_kind_of_job_costs_one_try_per_step():
    harness = a_harness(1)
    harness.submit(*range(1, 200))
    assert len(harness.last.plan.refusals) == 1
    harness.submit(200, 201)
    assert len(harness.last.plan.refusals) == 0
    harness.learn(NodeOverridden("n1", labels={"x": "y"}))
    assert len(harness.last.plan.refusals) == 1


def test_a_long_queue_takes_several_steps_without_a_pause():
    harness = a_harness(64, max_tries=10)
    harness.submit(*range(1, 26), cpu="100m", memory="0")
    assert len(harness.started()) == 10
    assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.now_ms
    harness.later(0)
    harness.later(0)
    assert len(harness.started()) == 5
    assert harness.controller.next_wakeup_ms(harness.now_ms) is None


def test_a_released_job_takes_its_old_place():
    harness = Harness()
    for id in (1, 2, 3):
        harness.submit(id)
        harness.now_ms += 1
    harness.learn(JobHeld(1))
    harness.learn(JobReleased(1))
    harness.learn(NodeJoined(some_nodes(1)[0]))
    assert harness.started() == ["1.0.1"]


def test_a_retried_job_takes_its_old_place():
    harness = a_harness(1)
    harness.submit(1, retries=1)
    harness.now_ms += 1
    harness.submit(2)
    harness.now_ms += 1
    harness.submit(3)
    harness.see("1.0.1", "failed", 1)
    assert harness.started() == ["2.0.1"]
    harness.later(1000)
    harness.see("2.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]


def test_a_cancelled_head_does_not_hold_up_its_equals():
    harness = a_harness(1)
    harness.submit(1, 2, 3)
    harness.learn(JobCancelled(2))
    harness.see("1.0.1", "succeeded", 0)
    assert harness.started() == ["3.0.1"]


def test_one_whom_only_time_can_help_is_tried_again_every_second():
    class Evenings:
        name = "evenings"
        requeue_on = ("time",)

        def key(self, member):
            return None

        def pre_filter(self, gang, view):
            return Reason("evenings", "CLOSED", "opens later") if view.now_ms < NOW_MS + 2500 else None

    harness = a_harness(4, profiles={"default": make_profile("default", Fifo(), [Fit(), Evenings()], {})})
    harness.submit(1)
    for _ in range(2):
        assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.now_ms + 1000
        harness.later(999)
        assert harness.last.empty
        harness.later(1)
        assert harness.started() == []
    harness.later(1000)
    assert harness.started() == ["1.0.1"]
    assert harness.controller.next_wakeup_ms(harness.now_ms) is None


def test_what_goes_from_the_last_on_leaves_nothing_behind_to_be_cleared_up_at_once():
    line = _line()
    _add(line, *(_gang(id, at=id) for id in range(1, 101)))
    for id in range(100, 1, -1):
        line.remove(id)
        assert [len(group.heap) for group in line._groups.values()] == [id - 1]
    assert _try_all(line) == [1]


@pytest.mark.parametrize("gone", [(5, 2, 4), (1, 5, 3), (4, 5), (1, 2), (3,)], ids=str)
def test_a_removal_changes_nothing_for_the_others(gone):
    line = _line()
    _add(line, *(_gang(id, at=id) for id in (3, 1, 5, 2, 4)))
    for id in gone:
        line.remove(id)
    assert _try_all(line) == [id for id in range(1, 6) if id not in gone]
