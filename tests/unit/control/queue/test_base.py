"""The scheduling queue: order, tenants, parked groups and their triggers, backoff, positions."""

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


def _queue(policy="fifo", **arguments):
    return SchedulingQueue(build_profile("default", queue=policy, queue_arguments=arguments))


def _add(queue, *gangs, **when):
    for gang in gangs:
        queue.add(gang, **when)


def _try_all(queue, fits=lambda gang: True, requeue_on=("run_ended",)):
    """One cycle: every ready gang starts or is refused. Returns the tried ids."""
    tried = []
    for gang in queue.ready():
        tried.append(gang.id)
        if fits(gang):
            queue.started(gang)
        else:
            queue.refused(gang, Refusal(gang.id, (), requeue_on=requeue_on))
    return tried


def _never(_):
    return False


def test_fifo_is_in_order_of_submission_whatever_the_priority():
    queue = _queue("fifo")
    _add(queue, _gang(1, at=30, priority="critical"), _gang(2, at=10, priority="low"), _gang(3, at=20))
    assert _try_all(queue) == [2, 3, 1]


def test_priority_goes_critical_high_medium_low_and_by_submission_within():
    queue = _queue("priority")
    _add(
        queue,
        _gang(1, at=1, priority="low"),
        _gang(2, at=2, priority="medium"),
        _gang(3, at=3, priority="high"),
        _gang(4, at=4, priority="critical"),
        _gang(5, at=0, priority="medium"),
        _gang(6, at=9, priority=751),
    )
    assert _try_all(queue) == [4, 6, 3, 5, 2, 1]


def test_equal_submission_times_are_ordered_by_id():
    queue = _queue("fifo")
    _add(queue, _gang(2), _gang(1), _gang(3))
    assert _try_all(queue) == [1, 2, 3]


def _by_tenant(ids):
    return "".join("r" if id < 100 else "b" for id in ids)


def test_a_fair_queue_alternates_between_tenants():
    queue = _queue("fair")
    _add(
        queue, *(_gang(id, project="red") for id in range(1, 5)), *(_gang(id, project="blue") for id in range(100, 104))
    )
    assert _by_tenant(_try_all(queue)) == "brbrbrbr"


