"""A plugin that raises or returns an invalid answer is contained and reported; only its own gang is affected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builders import NOW_MS, a_job, a_node
from hodei.control.controller import Controller
from hodei.control.explain.why import why
from hodei.engine.points import PerNode, Placed
from hodei.engine.profile import make_profile
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.job import Reason
from hodei.plugins.registry import build_profile


class Faulty:
    """A plugin with one point, which returns `answer` for jobs that are not named `good`."""

    name = "faulty"
    reads = "usage"

    def __init__(self, point: str, answer: Any) -> None:
        def call(first, *rest):
            spec = first.job
            if spec.name == "good":
                return {"filter": (), "bind": rest[0] if rest else None}.get(point)
            return answer(*rest)

        setattr(self, point, call)

    def key(self, member):
        return member.job.name


def _raise(*_: Any) -> Any:
    raise RuntimeError("broken")


REFUSING = [
    pytest.param("pre_filter", _raise, id="pre_filter raises"),
    pytest.param("pre_filter", lambda *_: "no", id="pre_filter returns a text"),
    pytest.param("filter", _raise, id="filter raises"),
    pytest.param("filter", lambda *_: None, id="filter returns nothing"),
    pytest.param("filter", lambda nodes, _: [(np.zeros(99, dtype=bool), Reason("w", "W", "w"))], id="a mask too long"),
    pytest.param("filter", lambda nodes, _: [(nodes.zeros(), Reason("w", "W", "w"))], id="a mask of numbers"),
    pytest.param("filter", lambda nodes, _: [(nodes.none(), "because")], id="a text for a reason"),
    pytest.param("filter", lambda nodes, _: [nodes.none()], id="a mask without a reason"),
    pytest.param("reserve", _raise, id="reserve raises"),
    pytest.param("reserve", lambda *_: True, id="reserve returns a boolean"),
    pytest.param("permit", _raise, id="permit raises"),
    pytest.param("permit", lambda *_: 0, id="permit returns a number"),
]
TOLERABLE = [
    pytest.param("score", _raise, id="score raises"),
    pytest.param("score", lambda nodes, _: np.zeros(99, dtype=np.int64), id="scores too many"),
    pytest.param("score", lambda nodes, _: np.zeros(len(nodes)), id="scores with fractions"),
    pytest.param("score", lambda nodes, _: "high", id="a text for scores"),
    pytest.param("bind", _raise, id="bind raises"),
    pytest.param("bind", lambda *_: None, id="bind returns nothing"),
    pytest.param("bind", lambda *_: [], id="bind returns too few"),
    pytest.param("bind", lambda *_: ["n1"], id="bind returns texts"),
]


def _controller(*plugins: Any, weight: int = 10) -> Controller:
    default = build_profile("default")
    plugins_of_profile = [
        *default.filters,
        *(w.plugin for w in default.scores if w.plugin not in default.filters),
        *plugins,
    ]
    weights = {w.plugin.name: w.weight for w in default.scores} | {plugin.name: weight for plugin in plugins}
    controller = Controller({"default": make_profile("default", default.queue, plugins_of_profile, weights)})
    controller.step(NOW_MS, [NodeJoined(a_node("n1", 4)), NodeJoined(a_node("n2", 4))])
    return controller


def _submit(controller: Controller):
    jobs = [a_job(1, name="good"), a_job(2, name="bad"), a_job(3, name="good")]
    return controller.step(NOW_MS, [JobSubmitted(job) for job in jobs])


@pytest.mark.parametrize(("point", "answer"), REFUSING)
def test_a_failing_rule_refuses_its_gang_and_other_gangs_are_placed(point, answer):
    controller = _controller(Faulty(point, answer))
    plan = _submit(controller).plan
    assert {bind.job for bind in plan.binds} == {1, 3}
    assert {(fault.plugin, fault.point, fault.job) for fault in plan.faults} == {("faulty", point, 2)}
    (refusal,) = plan.refusals
    assert "PLUGIN_FAILED" in {verdict.reason.code for verdict in refusal.verdicts}
    assert controller.cluster.jobs[2].reason_code == "PLUGIN_FAILED"
    assert not controller.cluster.table.usage(0).get("gpu")
    assert int(controller.cluster.table.runs.sum()) == 2


@pytest.mark.parametrize(("point", "answer"), REFUSING)
def test_a_gang_refused_by_a_failing_plugin_is_retried_later(point, answer):
    controller = _controller(Faulty(point, answer))
    _submit(controller)
    due = controller.next_wakeup_ms(NOW_MS)
    assert due is not None
    assert NOW_MS + 1000 <= due <= NOW_MS + 1100
    assert why(controller, 2, NOW_MS).code == "BACKOFF"
    assert [refusal.job for refusal in controller.step(due).plan.refusals] == [2]
    next_due = controller.next_wakeup_ms(due)
    assert next_due is not None
    assert due + 2000 <= next_due <= due + 2200


@pytest.mark.parametrize(("point", "answer"), TOLERABLE)
def test_a_failing_score_or_bind_is_ignored(point, answer):
    plan = _submit(_controller(Faulty(point, answer))).plan
    assert {bind.job for bind in plan.binds} == {1, 2, 3}
    assert {(fault.plugin, fault.point, fault.job) for fault in plan.faults} == {("faulty", point, 2)}


def test_a_plugin_fault_is_emitted_as_an_event():
    done = _submit(_controller(Faulty("filter", _raise)))
    (event,) = [
        save.event for save in done.saves if getattr(save, "event", None) and save.event.kind == "plugin.failed"
    ]
    assert event.detail["plugin"] == "faulty"
    assert event.detail["error"] == "RuntimeError: broken"


def test_a_plugin_that_recovers_is_used_again():
    class Recovering:
        name = "recovering"
        reads = "usage"
        works = False

        def key(self, member):
            return None

        def filter(self, member, nodes, view):
            if not self.works:
                raise RuntimeError("broken")
            return ()

    plugin = Recovering()
    controller = _controller(plugin)
    assert not controller.step(NOW_MS, [JobSubmitted(a_job(1))]).plan.binds
    plugin.works = True
    due = controller.next_wakeup_ms(NOW_MS)
    assert [bind.job for bind in controller.step(due).plan.binds] == [1]


@pytest.mark.parametrize("score", [-5, 10**9, -(2**62)])
def test_a_score_out_of_bounds_is_clipped_and_never_selects_a_refused_node(score):
    class Extreme:
        name = "extreme"
        reads = "usage"

        def key(self, member):
            return None

        def score(self, member, nodes, view):
            return nodes.zeros() + score

    controller = _controller(Extreme(), weight=1000)
    controller.step(NOW_MS, [NodeJoined(a_node("n0", 1, "1Mi"))])
    plan = controller.step(
        NOW_MS, [JobSubmitted(a_job(1, cpu="4", memory="1Gi")), JobSubmitted(a_job(2, cpu="4"))]
    ).plan
    assert sorted(bind.node for bind in plan.binds) == ["n1", "n2"]
    terms = {term.plugin: term.score for term in plan.binds[0].decision.chosen.terms}
    assert terms["extreme"] == (0 if score < 0 else 10_000)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(_raise, id="raises"),
        pytest.param(lambda raw, feasible: raw[:1], id="returns too few"),
        pytest.param(lambda raw, feasible: raw / 3, id="returns fractions"),
        pytest.param(lambda raw, feasible: None, id="returns nothing"),
    ],
)
def test_a_normalize_that_fails_counts_as_no_opinion(answer):
    class Odd:
        name = "odd"
        reads = "static"

        def key(self, member):
            return None

        def score(self, member, nodes, view):
            return nodes.zeros()

        def normalize(self, raw, feasible):
            return answer(raw, feasible)

    plan = _submit(_controller(Odd())).plan
    assert {bind.job for bind in plan.binds} == {1, 2, 3}
    assert {fault.point for fault in plan.faults} == {"normalize"}


def test_a_filter_may_be_a_generator():
    class Yields:
        name = "yields"
        reads = "usage"

        def key(self, member):
            return None

        def filter(self, member, nodes, view):
            yield ~nodes.none(), Reason("yields", "NEVER", "never")

    plan = _submit(_controller(Yields())).plan
    assert not plan.binds
    assert not plan.faults


@pytest.mark.parametrize(
    "key", [pytest.param(_raise, id="raises"), pytest.param(lambda member: ["a list"], id="cannot be hashed")]
)
def test_a_failing_key_makes_every_member_distinct(key):
    class WithoutKey(PerNode):
        name = "without-key"

        def refuse(self, member, node, used):
            return "not for bad jobs" if member.job.name == "bad" else None

    plugin = WithoutKey()
    plugin.key = key
    plan = _submit(_controller(plugin)).plan
    assert {bind.job for bind in plan.binds} == {1, 3}


def test_bind_may_add_details_but_not_move_placements():
    class Mover:
        name = "mover"

        def bind(self, gang, placements, view):
            return [Placed(p.member, p.index, 1 - p.row, p.node, p.decision) for p in placements]

    plan = _submit(_controller(Mover())).plan
    assert len(plan.binds) == 3
    assert {fault.point for fault in plan.faults} == {"bind"}


def test_a_plugin_that_reads_the_cluster_is_called_each_time():
    class Evenings:
        """No `reads`: anything may have changed."""

        name = "evenings"
        requeue_on = ("node_changed",)

        def key(self, member):
            return None

        def filter(self, member, nodes, view):
            return [(~nodes.none(), Reason("evenings", "CLOSED", "closed"))] if view.now_ms > NOW_MS else ()

    controller = _controller(Evenings())
    assert len(controller.step(NOW_MS, [JobSubmitted(a_job(1))]).plan.binds) == 1
    later = controller.step(NOW_MS + 1, [JobSubmitted(a_job(2))]).plan
    assert not later.binds
    assert later.refusals[0].verdicts[0].reason.code == "CLOSED"


def test_reserve_is_undone_by_a_later_refusal_and_after_a_trial():
    class Ledger:
        name = "ledger"
        open = 0

        def key(self, member):
            return None

        def reserve(self, gang, placements, view):
            self.open += len(placements)

        def unreserve(self, gang, placements):
            self.open -= len(placements)

    class Guard:
        name = "guard"

        def key(self, member):
            return member.job.name

        def permit(self, gang, placements, view):
            return Reason("guard", "NOT_NOW", "not now") if gang.job.name == "bad" else None

    ledger = Ledger()
    controller = _controller(ledger, Guard())
    plan = _submit(controller).plan
    assert {bind.job for bind in plan.binds} == {1, 3}
    assert plan.refusals[0].verdicts[0].reason.code == "NOT_NOW"
    assert ledger.open == 2
    assert why(controller, 2, NOW_MS).code == "NOT_NOW"
    assert ledger.open == 2


def test_post_filter_is_called_after_a_refusal():
    class Recorder:
        name = "recorder"
        called: list[int] = []

        def post_filter(self, gang, view):
            self.called.append(gang.id)

    recorder = Recorder()
    controller = _controller(recorder)
    controller.step(NOW_MS, [JobSubmitted(a_job(1)), JobSubmitted(a_job(2, cpu="99"))])
    assert recorder.called == [2]
