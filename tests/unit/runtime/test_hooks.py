"""The after-commit hooks of a sink, called by the real controller and a real server's loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from builders import a_job_spec
from hodei.model.config import Config, ServerConfig
from hodei.model.errors import Unavailable
from hodei.testing import run_sink
from hodei.wiring import make_service

HOOKS = ("on_job_queued", "on_job_scheduled", "on_job_started", "on_job_ended", "on_job_preempted")
# Each hook gets the job as its step left it: a job placed at once is `scheduled` in `on_job_queued`.
CALLS = {
    "on_job_queued": [(1, "scheduled"), (2, "pending"), (1, "pending"), (3, "pending")],
    "on_job_scheduled": [(1, "scheduled"), (2, "scheduled"), (1, "scheduled")],
    "on_job_started": [(1, "running"), (2, "running"), (1, "running")],
    "on_job_preempted": [(1, "running")],
    "on_job_ended": [(2, "failed"), (1, "succeeded")],
}


class Recorder:
    """A sink with one hook."""

    def __init__(self, hook: str) -> None:
        self.calls: list[tuple[int, str]] = []
        setattr(self, hook, lambda job, event: self.calls.append((job.id, job.state)))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_called_for_each_change_of_a_job(hook: str) -> None:
    sink = Recorder(hook)
    assert run_sink(sink) == 0
    assert sink.calls == CALLS[hook]


class StoreReader:
    """Reads each job from the store when a hook is called."""

    def __init__(self) -> None:
        self.store: Any = None
        self.found: dict[str, str | None] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in HOOKS:
            raise AttributeError(name)

        def hook(job: Any, event: Any) -> None:
            stored = self.store.job(job.id)
            self.found[name] = stored and stored.state

        return hook


def test_a_server_calls_hooks_after_the_commit(tmp_path: Path) -> None:
    """The first commit of the job fails once: no hook sees the job before it is stored."""
    sink = StoreReader()

    async def run() -> None:
        service = make_service(tmp_path, Config(server=ServerConfig(store="memory:")), instant=True)
        sink.store, commit, failures = service.store, service.store.commit, [Unavailable("no disk")]

        def fail_once(saves: Any) -> None:
            if failures:
                assert sink.found == {}
                raise failures.pop()
            commit(saves)

        service.observers.add_sink("reader", sink)
        async with asyncio.timeout(30):
            await service.start()
            assert await service.until_ready(10)
            service.store.commit = fail_once  # type: ignore[method-assign]
            submitted = await service.submit([a_job_spec("job")])
            while service.store.job(submitted.ids[0]).state != "succeeded":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await service.stop()
        assert not failures

    asyncio.run(run())
    assert sink.found.keys() == {*HOOKS} - {"on_job_preempted"}
    assert None not in sink.found.values()
    assert sink.found["on_job_ended"] == "succeeded"
