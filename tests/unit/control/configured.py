"""A harness whose controller is built from a TOML configuration.

Its store keeps the submitted spec of a job, without the changes by escalation.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from hodei.control.controller import Step
from hodei.model.config import Config, SchedulingConfig
from hodei.model.facts import Fact, JobRestored, NodeJoined, Reconfigured
from hodei.wiring import make_controller
from unit.control.harness import Harness


def scheduling(toml: str) -> SchedulingConfig:
    return msgspec.toml.decode(toml, type=Config).scheduling


class ConfiguredHarness(Harness):
    def __init__(self, toml: str, *nodes: Any) -> None:
        super().__init__()
        self.config = scheduling(toml)
        self.controller = make_controller(self.config)
        if nodes:
            self.step(*(NodeJoined(node) for node in nodes))

    def step(self, *facts: Fact) -> Step:
        submitted = {id: job.spec for id, job in self.jobs.items()}
        done = super().step(*facts)
        for id, spec in submitted.items():
            self.jobs[id] = structs.replace(self.jobs[id], spec=spec)
        return done

    def reconfigure(self, toml: str) -> Step:
        self.config = scheduling(toml)
        return self.step(Reconfigured(self.config, number=2, how="set", by="ann"))

    def restart(self, *nodes: Any) -> Step:
        last_event = self.events[-1].seq if self.events else 0
        self.controller = make_controller(self.config, last_event)
        facts: list[Fact] = []
        for id, job in sorted(self.jobs.items()):
            if not job.finished_ms:
                runs = [run for run in self.runs.values() if run.job == id and run.attempt >= job.first_attempt]
                facts.append(JobRestored(job, tuple(runs)))
        self.step(*facts)
        return self.step(*(NodeJoined(node) for node in nodes))

    def run_for(self, ms: int) -> None:
        """Advance the time by `ms`, with a step at every wakeup that the controller requests."""
        end = self.now_ms + ms
        while True:
            due = self.controller.next_wakeup_ms(self.now_ms)
            if due is None or due > end:
                break
            self.now_ms = max(due, self.now_ms)
            self.step()
        self.now_ms = end
        self.step()

    def queue_of(self, job: int) -> str:
        """The profile in whose queue the job is; "" if in none."""
        return next((name for name, queue in self.controller.queues.items() if job in queue.gangs), "")

    def event_details(self, kind: str, job: int = 0) -> list[dict[str, Any]]:
        return [event.detail for event in self.events if event.kind == kind and (not job or event.job == job)]
