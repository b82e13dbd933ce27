"""Periodic jobs with a clock that the test sets. Does not test real waiting."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from builders import NOW_MS, a_job_spec
from hodei.model.array import ArrayElement
from hodei.model.audit import AuditEntry, AuditQuery
from hodei.model.cron import Periodic
from hodei.model.effects import SavePeriodic
from hodei.model.errors import Conflict, NotFound
from hodei.model.facts import RunObserved
from hodei.ports import JobQuery
from hodei.runtime.job_actions import cancel_array, hold_array, list_folded, wait_array
from hodei.runtime.rights import CALLER, Caller
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, FakeClock, a_service, alive

MINUTE = 60_000
TICK = Periodic("tick", "*/5 * * * *", a_job_spec("job", env={"A": "1"}), by="ann")
FIRST_DUE = NOW_MS - NOW_MS % (5 * MINUTE) + 5 * MINUTE


class CronHarness:
    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = FakeClock()
        self.backend = FakeBackend()
        self.service = a_service(self.store, self.backend, clock=self.clock)

    async def at(self, ms: int) -> list[int]:
        """Set the clock and run what is due; returns all job ids."""
        self.clock.ms = ms
        await self.service.cron.run_due()
        return sorted(job.id for job in self.store.jobs(JobQuery()).jobs)

    async def end_job(self, job: int) -> None:
        self.backend.report(RunObserved(f"{job}.0.1", "succeeded", self.clock.ms, 0))
        await self.service.wait(job, 5000)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.store.events() if event.kind.startswith("periodic")]


def test_a_periodic_job_is_created_once_when_it_is_due():
    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            await service.cron.add(TICK)
            assert await harness.at(FIRST_DUE - 1) == []
            assert await harness.at(FIRST_DUE) == [1]
            assert await harness.at(FIRST_DUE + 1) == [1]
            job = harness.store.job(1)
            assert job is not None
            assert job.spec.user == "ann"
            assert job.spec.labels == {"hodei/periodic": "tick"}
            assert job.spec.tasks[0].env["HODEI_DUE_TIME"].endswith(":00Z")
            (known,) = harness.store.periodics()
            assert (known.last_job, known.handled_ms) == (1, FIRST_DUE)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("overlap", "jobs", "first"),
    [("allow", [1, 2], "scheduled"), ("skip", [1], "scheduled"), ("replace", [1, 2], "cancelled")],
)
def test_a_job_that_has_not_ended_when_the_next_is_due(overlap, jobs: list[int], first: str):
    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            await service.cron.add(structs.replace(TICK, overlap=overlap))
            await harness.at(FIRST_DUE)
            assert await harness.at(FIRST_DUE + 5 * MINUTE) == jobs
            if overlap == "replace":
                found = harness.store.job(1)
                assert found is not None
                assert found.cancel_requested
                assert "replaced by the next job of periodic tick" in found.reason
            if overlap == "skip":
                assert harness.kinds()[-1] == "periodic.skipped"
                await harness.end_job(1)
                assert await harness.at(FIRST_DUE + 10 * MINUTE) == [1, 2]

    asyncio.run(main())


def test_a_crash_after_the_submit_creates_no_second_job():
    """As if the server had died after storing the job and before storing that its time was handled."""

    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            periodic = await service.cron.add(TICK)
            await harness.at(FIRST_DUE)
            await service.loop.commit([], [SavePeriodic(periodic)])
        restarted = CronHarness(MemoryStore(of=harness.store))
        restarted.clock.ms = FIRST_DUE + 1
        async with alive(restarted.service):
            assert await restarted.at(FIRST_DUE + 2) == [1]
            assert restarted.store.periodics()[0].last_job == 1

    asyncio.run(main())


@pytest.mark.parametrize(("missed", "created"), [("skip", 0), ("run_once", 1), ("run_all", 3)])
def test_missed_times_are_handled_by_the_policy(missed, created: int):
    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            await service.cron.add(structs.replace(TICK, missed=missed, missed_limit=3, overlap="allow"))
        restarted = CronHarness(MemoryStore(of=harness.store))
        restarted.clock.ms = FIRST_DUE + 27 * MINUTE
        async with alive(restarted.service):
            assert len(await restarted.at(FIRST_DUE + 27 * MINUTE)) == created
            assert "periodic.missed" in restarted.kinds()

    asyncio.run(main())


def test_a_paused_periodic_job_creates_no_jobs_then_or_later():
    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            await service.cron.add(TICK)
            await service.cron.pause("tick")
            assert await harness.at(FIRST_DUE + 11 * MINUTE) == []
            await service.cron.resume("tick")
            assert await harness.at(FIRST_DUE + 12 * MINUTE) == []
            assert await harness.at(FIRST_DUE + 15 * MINUTE) == [1]
            assert await service.cron.run_now("tick") == 2
            await service.cron.remove("tick")
            assert await harness.at(FIRST_DUE + 60 * MINUTE) == [1, 2]
            assert harness.store.periodics() == []
            with pytest.raises(NotFound):
                await service.cron.pause("tick")

    asyncio.run(main())


def test_a_name_is_unique():
    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            await service.cron.add(TICK)
            with pytest.raises(Conflict):
                await service.cron.add(TICK)

    asyncio.run(main())


def test_a_refused_job_is_reported_and_the_next_time_is_tried():
    async def main() -> None:
        harness = CronHarness()
        harness.service = a_service(harness.store, harness.backend, clock=harness.clock, profile={"max_pending": 0})
        async with alive(harness.service) as service:
            await service.loop.commit([], [SavePeriodic(structs.replace(TICK, handled_ms=NOW_MS))])
            service.cron._periodics["tick"] = structs.replace(TICK, handled_ms=NOW_MS)
            assert await harness.at(FIRST_DUE) == []
            assert harness.kinds() == ["periodic.refused"]
            assert "refused" in service.cron.get("tick").last_result
            assert service.cron.get("tick").next_ms() == FIRST_DUE + 5 * MINUTE

    asyncio.run(main())


def test_a_command_on_an_array_is_one_commit():
    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            done = await service.submit(
                [a_job_spec("sweep", cpu=1, array=ArrayElement(0, 0, 50, 2)), a_job_spec("other", cpu=9)]
            )
            assert done.ids == (1, 51)
            rows, after = list_folded(harness.store, JobQuery(limit=10))
            assert [(row.job.spec.name, row.states) for row in rows] == [
                ("other", None), ("sweep", {"pending": 48, "scheduled": 2}),
            ]  # fmt: skip
            assert after == 0
            held = await hold_array(service, 7)
            assert held.states == {"held": 48, "scheduled": 2}
            cancelled = await cancel_array(service, 1, "enough")
            assert cancelled.states["cancelled"] == 48
            harness.backend.report(*(RunObserved(f"{id}.0.1", "stopped", NOW_MS, 143) for id in (1, 2)))
            assert (await wait_array(service, 1, 5000)).states == {"cancelled": 50}
            with pytest.raises(Conflict):
                await hold_array(service, 1)
            with pytest.raises(NotFound):
                await hold_array(service, 51)

    asyncio.run(main())


def test_the_key_of_a_submitted_array_gives_the_same_answer_again():
    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            spec = a_job_spec("sweep", array=ArrayElement(0, 0, 5))
            first = await service.submit([spec], key="k", fingerprint="f")
            repeated = await service.submit([spec], key="k", fingerprint="f")
            assert (first.ids, repeated.ids, repeated.repeated) == ((1,), (1,), True)

    asyncio.run(main())


def test_the_caller_of_a_command_is_recorded_in_the_same_commit():
    async def main() -> None:
        harness = CronHarness()
        async with alive(harness.service) as service:
            await service.submit([a_job_spec("job", cpu=9, user="ann")])
            caller = Caller(AuditEntry(NOW_MS, "ann", "user", "jobs.hold", "1"))
            CALLER.set(caller)
            await service.hold(1)
            await service.release(1)  # one call, one row
            (row,) = harness.store.audit(AuditQuery())
            assert (row.who, row.verb, row.target, row.code) == ("ann", "jobs.hold", "1", "")
            callers = {event.kind: event.detail.get("by") for event in harness.store.events(job=1)}
            assert (callers["job.held"], callers["job.released"]) == ("ann", "ann")
            assert caller.refused("CONFLICT") is None

    asyncio.run(main())