def test_tenant_weights_hold_over_many_starts():
    queue = _queue("fair", weights={"red": 3})
    _add(
        queue,
        *(_gang(id, project="red") for id in range(1, 61)),
        *(_gang(id, project="blue") for id in range(100, 160)),
    )
    order = _by_tenant(_try_all(queue))
    for end in range(8, 81, 8):
        assert abs(order[:end].count("r") - end * 3 // 4) <= 1, order[:end]


def test_tenant_weights_hold_when_capacity_is_freed_one_by_one():
    """Between two starts all gangs are parked and retried, which does not count as idle time of a tenant."""
    queue = _queue("fair", weights={"red": 3})
    _add(
        queue,
        *(_gang(id, project="red") for id in range(1, 61)),
        *(_gang(id, project="blue") for id in range(100, 160)),
    )
    order = []
    for _ in range(40):
        slots = [1]
        tried = _try_all(queue, fits=lambda gang, slots=slots: bool(slots) and (order.append(gang.id), slots.pop()))
        assert tried
        queue.wake("run_ended")
    assert _by_tenant(order).count("r") == 30


def test_an_idle_tenant_accumulates_no_turns():
    queue = _queue("fair")
    _add(queue, *(_gang(id, project="red") for id in range(1, 21)))
    _try_all(queue)
    _add(
        queue,
        *(_gang(id, project="red") for id in range(21, 31)),
        *(_gang(id, project="blue") for id in range(100, 110)),
    )
    assert _by_tenant(_try_all(queue)[:10]).count("b") in (5, 6)


def test_a_waiting_tenant_keeps_its_turns_when_it_submits_more():
    queue = _queue("fair")
    _add(queue, _gang(100, project="blue", cpu="8"), *(_gang(id, project="red") for id in range(1, 11)))
    assert len(_try_all(queue, fits=lambda gang: gang.id < 100)) == 11
    _add(queue, *(_gang(id, project="blue", cpu="8") for id in range(101, 105)))
    _add(queue, *(_gang(id, project="red") for id in range(11, 16)))
    queue.wake("run_ended")
    assert _by_tenant(_try_all(queue)) == "bbbbb" + "rrrrr"


def test_turns_used_without_competition_do_not_count_later():
    queue = _queue("fair")
    _add(queue, *(_gang(id, project="red") for id in range(1, 51)))
    assert len(_try_all(queue)) == 50
    _add(
        queue,
        _gang(100, project="blue"),
        _gang(101, project="blue"),
        _gang(51, project="red"),
        _gang(52, project="red"),
    )
    assert _by_tenant(_try_all(queue)) in ("brbr", "rbrb", "bbrr", "brrb")


def test_long_jobs_use_more_turns():
    queue = _queue("fair", quantum_ms=60_000)
    _add(queue, *(_gang(id, project="red", estimate_ms=180_000) for id in range(1, 10)))
    _add(queue, *(_gang(id, project="blue", estimate_ms=1) for id in range(100, 130)))
    order = _by_tenant(_try_all(queue))
    assert order[:12].count("b") == 9


def test_wide_gangs_use_more_turns():
    queue = _queue("fair")
    _add(queue, *(_gang(id, project="red", count=3) for id in range(1, 10)))
    _add(queue, *(_gang(id, project="blue") for id in range(100, 130)))
    assert _by_tenant(_try_all(queue))[:12].count("b") == 9


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        pytest.param("project", {"project": "a"}, {"project": "b"}, id="by project"),
        pytest.param("user", {"user": "a"}, {"user": "b"}, id="by user"),
        pytest.param("label:team", {"labels": {"team": "a"}}, {"labels": {"team": "b"}}, id="by a label"),
        pytest.param("label:team", {"labels": {"team": "a"}}, {}, id="by a label that not all have"),
    ],
)
def test_the_tenant_key_selects_the_tenant(key, one, other):
    queue = _queue("fair", tenant_key=key)
    _add(queue, *(_gang(id, **one) for id in range(1, 4)), *(_gang(id, **other) for id in range(100, 103)))
    assert _by_tenant(_try_all(queue)) in ("rbrbrb", "brbrbr")


def test_a_refused_head_parks_its_group():
    queue = _queue()
    _add(queue, *(_gang(id, cpu="8") for id in range(1, 1000)), _gang(1000, cpu="1"))
    assert _try_all(queue, _never) == [1, 1000]
    assert _try_all(queue, _never) == []


def test_a_parked_group_is_retried_by_its_own_triggers_only_head_first():
    queue = _queue()
    _add(queue, *(_gang(id) for id in range(1, 6)))
    assert _try_all(queue, _never, requeue_on=("node_joined", "run_ended")) == [1]
    for other in ("node_changed", "job_ended", "time"):
        queue.wake(other)
        assert _try_all(queue, _never) == []
    queue.wake("node_joined")
    assert _try_all(queue, _never) == [1]


def test_an_unparked_group_is_tried_while_its_gangs_fit():
    queue = _queue()
    _add(queue, *(_gang(id) for id in range(1, 6)))
    _try_all(queue, _never)
    queue.wake("run_ended")
    slots = [1, 1]
    assert _try_all(queue, lambda gang: bool(slots) and slots.pop()) == [1, 2, 3]
    assert len(queue) == 3


def test_a_gang_added_to_a_parked_group_is_parked():
    queue = _queue("priority")
    _add(queue, _gang(1))
    _try_all(queue, _never)
    _add(queue, _gang(2, priority=501))
    assert _try_all(queue, _never) == []
    queue.wake("run_ended")
    assert _try_all(queue, _never) == [2]


def test_a_gang_of_a_higher_class_is_tried_despite_a_parked_group_because_it_may_preempt():
    queue = _queue("priority")
    _add(queue, _gang(1))
    _try_all(queue, _never)
    _add(queue, _gang(2, priority="critical"))
    assert _try_all(queue, _never) == [2]


def test_gangs_of_another_size_or_tenant_or_rule_are_not_parked_together():
    queue = _queue("fair")
    _add(queue, _gang(1), _gang(2, count=2), _gang(3, project="blue"), _gang(4, arch="arm64"), _gang(5))
    assert sorted(_try_all(queue, _never)) == [1, 2, 3, 4]


