"""The loop stays responsive while a large array is submitted, cancelled and requeued."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import asynccontextmanager

import pytest

from builders import a_job_spec
from hodei.control.controller import Controller
from hodei.control.state import CHUNK_SIZE
from hodei.model.array import ArrayElement
from hodei.model.audit import AuditEntry
from hodei.model.config import SchedulingConfig
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.effects import SaveJob
from hodei.model.errors import Conflict, NotPermitted, QueueFull, Unavailable
from hodei.model.facts import Reconfigured
from hodei.plugins.registry import build_profile
from hodei.runtime.decision_log import DecisionLog
from hodei.runtime.job_actions import cancel_array, hold_array, release_array, requeue_all
from hodei.runtime.rights import CALLER, Caller
from hodei.sim.replay import replay
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, RecordingStore, a_service, alive

COUNT = 20 * CHUNK_SIZE


def an_array(count=COUNT, at_most=0, **fields):
    return a_job_spec(array=ArrayElement(0, 0, count, at_most), **fields)


@pytest.fixture(autouse=True)
def no_garbage():
    """Garbage collection in a process with all tests takes longer than in a server."""
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def measure_iterations():
    """CPU time of each iteration of the loop; not wall time, since the machine may be busy."""
    iterations = [0.0]

    async def watch():
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            iterations.append(time.thread_time() - began)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield iterations
    finally:
        watching.cancel()


async def _first_chunk_known(service):
    """Wait until the first chunk of an array is known, and no longer."""
    while not service.controller.cluster.jobs:  # noqa: ASYNC110 (one iteration of the loop at a time)
        await asyncio.sleep(0)


def _has_no_long_iteration(iterations):
    return max(iterations) < sum(iterations) / 5


@pytest.mark.parametrize("at_most", [0, 10], ids=["unlimited", "ten at a time"])
@pytest.mark.parametrize("after", [False, True], ids=["independent", "after another job"])
def test_the_loop_stays_responsive_during_a_large_array(at_most, after):
    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            await service.submit([a_job_spec(cpu="4")])
            dependencies = {"after": Dependencies((Dependency("succeeded", 1),))} if after else {}
            async with measure_iterations() as iterations:
                (first,) = (await service.submit([an_array(at_most=at_most, **dependencies)])).ids
            assert _has_no_long_iteration(iterations), "submitted"
            async with measure_iterations() as iterations:
                status = await cancel_array(service, first, "cancelled")
            assert status.states == {"cancelled": COUNT}
            assert _has_no_long_iteration(iterations), "cancelled"

    asyncio.run(main())


def test_all_elements_are_one_commit_and_invisible_before_it():
    async def main():
        store = RecordingStore()
        async with alive(a_service(store, FakeBackend())) as service:
            submitting = asyncio.create_task(service.submit([an_array(3 * CHUNK_SIZE, cpu="4")]))
            await _first_chunk_known(service)
            known = len(service.controller.cluster.jobs)
            assert 0 < known < 3 * CHUNK_SIZE, "not submitted in chunks"
            assert store.job(1) is None
            assert (await service.why(known)).code in ("QUEUED", "INSUFFICIENT_RESOURCES")
            await submitting
            new = [sum(isinstance(save, SaveJob) and save.new for save in saves) for _, saves in store.log.calls]
            assert [count for count in new if count] == [3 * CHUNK_SIZE]
            await hold_array(service, 1)
            assert store.states_between(1, 3 * CHUNK_SIZE) == {"held": 3 * CHUNK_SIZE - 1, "scheduled": 1}

    asyncio.run(main())


def test_the_rights_of_a_caller_over_many_jobs_are_checked_in_chunks():
    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            await service.submit([an_array(3 * CHUNK_SIZE, cpu="4", user="ann")])
            sizes, check = list[int](), service.rights.check

            def counted(caller, facts, saves):
                sizes.append(len(facts))
                check(caller, facts, saves)

            service.rights.check = counted
            CALLER.set(Caller(AuditEntry(1, "ann", "user", "arrays.hold", "1")))
            for act in (hold_array, release_array):
                sizes.clear()
                await act(service, 1)
                assert (max(sizes), sum(sizes)) == (CHUNK_SIZE, 3 * CHUNK_SIZE - 1)
            CALLER.set(Caller(AuditEntry(1, "bob", "user", "arrays.cancel", "1")))
            with pytest.raises(NotPermitted):
                await cancel_array(service, 1, "not yours")

    asyncio.run(main())


def test_a_shutdown_during_the_rights_check_is_reported_to_the_caller():
    async def main():
        service = a_service(MemoryStore(), FakeBackend())
        await service.start()
        await service.submit([an_array(3 * CHUNK_SIZE, cpu="4", user="ann")])
        CALLER.set(Caller(AuditEntry(1, "ann", "user", "arrays.hold", "1")))
        check = service.rights.check

        def check_and_stop(caller, facts, saves):
            check(caller, facts, saves)
            service.loop.stop()

        service.rights.check = check_and_stop
        with pytest.raises(Unavailable):
            async with asyncio.timeout(20):
                await hold_array(service, 1)
        await service.stop()

    asyncio.run(main())


def test_the_loop_stays_responsive_during_a_large_requeue():
    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            await service.submit([an_array(5 * CHUNK_SIZE, cpu="4")])
            await cancel_array(service, 1, "cancelled")
            iteration, iterations = 0, list[int]()

            async def of_record(record):
                iterations.append(iteration)
                return ()

            service.dependency_lookup.of_record = of_record
            again = asyncio.create_task(requeue_all(service, (), (1,)))
            while not again.done():
                iteration += 1
                await asyncio.sleep(0)
            assert len((await again).requeued) == len(iterations) >= 5 * CHUNK_SIZE - 1
            assert max(iterations.count(each) for each in set(iterations)) <= CHUNK_SIZE

    asyncio.run(main())


def test_a_second_cancel_reports_the_states_after_the_first():
    async def main():
        async with alive(a_service(MemoryStore(), FakeBackend())) as service:
            await service.submit([an_array(3 * CHUNK_SIZE)])
            first = asyncio.create_task(cancel_array(service, 1, "cancelled"))
            while len(service.controller.cluster.jobs) == 3 * CHUNK_SIZE:  # noqa: ASYNC110 (one iteration of the loop at a time)
                await asyncio.sleep(0)
            again = asyncio.create_task(cancel_array(service, 1, "cancelled"))
            await first
            with pytest.raises(Conflict, match=f"{3 * CHUNK_SIZE - 4} cancelled"):
                await (again if again.done() and again.exception() else cancel_array(service, 1, "cancelled"))
            await asyncio.wait({again})

    asyncio.run(main())


def test_submits_during_a_large_array_get_distinct_ids():
    async def main():
        store = MemoryStore()
        async with alive(a_service(store, FakeBackend())) as service:
            array = asyncio.create_task(service.submit([an_array(3 * CHUNK_SIZE)]))
            await asyncio.sleep(0)
            others = await asyncio.gather(*(service.submit([a_job_spec(f"other-{i}")]) for i in range(5)))
            assert (await array).ids == (1,)
            assert sorted(done.ids[0] for done in others) == list(range(3 * CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 6))
            assert len(service.controller.cluster.jobs) == 3 * CHUNK_SIZE + 5

    asyncio.run(main())


def test_a_stop_during_a_large_submit_stores_all_or_nothing():
    async def main():
        store = MemoryStore()
        service = a_service(store, FakeBackend())
        await service.start()
        submitting = asyncio.create_task(service.submit([an_array(5 * CHUNK_SIZE)]))
        await _first_chunk_known(service)
        await service.stop()
        try:
            await submitting
            assert sum(store.states_between(1, 5 * CHUNK_SIZE).values()) == 5 * CHUNK_SIZE
        except Unavailable:
            assert not store.states_between(1, 5 * CHUNK_SIZE)

    asyncio.run(main())


def test_an_array_beyond_max_pending_is_refused_as_a_whole():
    async def main():
        service = a_service(MemoryStore(), FakeBackend(), profile={"max_pending": 2 * CHUNK_SIZE})
        async with alive(service):
            with pytest.raises(QueueFull):
                await service.submit([an_array(2 * CHUNK_SIZE + 1)])
            assert (await service.submit([an_array(2 * CHUNK_SIZE)])).ids == (1,)

    asyncio.run(main())


def test_a_step_in_chunks_decides_like_a_whole_one_and_replays(tmp_path):
    path = tmp_path / "decisions"

    async def main():
        log = DecisionLog(path, SchedulingConfig(), 0)
        async with alive(a_service(MemoryStore(), FakeBackend(), decision_log=log)) as service:
            await service.submit([an_array(3 * CHUNK_SIZE, at_most=7)])
            await cancel_array(service, 1, "cancelled")

    asyncio.run(main())
    result = replay(path)
    assert result.difference is None
    assert result.facts > 6 * CHUNK_SIZE


def test_the_loop_stays_responsive_during_a_reconfiguration():
    async def main():
        service = a_service(MemoryStore(), FakeBackend())
        service.controller.rebuild = lambda scheduling: Controller({"default": build_profile("default", queue="fifo")})
        async with alive(service):
            await service.submit([an_array(cpu="4")])
            async with measure_iterations() as iterations:
                await service.loop.commit([Reconfigured(SchedulingConfig())])
            assert _has_no_long_iteration(iterations)
            queue = service.controller.queues["default"]
            assert (queue.profile.queue.name, len(queue)) == ("fifo", COUNT - 1)
            assert (await service.why(COUNT)).queue.position == COUNT - 1

    asyncio.run(main())
