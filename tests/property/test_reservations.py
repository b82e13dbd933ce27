"""Reservations and start reservations are kept under random events, as long as runs do not exceed their estimates."""

from __future__ import annotations

import heapq
from typing import Any

from hypothesis import given, note
from hypothesis import strategies as st

from builders import NOW_MS, a_job, a_job_spec, a_node, amounts
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.reservations.reservations import choose_nodes
from hodei.model.effects import SaveRun, Start, Stop
from hodei.model.errors import HodeiError
from hodei.model.facts import (
    Fact,
    JobCancelled,
    JobSubmitted,
    NodeJoined,
    ReservationDeleted,
    ReservationMade,
    RunObserved,
)
from hodei.model.job import RUN_ENDED, Run
from hodei.model.reservation import Reservation, ReservationSpec
from hodei.plugins.registry import build_profile
from property.examples import examples

MINUTE = 60_000
PROJECTS = ("red", "blue", "green")
PROFILES = ("default", "easy", "conservative")

jobs = st.fixed_dictionaries({
    "profile": st.sampled_from(PROFILES),
    "project": st.sampled_from(PROJECTS),
    "cpu": st.integers(1, 4),
    "count": st.integers(1, 3),
    "estimate_ms": st.sampled_from((0, 1, 5, 20, 60)).map(lambda minutes: minutes * MINUTE),
    "priority": st.sampled_from(("low", "medium", "critical")),
    # The actual run time in percent of the estimate.
    "runtime_percent": st.integers(1, 100),
})  # fmt: skip
reservation_fields = st.fixed_dictionaries({
    "project": st.sampled_from(PROJECTS),
    "start": st.integers(0, 90),
    "length": st.integers(1, 60),
    "count": st.integers(1, 2),
    "cpu": st.integers(1, 4),
})  # fmt: skip
events = st.one_of(
    st.tuples(st.just("submit"), jobs),
    st.tuples(st.just("submit"), jobs),
    st.tuples(st.just("reserve"), reservation_fields),
    st.tuples(st.sampled_from(("cancel", "cancel reservation")), st.integers(0, 50)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)
reservation_runs = st.tuples(
    st.lists(st.integers(2, 6), min_size=1, max_size=3), st.lists(events, min_size=4, max_size=25)
)


class ReservationRun:
    """Runs end after their actual run time, which never exceeds the estimate. Stops take effect at once."""

    def __init__(self, cpus: list[int], *, preemption: bool) -> None:
        profiles = {
            name: build_profile(name, queue="batch", queue_arguments={"backfill": name}) for name in PROFILES[1:]
        }
        self.controller = Controller(
            {"default": build_profile("default"), **profiles},
            admission=AdmissionPolicy("wait"),
            preemption=PreemptionPolicy(enabled=preemption),
        )
        self.now_ms = NOW_MS
        self.runtime_percent: dict[int, int] = {}
        self.runs: dict[str, Run] = {}
        self.projects: dict[int, str] = {}
        self.ends: list[tuple[int, str]] = []
        self.step([NodeJoined(a_node(f"n{i}", cpu, "64Gi")) for i, cpu in enumerate(cpus)])

    def step(self, facts: list[Fact]) -> None:
        done = self.controller.step(self.now_ms, facts)
        for save in done.saves:
            if isinstance(save, SaveRun):
                self.runs[save.run.id] = save.run
        stopped: list[Fact] = []
        for act in done.acts:
            if isinstance(act, Start):
                limit_ms = act.spec.estimate_ms or 60 * MINUTE
                took_ms = max(1, limit_ms * self.runtime_percent[act.run.job] // 100)
                if act.spec.estimate_ms or act.spec.profile != "default":
                    heapq.heappush(self.ends, (self.now_ms + took_ms, act.run.id))
            elif isinstance(act, Stop):
                stopped.append(RunObserved(act.run, "stopped", self.now_ms, 143))
        self.check()
        if stopped:
            self.step(stopped)

    def wait(self, until_ms: int) -> None:
        while True:
            due = self.controller.next_wakeup_ms(self.now_ms)
            times = [self.ends[0][0]] if self.ends else []
            times += [max(due, self.now_ms)] if due is not None else []
            if not times or min(times) > until_ms:
                break
            self.now_ms = min(times)
            ended: list[Fact] = []
            while self.ends and self.ends[0][0] <= self.now_ms:
                run = heapq.heappop(self.ends)[1]
                if self.runs[run].state not in RUN_ENDED:
                    ended.append(RunObserved(run, "succeeded", self.now_ms, 0))
            self.step(ended)
        self.now_ms = until_ms
        self.step([])

    def run(self, inputs: list[tuple[str, Any]]) -> ReservationRun:
        for number, (what, which) in enumerate(inputs, 1):
            if what == "submit":
                fields = dict(which)
                self.runtime_percent[number], self.projects[number] = fields.pop("runtime_percent"), fields["project"]
                spec = a_job_spec(f"job-{number}", memory=1, **fields)
                self.step([JobSubmitted(a_job(number, spec=spec, at_ms=self.now_ms, queued_ms=self.now_ms))])
            elif what == "reserve":
                self.reserve(f"r{number}", which)
            elif what == "wait":
                self.wait(self.now_ms + which * MINUTE)
            elif what == "cancel":
                alive = sorted(self.controller.cluster.jobs)
                self.step([JobCancelled(alive[which % len(alive)])] if alive else [])
            else:
                reserved = sorted(self.controller.cluster.availability.reservations)
                self.step([ReservationDeleted(reserved[which % len(reserved)])] if reserved else [])
        self.wait(self.now_ms + 300 * MINUTE)
        return self

    def reserve(self, name: str, fields: dict[str, Any]) -> None:
        start_ms = self.now_ms + fields["start"] * MINUTE
        end_ms = start_ms + fields["length"] * MINUTE
        request = amounts(fields["cpu"])
        try:
            spec = ReservationSpec(name, fields["project"], start_ms, end_ms, fields["count"], request=request)
            reservation = choose_nodes(self.controller.cluster, spec, self.now_ms)
        except HodeiError:
            return
        self.step([ReservationMade(reservation)])

    def check(self) -> None:
        cluster = self.controller.cluster
        for reservation in cluster.availability.reservations.values():
            if reservation.start_ms <= self.now_ms < reservation.end_ms:
                for node, request in reservation.places:
                    self.check_place(reservation, node, request["cpu"])
        missed = self.controller.reservation_audit.missed
        assert not missed["broken"], f"a start reservation was broken: {missed}"
        assert not missed["overrun"], f"no run exceeds its estimate here, but: {missed}"

    def check_place(self, reservation: Reservation, node: str, cpu: int) -> None:
        """Runs of other projects that started after the reservation was made leave its capacity free."""
        cluster = self.controller.cluster
        table = cluster.table
        live = [run for run in self.runs.values() if run.node == node and run.state not in RUN_ENDED]
        others = [run for run in live if self.projects[run.job] != reservation.project]
        if any(run.placed_ms > reservation.made_ms for run in others):
            held = sum(cluster.jobs[run.job].spec.task_of(run.member).request["cpu"] for run in others)
            free = table.allocatable[table.row[node]]["cpu"] - held
            assert free >= cpu, f"{reservation} has {free} of {cpu} on {node}; used by: {others}"


@examples(120)
@given(reservation_runs)
def test_reservations_and_start_reservations_are_always_kept(example):
    cpus, inputs = example
    note(f"{cpus} {inputs}")
    ReservationRun(cpus, preemption=False).run(inputs)


@examples(80)
@given(reservation_runs)
def test_reservations_are_kept_with_preemption(example):
    cpus, inputs = example
    note(f"{cpus} {inputs}")
    ReservationRun(cpus, preemption=True).run(inputs)


@examples(60)
@given(reservation_runs)
def test_reservations_never_exceed_the_capacity_of_a_node(example):
    cpus, inputs = example
    run = ReservationRun(cpus, preemption=False).run([event for event in inputs if event[0] in ("reserve", "wait")][:8])
    for event in inputs:
        if event[0] == "reserve":
            run.reserve(f"late-{len(run.controller.cluster.availability.reservations)}", event[1])
    availability, table = run.controller.cluster.availability, run.controller.cluster.table
    for node in table.names:
        for at_ms in [claim.start_ms for claim in availability.claims_on(node)]:
            reserved = sum(c.request["cpu"] for c in availability.claims_on(node) if c.start_ms <= at_ms < c.end_ms)
            assert reserved <= table.allocatable[table.row[node]]["cpu"]