def test_a_refusal_for_capacity_parks_equal_gangs_of_other_tenants_too():
    queue = _queue("fair")
    _add(queue, _gang(1), _gang(2, project="blue"), _gang(3, project="blue", cpu="2"))
    full = Verdict(Reason("fit", "INSUFFICIENT_CPU", "Insufficient cpu"), 1, ("n1",))
    tried = []
    for gang in queue.ready():
        tried.append(gang.id)
        queue.refused(gang, Refusal(gang.id, (full,), requeue_on=("run_ended",)))
    assert sorted(tried) == [2, 3], "blue is first"
    assert queue.refusal_of(queue.gangs[1]) is not None
    queue.wake("node_joined")
    assert _try_all(queue) == []
    queue.wake("run_ended")
    assert sorted(_try_all(queue)) == [1, 2, 3]


def test_a_refusal_can_be_read_while_the_gang_is_parked():
    queue = _queue()
    gang = _gang(1)
    _add(queue, gang)
    assert queue.refusal_of(gang) is None
    _try_all(queue, _never)
    assert queue.refusal_of(gang).job == 1
    queue.wake("run_ended")
    assert queue.refusal_of(gang) is None


def test_a_gang_in_backoff_is_not_tried_early_and_does_not_block_others():
    queue = _queue()
    _add(queue, _gang(1), not_before_ms=500, now_ms=100)
    _add(queue, _gang(2))
    assert queue.next_due_ms() == 500
    assert _try_all(queue, _never) == [2]
    queue.wake("run_ended")
    queue.wake_due(499)
    assert _try_all(queue, _never) == [2]
    queue.wake_due(500)
    assert _try_all(queue, _never) == []  # it joins its parked group
    queue.wake("run_ended")
    assert _try_all(queue) == [1, 2]
    assert queue.next_due_ms() is None


def test_a_backoff_in_the_past_has_no_effect():
    queue = _queue()
    _add(queue, _gang(1), not_before_ms=100, now_ms=100)
    assert _try_all(queue) == [1]


def test_a_gang_that_backs_off_lets_its_group_continue():
    queue = _queue()
    first = _gang(1)
    _add(queue, first, _gang(2))
    ready = queue.ready()
    assert next(ready).id == 1
    queue.back_off(first, 1000)
    assert next(ready).id == 2
    assert queue.backing_off_until(1) == 1000


@pytest.mark.parametrize("removed", [1, 2, 3], ids=["the head", "the middle", "the tail"])
@pytest.mark.parametrize("parked", [False, True], ids=["ready", "parked"])
def test_removals_keep_the_order_of_the_others(removed, parked):
    queue = _queue()
    _add(queue, *(_gang(id, at=id) for id in (1, 2, 3)))
    if parked:
        _try_all(queue, _never)
    queue.remove(removed)
    queue.wake("run_ended")
    assert _try_all(queue) == [id for id in (1, 2, 3) if id != removed]
    assert len(queue) == 0


def test_a_gang_removed_in_backoff_does_not_come_back():
    queue = _queue()
    _add(queue, _gang(1), not_before_ms=500)
    queue.remove(1)
    queue.wake_due(1000)
    assert queue.next_due_ms() is None
    assert _try_all(queue) == []


def test_a_gang_removed_and_added_again_is_tried_once():
    queue = _queue()
    _add(queue, *(_gang(id, at=id) for id in (1, 2, 3)))
    queue.remove(2)
    _add(queue, _gang(2, at=2))
    assert _try_all(queue) == [1, 2, 3]
    queue.remove(2)
    _add(queue, _gang(2, at=2), not_before_ms=10)
    assert _try_all(queue) == []


def test_removing_an_unknown_gang_does_nothing():
    queue = _queue()
    assert queue.remove(7) is None


def test_the_position_counts_gangs_ahead():
    queue = _queue("priority")
    gangs = {1: _gang(1, at=1, priority="low"), 2: _gang(2, at=2, priority="high"), 3: _gang(3, at=3, priority="low")}
    _add(queue, *gangs.values())
    assert {id: queue.position(gang) for id, gang in gangs.items()} == {2: 1, 1: 2, 3: 3}


