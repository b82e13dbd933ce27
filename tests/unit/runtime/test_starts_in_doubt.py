"""A start in doubt is never replaced by another attempt; a start that did not reach its backend does not count as an attempt."""

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
from unit.runtime.test_backend_manager import MANUAL_CHECKS, ControlledBackend
from unit.runtime.test_binder_and_watcher import _binder, _start


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(binder, "DOUBT_PAUSE_S", 0.01)


def _starts(backend):
    return [runs for kind, runs in backend.log.calls if kind == "start"]


def test_a_start_in_doubt_is_sent_again_without_delaying_others():
    async def main():
        backend = FakeBackend()
        backend.refuse = {"1.0.1": BackendError("no answer", code=IN_DOUBT)}
        failures = []
        binder, facts = _binder(backend, on_failure=lambda name, text: failures.append(text))
        serving = asyncio.create_task(binder.serve("fake"))
        stop = Stop("1.0.1", "fake", 0, StopReason("cancelled"))
        binder.act(
            [
                _start(1),
                _start(2),
                stop,
                Stop("9.0.1", "fake", 0, StopReason("cancelled", "x")),
                Forget("8.0.1", "fake"),
            ]
        )
        await until(lambda: len(_starts(backend)) >= 3)
        assert ("stop", ["9.0.1"]) in backend.log.calls
        assert ("forget", ["8.0.1"]) in backend.log.calls
        assert ("stop", ["1.0.1"]) not in backend.log.calls, "the stop was sent before the start was settled"
        assert _starts(backend)[1] == ["1.0.1"]
        backend.refuse = {}
        await until(lambda: ("stop", ["1.0.1"]) in backend.log.calls)
        assert facts == []
        assert failures == [], "a start in doubt made the backend unhealthy"
        serving.cancel()

    asyncio.run(main())


def test_a_start_in_doubt_does_not_fail_when_its_backend_is_blocked():
    async def main():
        backend = FakeBackend()
        backend.refuse = {"1.0.1": BackendError("no answer", code=IN_DOUBT)}
        binder, facts = _binder(backend)
        serving = asyncio.create_task(binder.serve("fake"))
        binder.act([_start(1)])
        await until(lambda: _starts(backend))
        binder.block("fake", "unhealthy")
        binder.act([_start(1), _start(2)])  # the first again, as the watcher does after an outage
        assert [(fact.run, fact.reason_code) for fact in facts] == [("2.0.1", "not_reached")]
        serving.cancel()

    asyncio.run(main())


def test_a_start_in_flight_does_not_fail_when_its_backend_is_blocked():
    async def main():
        backend = ControlledBackend("fake")
        backend.hung = asyncio.Event()
        binder, facts = _binder(backend)
        serving = asyncio.create_task(binder.serve("fake"))
        binder.act([_start(1)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        binder.block("fake", "unhealthy")
        binder.act([_start(1)])
        assert facts == []
        serving.cancel()

    asyncio.run(main())


def test_a_start_of_an_earlier_server_does_not_fail_when_its_backend_is_blocked():
    """The run is stored as placed and its backend is blocked: an earlier server may have sent the start."""

    async def main():
        store, clock = MemoryStore(), FakeClock()
        backend = ControlledBackend("one")
        async with alive(a_service(store, backend, clock=clock, health=MANUAL_CHECKS)) as service:
            backend.start_errors = [BackendError("lost")] * 9
            await service.submit([a_job_spec()])
            await until(lambda: _starts(backend))
        backend = ControlledBackend("one")
        service = a_service(MemoryStore(of=store), backend, clock=clock, health=MANUAL_CHECKS)
        service.backend_manager.binder.block("one", "unhealthy")
        async with alive(service):
            await until(lambda: _starts(backend) == [["1.0.1"]])
            assert service.store.job(1).attempt == 1

    asyncio.run(main())


def test_an_outage_counts_no_attempt_of_a_job_that_could_not_start():
    async def main():
        clock = FakeClock()
        backend = ControlledBackend("one")
        async with alive(a_service(MemoryStore(), backend, clock=clock, health=MANUAL_CHECKS)) as service:
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
            backend.report(RunObserved(f"1.0.{attempt}", "succeeded", NOW_MS, 0))
            found = await service.wait(1, 5000)
            assert (found.state, found.losses, found.failures) == ("succeeded", 0, 0)

    asyncio.run(main())


def test_a_start_that_was_not_reached_moves_to_another_backend_after_the_block():
    async def main():
        bad, good, clock = ControlledBackend("bad"), ControlledBackend("good"), FakeClock()
        async with alive(a_service(MemoryStore(), bad, good, clock=clock, health=MANUAL_CHECKS)) as service:
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
        failures = []
        binder, facts = _binder(backend, on_failure=lambda name, text: failures.append(text))
        serving = asyncio.create_task(binder.serve("fake"))
        binder.act([_start(1), _start(2)])
        await until(lambda: facts)
        assert [(fact.run, fact.reason_code, fact.reason) for fact in facts] == [
            ("1.0.1", "not_reached", "host a is silent")
        ]
        assert failures == []
        # A start that may have arrived earlier is sent again until its outcome is known.
        backend.refuse = {"3.0.1": BackendError("host a is silent", code=NOT_REACHED)}
        binder.act_again([_start(3)])
        await until(lambda: len(_starts(backend)) >= 4)
        assert len(facts) == 1
        serving.cancel()

    asyncio.run(main())


def test_a_gang_in_doubt_is_not_reserved_again():
    class Full(FakeBackend):
        async def reserve(self, orders):
            raise BackendError("no capacity")

    async def main():
        backend = Full(nodes=[a_node("n1", backend="fake")])
        order = structs.replace(_start(1), world_size=2)
        assert set(await start_gangs(backend, [order])) == {"1.0.1"}
        assert await start_gangs(backend, [order], {"1.0.1"}) == {}

    asyncio.run(main())
