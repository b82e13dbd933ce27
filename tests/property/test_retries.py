"""Retries never invert the order: a job ahead in the queue is not tried less often than a later one, and no job takes capacity
that one ahead of it could have used."""

from __future__ import annotations

from typing import Any

from hypothesis import given, note
from hypothesis import strategies as st

from builders import a_node
from hodei.engine.nodes import Nodes
from hodei.engine.points import Refusals
from hodei.engine.view import Member, View
from hodei.model.facts import NodeJoined, NodeLost, Reconfigured
from hodei.plugins.registry import PLUGINS
from property.examples import examples
from unit.control.configured import ConfiguredHarness, scheduling

SETTINGS = """
[scheduling.preemption]
enabled = false
[scheduling.breaker]
rounds = 2
pause = "5s"
max_pause = "30s"
[scheduling.escalation]
promote_after = "40s"
promote_to = "medium"
"""
OTHER = SETTINGS + "[scheduling.profiles.default]\nmax_pending = 77\n"

jobs = st.fixed_dictionaries(
    {
        "cpu": st.sampled_from((1, 1, 2, 3)),
        "memory": st.sampled_from(("1Gi", "4Gi")),
        "priority": st.sampled_from(("high", "medium", "low", "scavenger")),
    }
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), jobs),
        st.tuples(st.just("submit"), jobs),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9)),
        st.tuples(st.just("pass"), st.sampled_from((500, 3000, 45_000))),
        st.tuples(st.sampled_from(("lose", "join")), st.integers(1, 2)),
        st.tuples(st.just("reconfigure"), st.sampled_from((SETTINGS, OTHER))),
    ),
    min_size=5,
    max_size=40,
)


@examples(150)
@given(events)
def test_no_job_starts_before_one_ahead_of_it_with_an_equal_or_smaller_request(events: list[tuple[str, Any]]) -> None:
    harness = ConfiguredHarness(SETTINGS, a_node("n1", 3, "8Gi"), a_node("n2", 2, "8Gi"))
    last = 0
    for what, detail in events:
        note(f"{what} {detail}")
        harness.now_ms += 100
        if what == "submit":
            last += 1
            _step(harness, lambda id=last, fields=detail: harness.submit(id, retries=5, **fields))
        elif what in ("end", "fail"):
            live = sorted(id for id, run in harness.runs.items() if run.state in ("placed", "running"))
            if live:
                run = live[detail % len(live)]
                end = ("succeeded", 0) if what == "end" else ("failed", 1)
                _step(harness, lambda run=run, end=end: harness.observe(run, *end))
        elif what == "pass":
            end_ms = harness.now_ms + detail
            while (due := harness.controller.next_wakeup_ms(harness.now_ms)) is not None and due <= end_ms:
                harness.now_ms = max(due, harness.now_ms)
                _step(harness, harness.step)
            harness.now_ms = end_ms
        elif what == "lose":
            _step(harness, lambda node=f"n{detail}": harness.step(NodeLost(node)))
        elif what == "join":
            node = a_node(f"n{detail}", 4 - detail, "8Gi")
            _step(harness, lambda node=node: harness.step(NodeJoined(node)))
        else:
            _step(harness, lambda toml=detail: harness.step(Reconfigured(scheduling(toml))))


def _step(harness: ConfiguredHarness, do: Any) -> None:
    """One step, after which no job ahead of a started one still waits with an equal or smaller request."""
    do()
    queue = harness.controller.queues["default"]
    started = {int(run.partition(".")[0]) for run in harness.started()}
    for behind in started:
        spec = harness.controller.cluster.jobs[behind].spec
        order = (-spec.priority, harness.jobs[behind].submitted_ms, behind)
        for gang in queue.gangs.values():
            if queue.backing_off_until(gang.id) > harness.now_ms:
                continue  # it backs off because its own run failed
            ahead = (-gang.job.priority, gang.submitted_ms, gang.id) < order
            requested, started_request = gang.job.tasks[0].request, spec.tasks[0].request
            no_more = all(amount <= started_request.get(resource, 0) for resource, amount in requested.items())
            assert not (ahead and no_more), f"job {behind} started before job {gang.id}, which requests no more"


class Flaky:
    """A plugin that fails while `broken`."""

    name = "flaky"
    broken = True

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        if Flaky.broken:
            raise RuntimeError("out of order")
        return []


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 8000), st.sampled_from(("high", "medium", "low"))), min_size=2, max_size=8),
    st.integers(20_000, 60_000),
)
def test_while_a_plugin_fails_no_job_is_retried_less_often_than_a_later_one(
    arrivals: list[tuple[int, str]], ms: int
) -> None:
    Flaky.broken = True
    PLUGINS["flaky"] = Flaky
    try:
        harness = ConfiguredHarness('[scheduling.profiles.default]\nplugins = ["flaky"]\n', a_node("n1", 64))
        queue = harness.controller.queues["default"]
        since: dict[int, dict[int, int]] = {}
        for id, (pause, priority) in enumerate(arrivals, 1):
            harness.run_for(pause)
            since[id] = {other: gang.attempts for other, gang in queue.gangs.items()}
            harness.submit(id, priority=priority)
        harness.run_for(ms)
        order = {id: (-gang.job.priority, gang.submitted_ms, id) for id, gang in queue.gangs.items()}
        for behind, before in since.items():
            retries = queue.gangs[behind].attempts - 1  # the first try is not a retry
            for ahead, had in before.items():
                if order[ahead] < order[behind]:
                    assert queue.gangs[ahead].attempts - had >= retries
    finally:
        del PLUGINS["flaky"]
        Flaky.broken = False


def test_a_retry_does_not_invert_priorities() -> None:
    """The failure elsewhere: the backoff of a refused high job doubles each time, and when capacity is freed it still backs off
    while a new low job takes the capacity."""
    harness = ConfiguredHarness(SETTINGS, a_node("n1", 1))
    harness.submit(1, priority="low")
    harness.submit(2, priority="high")
    for _ in range(20):
        harness.run_for(30_000)  # it is refused at every try
    harness.submit(3, priority="scavenger")
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == ["2.0.1"]
