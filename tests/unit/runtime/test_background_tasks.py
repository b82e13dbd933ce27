"""Background tasks survive an unexpected exception, and log it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hodei.runtime import cron, store_maintenance
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, a_service, alive, until


def _failing_first(calls, answer):
    async def work(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("unexpected")
        return answer

    return work


def _retention(service, calls):
    service.retention.prune = _failing_first(calls, {})
    return service.retention.run()


def _cron(service, calls):
    service.cron.run_due = _failing_first(calls, 0)
    return service.cron.run()


def _quarantine(service, calls):
    service.store.suspects = [("job", 1)]
    service.damaged_records.quarantine = _failing_first(calls, None)
    return service.damaged_records.run()


def _scan(service, calls):
    service.damaged_records._scan = _failing_first(calls, None)
    return service.damaged_records.scan()


@pytest.mark.parametrize("task", [_retention, _cron, _quarantine, _scan], ids=lambda task: task.__name__)
def test_a_background_task_logs_an_unexpected_exception_and_continues(task, monkeypatch, caplog):
    monkeypatch.setattr(store_maintenance, "_RETENTION_INTERVAL_S", 0.01)
    monkeypatch.setattr(cron, "_RETRY_S", 0.01)
    monkeypatch.setattr(store_maintenance, "_CHECK_S", 0.01)
    monkeypatch.setattr(store_maintenance, "_SCAN_INTERVAL_S", 0.01)

    async def main():
        service, calls = a_service(MemoryStore(), FakeBackend()), []
        running = asyncio.create_task(task(service, calls))
        await until(lambda: len(calls) > 1 or running.done(), 20)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert "unexpected" in caplog.text


def test_a_background_task_that_fails_for_good_is_logged(caplog):
    async def fails():
        raise RuntimeError("unexpected")

    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            service._spawn(fails())
            await until(lambda: any(record.levelno == logging.CRITICAL for record in caplog.records), 20)

    asyncio.run(main())
    assert "unexpected" in caplog.text
