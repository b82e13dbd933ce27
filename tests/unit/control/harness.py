"""A controller under test: facts go in, and what it saves and orders is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builders import NOW_MS, a_job, a_node
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller, Step
from hodei.control.lifecycle.retry import Backoff, RetryPolicy
from hodei.engine.profile import Profile
from hodei.model.effects import Act, Event, SaveEvent, SaveJob, SaveOverrides, SaveReservation, SaveRun, Start, Stop
from hodei.model.facts import (
    Fact,
    JobRestored,
    JobSubmitted,
    NodeJoined,
    OverridesRestored,
    ReservationMade,
    RunObserved,
)
from hodei.model.job import Job, Run
from hodei.model.node import NodeOverrides
from hodei.model.reservation import Reservation
from hodei.plugins.registry import build_profile

EXACT = RetryPolicy(
    failed_run=Backoff(jitter_milli=0), failed_start=Backoff(max_ms=30_000, jitter_milli=0), max_losses=3
)


class Harness:
    def __init__(self, *nodes: Any, profiles: dict[str, Profile] | None = None, **options: Any) -> None:
        self._profiles = profiles or {"default": build_profile("default")}
        self._options = {"retry": EXACT, "admission": AdmissionPolicy("wait")} | options
        self.controller = Controller(self._profiles, **self._options)
        self.now_ms = NOW_MS
        self.jobs: dict[int, Job] = {}
        self.runs: dict[str, Run] = {}
        self.overrides: dict[str, NodeOverrides] = {}
        self.reservations: dict[str, Reservation] = {}
        self.events: list[Event] = []
        self.acts: list[Act] = []
        self.last = Step(None, [], [])  # type: ignore[arg-type]
        if nodes:
            self.step(*(NodeJoined(node) for node in nodes))

    def step(self, *facts: Fact) -> Step:
        done = self.last = self.controller.step(self.now_ms, facts)
        for save in done.saves:
            if isinstance(save, SaveJob):
                self.jobs[save.job.id] = save.job
            elif isinstance(save, SaveRun):
                self.runs[save.run.id] = save.run
            elif isinstance(save, SaveOverrides):
                self.overrides[save.overrides.node] = save.overrides
            elif isinstance(save, SaveReservation):
                self.reservations.pop(save.reservation.name, None)
                if not save.deleted:
                    self.reservations[save.reservation.name] = save.reservation
            elif isinstance(save, SaveEvent):
                self.events.append(save.event)
        self.acts = list(done.acts)
        return done

    def submit(self, *ids: int, **fields: Any) -> Step:
        at = {"at_ms": self.now_ms, "queued_ms": self.now_ms}
        return self.step(*(JobSubmitted(a_job(id, **at, **fields)) for id in ids or (1,)))

    def observe(self, run: str, state: str, exit_code: int | None = None, **more: Any) -> Step:
        return self.step(RunObserved(run, state, self.now_ms, exit_code, **more))  # type: ignore[arg-type]

    def advance(self, ms: int) -> Step:
        self.now_ms += ms
        return self.step()

    def restart(self, *nodes: Any) -> Step:
        """A new controller restores what was saved, then the nodes join again."""
        last_event = self.events[-1].seq if self.events else 0
        self.controller = Controller(self._profiles, last_event=last_event, **self._options)
        facts: list[Fact] = [OverridesRestored(overrides) for overrides in self.overrides.values()]
        for id, job in sorted(self.jobs.items()):
            if not job.finished_ms:
                runs = [run for run in self.runs.values() if run.job == id and run.attempt >= job.first_attempt]
                facts.append(JobRestored(job, tuple(runs)))
        facts += [ReservationMade(reservation, restored=True) for reservation in self.reservations.values()]
        self.step(*facts)
        return self.step(*(NodeJoined(node) for node in nodes))

    def state(self, job: int = 1) -> str:
        return self.jobs[job].state

    def reason(self, job: int = 1) -> tuple[str, str]:
        return self.jobs[job].reason_code, self.jobs[job].reason

    def started(self) -> list[str]:
        return [act.run.id for act in self.acts if isinstance(act, Start)]

    def stopped(self) -> list[str]:
        return [act.run for act in self.acts if isinstance(act, Stop)]

    def event_kinds(self, job: int = 0) -> list[str]:
        return [event.kind for event in self.events if not job or event.job == job]

    def used(self) -> dict[str, dict[str, int]]:
        table = self.controller.cluster.table
        return {name: table.usage(row) for row, name in enumerate(table.names)}


def a_harness(*cpus: int, **options: Any) -> Harness:
    """A harness with the nodes n1, n2 ..., one per number of cores."""
    return Harness(*some_nodes(*cpus), **options)


def some_nodes(*cpus: int) -> Sequence[Any]:
    return [a_node(f"n{i}", cpu, "64Gi") for i, cpu in enumerate(cpus, 1)]
