"""Sinks and collectors: called after the commit, isolated, bounded, with a bounded time to finish."""

from __future__ import annotations

import asyncio
import threading

from prometheus_client import CollectorRegistry

from builders import a_job, a_record
from hodei.model.effects import SaveJob
from hodei.runtime import observers
from hodei.runtime.observers import JsonLines, Observers

DEADLINE_S = 30.0


class Recorder:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *args: self.calls.append((name, args[0].id if len(args) > 1 else args[0].kind))
        raise AttributeError(name)


def _run(*sinks, saves=(), timeout_s=DEADLINE_S):
    registry = CollectorRegistry()
    registered = Observers(registry)
    for number, sink in enumerate(sinks):
        registered.add_sink(f"s{number}", sink)
    for step in saves:
        registered.publish(step)
    asyncio.run(registered.close(timeout_s))
    return registry


def test_hooks_are_called_in_order_with_the_job_as_it_was_committed():
    sink = Recorder()
    step = [SaveJob(a_job(1), new=True), a_record(1, "job.submitted", job=1), a_record(2, "job.scheduled", job=1)]
    _run(sink, saves=[step, [SaveJob(a_job(1, state="succeeded")), a_record(3, "job.ended", job=1)]])
    assert [call for call in sink.calls if call[0] != "on_event"] == [
        ("on_job_queued", 1), ("on_job_scheduled", 1), ("on_job_ended", 1),
    ]  # fmt: skip
    assert [kind for name, kind in sink.calls if name == "on_event"] == ["job.submitted", "job.scheduled", "job.ended"]


def test_a_job_on_hold_is_not_queued():
    sink = Recorder()
    _run(sink, saves=[[SaveJob(a_job(1, state="held"), new=True), a_record(1, "job.submitted", job=1)]])
    assert sink.calls == [("on_event", "job.submitted")]


def test_a_sink_that_raises_is_counted_and_others_continue():
    class Broken:
        def on_event(self, event):
            raise RuntimeError("no")

    good = Recorder()
    registry = _run(Broken(), good, saves=[[a_record(1)], [a_record(2)]])
    assert registry.get_sample_value("hodei_sink_errors_total", {"sink": "s0"}) == 2
    assert len(good.calls) == 2


def test_a_sink_that_hangs_drops_events_and_delays_neither_the_publisher_nor_the_shutdown(monkeypatch):
    monkeypatch.setattr(observers, "MAX_SAVES", 2)
    monkeypatch.setattr(observers.SinkThread.__init__, "__defaults__", (2,))
    release = threading.Event()

    class Hanging:
        def on_event(self, event):
            release.wait()

    registry = _run(Hanging(), saves=[[a_record(number)] for number in range(1, 11)], timeout_s=0.05)
    release.set()
    assert registry.get_sample_value("hodei_sink_dropped_total", {"sink": "s0"}) >= 8


def test_events_are_appended_to_a_file_as_json_lines(tmp_path):
    _run(JsonLines(str(tmp_path / "events"), kinds=["job.ended"]), saves=[[a_record(1), a_record(2, "job.ended")]])
    (line,) = (tmp_path / "events").read_text().splitlines()
    assert '"kind":"job.ended"' in line


def test_a_failing_collector_is_left_out_of_the_scrape():
    class Broken:
        def collect(self):
            raise RuntimeError("no")

    async def scrape():
        registered = Observers(CollectorRegistry())
        registered.add_collector("bad", Broken())
        registered.add_collector("process", observers.ProcessMetrics())
        return await registered.collect()

    assert b"process_" in asyncio.run(scrape())
