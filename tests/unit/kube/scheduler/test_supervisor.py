"""Tasks that end unexpectedly: the process stops, or they are restarted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from hodei.kube.scheduler import background
from hodei.kube.scheduler.background import BackgroundTask, Supervisor, run_in_background
from hodei.kube.scheduler.run import Health


async def fails() -> None:
    raise ZeroDivisionError("unexpected")


async def returns() -> None:
    return


async def sleeps() -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("work", "may_return", "closing", "ends"),
    [
        (fails, False, False, True),
        (fails, True, False, True),
        (fails, False, True, True),
        (returns, False, False, True),
        (returns, True, False, False),
        (returns, False, True, False),
        (sleeps, False, False, False),
    ],
)
def test_a_task_that_ends_unexpectedly_ends_the_process(
    work: Any, may_return: bool, closing: bool, ends: bool, caplog: pytest.LogCaptureFixture
):
    async def scenario() -> tuple[bool, str]:
        stopping = asyncio.Event()
        supervisor = Supervisor(stopping.set)
        supervisor.closing = closing
        task = asyncio.create_task(work())
        supervisor.watch(task, "the watch of pods", may_return=may_return)
        if work is sleeps:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        return stopping.is_set(), supervisor.failure

    stopped, failure = asyncio.run(scenario())
    assert stopped is ends
    assert ("the watch of pods has ended" in failure) is ends
    assert any(record.levelno == logging.CRITICAL for record in caplog.records) is ends


def test_a_background_task_that_fails_is_named_and_restarted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.001)

    class Fragile(BackgroundTask):
        began = 0

        async def run(self) -> None:
            self.began += 1
            if self.began < 3:
                raise ZeroDivisionError("unexpected")
            running.set()

    running, failed, task = asyncio.Event(), list[str](), Fragile()

    async def scenario() -> None:
        async with run_in_background([task], failed.append):
            await asyncio.wait_for(running.wait(), 10)

    asyncio.run(scenario())
    assert task.began == 3
    assert failed == ["Fragile", "Fragile"]
    assert "Fragile has failed" in caplog.text


def get(health: Health, path: str, query: str = "") -> tuple[int, str]:
    sent: list[Any] = []

    async def scenario() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": []}
        await health.app()(scope, receive, send)

    asyncio.run(scenario())
    return sent[0]["status"], sent[1]["body"].decode()


def test_livez_has_the_problems_and_the_age_of_the_watches():
    health = Health()
    assert get(health, "/livez") == (200, "ok")
    health.watches.append(lambda: {"/api/v1/pods": 3.2})
    assert get(health, "/livez", "verbose") == (200, "/api/v1/pods: last contact 3 s ago\nok")
    health.checks.append(lambda: ["the watch of /api/v1/pods has done nothing for 1000 s"])
    assert get(health, "/livez") == (500, "not ok: the watch of /api/v1/pods has done nothing for 1000 s")