def test_the_position_in_a_fair_queue_is_the_order_of_tries():
    queue = _queue("fair", weights={"red": 2})
    gangs = [_gang(id, project="red") for id in range(1, 8)] + [_gang(id, project="blue") for id in range(100, 105)]
    _add(queue, *gangs)
    order = sorted(gangs, key=queue.position)
    assert [queue.position(gang) for gang in order] == list(range(1, 13))
    assert [gang.id for gang in order] == _try_all(queue)


def test_a_pending_job_starts_when_a_run_ends():
    harness = a_harness(1)
    harness.submit(1, 2)
    assert (harness.state(1), harness.state(2)) == ("scheduled", "pending")
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == ["2.0.1"]


def test_a_pending_job_starts_when_a_node_joins_or_changes():
    harness = Harness()
    harness.submit(1, 2, node_selector={"disk": "ssd"})
    assert harness.reason() == ("NO_NODES", "no nodes have joined yet")
    harness.step(NodeJoined(some_nodes(1)[0]))
    assert harness.reason()[0] == "SELECTOR_MISMATCH"
    harness.step(NodeOverridden("n1", labels={"disk": "ssd"}))
    assert harness.started() == ["1.0.1"]
    harness.step(NodeJoined(some_nodes(4)[0]))
    assert harness.started() == ["2.0.1"]


def test_a_group_of_equal_jobs_costs_one_try_per_step():
    harness = a_harness(1)
    harness.submit(*range(1, 200))
    assert len(harness.last.plan.refusals) == 1
    harness.submit(200, 201)
    assert len(harness.last.plan.refusals) == 0
    harness.step(NodeOverridden("n1", labels={"x": "y"}))
    assert len(harness.last.plan.refusals) == 1


def test_a_long_queue_takes_several_steps_without_a_pause():
    harness = a_harness(64, max_tries=10)
    harness.submit(*range(1, 26), cpu="100m", memory="0")
    assert len(harness.started()) == 10
    assert harness.controller.next_wakeup_ms(harness.now_ms) == harness.now_ms
    harness.advance(0)
    harness.advance(0)
    assert len(harness.started()) == 5
    assert harness.controller.next_wakeup_ms(harness.now_ms) is None


def test_a_released_job_keeps_its_queue_position():
    harness = Harness()
    for id in (1, 2, 3):
        harness.submit(id)
        harness.now_ms += 1
    harness.step(JobHeld(1))
    harness.step(JobReleased(1))
    harness.step(NodeJoined(some_nodes(1)[0]))
    assert harness.started() == ["1.0.1"]


def test_a_retried_job_keeps_its_queue_position():
    harness = a_harness(1)
    harness.submit(1, retries=1)
    harness.now_ms += 1
    harness.submit(2)
    harness.now_ms += 1
    harness.submit(3)
    harness.observe("1.0.1", "failed", 1)
    assert harness.started() == ["2.0.1"]
    harness.advance(1000)
    harness.observe("2.0.1", "succeeded", 0)
    assert harness.started() == ["1.0.2"]


def test_a_cancelled_head_does_not_block_its_group():
    harness = a_harness(1)
    harness.submit(1, 2, 3)
    harness.step(JobCancelled(2))
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == ["3.0.1"]


def test_a_job_refused_until_a_later_time_is_retried_every_second():
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
        harness.advance(999)
        assert harness.last.empty
        harness.advance(1)
        assert harness.started() == []
    harness.advance(1000)
    assert harness.started() == ["1.0.1"]
    assert harness.controller.next_wakeup_ms(harness.now_ms) is None


def test_removals_from_the_tail_shrink_the_heap_at_once():
    queue = _queue()
    _add(queue, *(_gang(id, at=id) for id in range(1, 101)))
    for id in range(100, 1, -1):
        queue.remove(id)
        assert [len(group.heap) for group in queue._groups.values()] == [id - 1]
    assert _try_all(queue) == [1]


@pytest.mark.parametrize("removed", [(5, 2, 4), (1, 5, 3), (4, 5), (1, 2), (3,)], ids=str)
def test_a_removal_does_not_change_the_order_of_the_others(removed):
    queue = _queue()
    _add(queue, *(_gang(id, at=id) for id in (3, 1, 5, 2, 4)))
    for id in removed:
        queue.remove(id)
    assert _try_all(queue) == [id for id in range(1, 6) if id not in removed]
