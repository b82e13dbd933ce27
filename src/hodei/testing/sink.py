"""What every event sink must accept (`hodei.ports.EventSink`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from hodei.model.config import SchedulingConfig
from hodei.model.facts import JobReleased, JobSubmitted, NodeJoined, RunObserved
from hodei.runtime.observers import METHODS, Observers
from hodei.testing.builders import NOW_MS, a_job, a_node
from hodei.wiring import make_controller

# Job 2 preempts job 1 on a node with room for one of them and fails; job 1 runs again and succeeds. Job 3 is submitted on
# hold, released, and too large for the node.
STEPS: list[list[Any]] = [
    [NodeJoined(a_node("n1", 1))],
    [JobSubmitted(a_job(1, priority="low"))],
    [RunObserved("1.0.1", "running", NOW_MS)],
    [JobSubmitted(a_job(2, priority="critical"))],
    [RunObserved("1.0.1", "stopped", NOW_MS, 143)],
    [RunObserved("2.0.1", "running", NOW_MS)],
    [RunObserved("2.0.1", "failed", NOW_MS, 7)],
    [RunObserved("1.0.2", "running", NOW_MS)],
    [RunObserved("1.0.2", "succeeded", NOW_MS, 0)],
    [JobSubmitted(a_job(3, state="held", cpu=2))],
    [JobReleased(3)],
]


def run_sink(sink: Any) -> int:
    """Calls the sink for everything that happens to three jobs, then closes it, as a server does. Returns the number of
    calls that raised."""
    registry = CollectorRegistry()
    controller = make_controller(SchedulingConfig())
    observers = Observers(registry, controller.cluster.jobs.get)
    observers.add_sink("sink", sink)
    for number, facts in enumerate(STEPS):
        observers.publish(controller.step(NOW_MS + number, facts).saves)
    asyncio.run(observers.close(30))
    return int(registry.get_sample_value("hodei_sink_errors_total", {"sink": "sink"}) or 0)


class SinkConformance:
    """Subclass it, name the subclass `Test...`, and define `make_sink`."""

    def make_sink(self, directory: Path) -> Any:
        raise TypeError(f"{type(self).__name__} does not define make_sink")

    def test_it_has_a_hook(self, tmp_path: Path) -> None:
        sink = self.make_sink(tmp_path)
        assert any(callable(getattr(sink, method, None)) for method in METHODS), f"give it one of {METHODS}"

    def test_its_hooks_accept_everything_that_happens_to_a_job(self, tmp_path: Path) -> None:
        assert run_sink(self.make_sink(tmp_path)) == 0
