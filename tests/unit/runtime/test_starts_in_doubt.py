"""Starts in doubt, and starts that were not reached: the first are never given up for another attempt, the second never
count as one."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from builders import NOW_MS, a_job_spec, a_node
from hodei.model.effects import Forget, Stop
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError
from hodei.model.facts import RunObserved
from hodei.model.job import BackendChoice
from hodei.model.outcome import StopReason
from hodei.runtime import binder
from hodei.runtime.binder import start_gangs
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, FakeClock, a_service, alive, until
from unit.runtime.test_backend_manager import BY_HAND, Patient
from unit.runtime.test_binder_and_watcher import _binder, _start


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(binder, "DOUBT_PAUSE_S", 0.01)


def _starts(backend):
    return [runs for what, runs in backend.diary.lines if what == "start"]


def test_a_start_in_doubt_is_sent_again_without_delaying_others():
    async def main():
        backend = FakeBackend()
        backend.refuse = {"1.0.1": BackendError("who knows", code=IN_DOUBT)}
        binder, told = _binder(backend)
        failures = []
        binder.on_failure = lambda name, text: failures.append(text)
        serving = asyncio.create_task(binder.serve("obedient"))
        stop = Stop("1.0.1", "obedient", 0, StopReason("cancelled"))
        binder.act(
            [
                _start(1),
                _start(2),
                stop,
                Stop("9.0.1", "obedient", 0, StopReason("cancelled", "x")),
                Forget("8.0.1", "obedient"),
            ]
        )
        await until(lambda: len(_starts(backend)) >= 3)
        assert ("stop", ["9.0.1"]) in backend.diary.lines
        assert ("forget", ["8.0.1"]) in backend.diary.lines
        assert ("stop", ["1.0.1"]) not in backend.diary.lines, "its start is not settled, nothing would be stopped"
        assert _starts(backend)[1] == ["1.0.1"]
        backend.refuse = {}
        await until(lambda: ("stop", ["1.0.1"]) in backend.diary.lines)
        assert told == []
        assert failures == [], "the backend answers: it is well"
        serving.cancel()

    asyncio.run(main())


def test_a_start_in_doubt_does_not_fail_when_its_backend_is_blocked():
    async def main():
        backend = FakeBackend()
        backend.refuse = {"1.0.1": BackendError("who knows", code=IN_DOUBT)}
        binder, told = _binder(backend)
        serving = asyncio.create_task(binder.serve("obedient"))
        binder.act([_start(1)])
        await until(lambda: _starts(backend))
        binder.block("obedient", "not well")
        binder.act([_start(1), _start(2)])  # the first once more: the watcher made peace after an outage
        assert [(fact.run, fact.reason_code) for fact in told] == [("2.0.1", "not_reached")]
        serving.cancel()

    asyncio.run(main())


def test_a_start_in_flight_does_not_fail_when_its_backend_is_blocked():
    async def main():
        backend = Patient("obedient")
        backend.hung = asyncio.Event()
        binder, told = _binder(backend)
        serving = asyncio.create_task(binder.serve("obedient"))
        binder.act([_start(1)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        binder.block("obedient", "not well")
        binder.act([_start(1)])
        assert told == []
        serving.cancel()

    asyncio.run(main())


def test_a_start_of_an_earlier_server_does_not_fail_when_its_backend_is_blocked():
    """The store says placed, the backend has just come back and is still barred: who knows what was on its way."""

    async def main():
        store, clock = MemoryStore(), FakeClock()
        backend = Patient("one")
        async with alive(a_service(store, backend, clock=clock, health=BY_HAND)) as service:
            backend.start_errors = [BackendError("lost")] * 9
            await service.submit([a_job_spec()])
            await until(lambda: _starts(backend))
        backend = Patient("one")
        service = a_service(MemoryStore(of=store), backend, clock=clock, health=BY_HAND)
        service.backend_manager.binder.block("one", "not well")
        async with alive(service):
            await until(lambda: _starts(backend) == [["1.0.1"]])
            assert service.store.job(1).attempt == 1

    asyncio.run(main())


def test_an_outage_uses_up_no_attempt_of_a_job_that_it_kept_from_starting():
    async def main():
        clock = FakeClock()
        backend = Patient("one")
        async with alive(a_service(MemoryStore(), backend, clock=clock, health=BY_HAND)) as service:
            backend.start_errors = [BackendError("connection refused", code=NOT_REACHED) for _ in range(100)]
            await service.submit([a_job_spec(restart="never")])
            for _ in range(2):
                await until(lambda: service.backend_manager.status("one").state == "unhealthy")
                await until(lambda: service.store.job(1).reason_code == "NOT_REACHED")
                clock.ms += 400_000
                await service.backend_manager._managed["one"].health.check()
                service.loop.enqueue([])
                await until(lambda: service.store.job(1).state == "scheduled")
            backend.start_errors = []
            await until(lambda: service.backend_manager.status("one").state == "ok")
            attempt = service.store.job(1).attempt
            backend.say(RunObserved(f"1.0.{attempt}", "succeeded", NOW_MS, 0))
            found = await service.wait(1, 5000)
            assert (found.state, found.losses, found.failures) == ("succeeded", 0, 0)

    asyncio.run(main())


def test_a_start_that_was_not_reached_moves_to_another_backend_after_the_block():
    async def main():
        bad, good, clock = Patient("bad"), Patient("good"), FakeClock()
        async with alive(a_service(MemoryStore(), bad, good, clock=clock, health=BY_HAND)) as service:
            bad.start_errors = [BackendError("refused", code=NOT_REACHED) for _ in range(9)]
            await service.submit([a_job_spec(backend=BackendChoice("preferred", ("bad", "good")))])
            await until(lambda: service.store.job(1).reason_code == "NOT_REACHED")
            clock.ms += 2000
            service.loop.enqueue([])
            await until(lambda: _starts(good) == [["1.0.2"]])
            assert service.store.job(1).losses == 0

    asyncio.run(main())


def test_a_run_that_was_not_reached_is_placed_again_and_its_backend_stays_healthy():
    async def main():
        backend = FakeBackend()
        backend.refuse = {"1.0.1": BackendError("host a is silent", code=NOT_REACHED)}
        binder, told = _binder(backend)
        failures = []
        binder.on_failure = lambda name, text: failures.append(text)
        serving = asyncio.create_task(binder.serve("obedient"))
        binder.act([_start(1), _start(2)])
        await until(lambda: told)
        assert [(fact.run, fact.reason_code, fact.reason) for fact in told] == [
            ("1.0.1", "not_reached", "host a is silent")
        ]
        assert failures == []
        # One that may have arrived before is asked about until it is certain.
        backend.refuse = {"3.0.1": BackendError("host a is silent", code=NOT_REACHED)}
        binder.act_again([_start(3)])
        await until(lambda: len(_starts(backend)) >= 4)
        assert len(told) == 1
        serving.cancel()

    asyncio.run(main())


def test_a_gang_in_doubt_is_not_reserved_again():
    class Full(FakeBackend):
        async def reserve(self, orders):
            raise BackendError("no room")

    async def main():
        backend = Full(nodes=[a_node("n1", backend="obedient")])
        order = structs.replace(_start(1), world_size=2)
        assert set(await start_gangs(backend, [order])) == {"1.0.1"}
        assert await start_gangs(backend, [order], {"1.0.1"}) == {}

    asyncio.run(main())
