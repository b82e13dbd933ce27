"""What goes on beside the loop goes on after a fault that nobody foresaw, and says so."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hodei.runtime import cron, damaged_records, retention
from hodei.store.memory import MemoryStore
from unit.runtime.living import ObedientBackend, a_service, alive, until


def _failing_first(calls, answer):
    async def work(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("nobody foresaw this")
        return answer

    return work


def _retention(service, calls):
    service.housekeeping.once = _failing_first(calls, {})
    return service.housekeeping.run()


def _calendar(service, calls):
    service.calendar.turn = _failing_first(calls, 0)
    return service.calendar.run()


def _mending(service, calls):
    service.store.suspects = [("job", 1)]
    service.records.mend = _failing_first(calls, None)
    return service.records.run()


def _looking_over(service, calls):
    service.records._look_over = _failing_first(calls, None)
    return service.records.look_over()


@pytest.mark.parametrize("part", [_retention, _calendar, _mending, _looking_over], ids=lambda part: part.__name__)
def test_a_fault_that_nobody_foresaw_is_told_and_it_goes_on(part, monkeypatch, caplog):
    monkeypatch.setattr(retention, "_EVERY_S", 0.01)
    monkeypatch.setattr(cron, "_AFTER_TROUBLE_S", 0.01)
    monkeypatch.setattr(damaged_records, "_LOOK_S", 0.01)
    monkeypatch.setattr(damaged_records, "_EVERY_S", 0.01)

    async def main():
        service, calls = a_service(MemoryStore(), ObedientBackend()), []
        running = asyncio.create_task(part(service, calls))
        await until(lambda: len(calls) > 1 or running.done(), 20)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert "nobody foresaw this" in caplog.text


def test_a_part_that_ends_all_the_same_is_told(caplog):
    async def fails():
        raise RuntimeError("nobody foresaw this")

    async def main():
        async with alive(a_service(MemoryStore(), ObedientBackend())) as service:
            service._spawn(fails())
            await until(lambda: any(one.levelno == logging.CRITICAL for one in caplog.records), 20)

    asyncio.run(main())
    assert "nobody foresaw this" in caplog.text
