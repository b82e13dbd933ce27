"""Clock changes: times follow the wall clock, no duration is negative, and a wrong clock erases nothing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec import structs

from builders import NOW_MS, a_job, a_job_spec, a_run
from hodei.control.lifecycle.runs import clamp_job_times, clamp_run_times
from hodei.model.audit import AuditEntry, AuditQuery
from hodei.model.effects import SaveAudit, SaveJob, SaveRun
from hodei.model.facts import RunObserved
from hodei.ports import JobQuery
from hodei.runtime.clock import SMALL_STEP_MS, RetentionClock, SystemClock, TrustedTime
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, FakeClock, RecordingStore, a_service, alive, until

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS


class Wall:
    """A wall clock that the test sets."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def __call__(self) -> int:
        return self.ms


def test_a_small_step_back_is_bridged():
    wall = Wall()
    clock = SystemClock(follows=True, wall_ms=wall)
    assert clock.now_ms() == NOW_MS
    wall.ms -= SMALL_STEP_MS
    assert clock.now_ms() == NOW_MS
    wall.ms += SMALL_STEP_MS + 1
    assert clock.now_ms() == NOW_MS + 1
    assert clock.set_back_ms == 0


def test_after_a_jump_ahead_and_back_times_follow_the_wall_again():
    wall = Wall()
    clock = SystemClock(follows=True, wall_ms=wall)
    wall.ms += YEAR_MS
    assert clock.now_ms() == NOW_MS + YEAR_MS
    wall.ms -= YEAR_MS - 5
    assert clock.now_ms() == NOW_MS + 5
    assert clock.set_back_ms == YEAR_MS - 5
    wall.ms += 10
    assert clock.now_ms() == NOW_MS + 15


def test_times_ahead_of_the_clock_are_set_to_now():
    ahead = NOW_MS + YEAR_MS
    job = a_job(
        1, state="pending", submitted_ms=ahead, changed_ms=ahead + 5, queued_ms=ahead, not_before_ms=ahead + 2005
    )
    found = clamp_job_times(job, NOW_MS)
    assert (found.submitted_ms, found.queued_ms, found.changed_ms) == (NOW_MS, NOW_MS, NOW_MS)
    assert found.not_before_ms == NOW_MS + 2000
    run = clamp_run_times(a_run(1, state="running", placed_ms=ahead, started_ms=ahead + 1), NOW_MS)
    assert (run.placed_ms, run.started_ms) == (NOW_MS, NOW_MS)


def test_times_that_are_not_ahead_are_not_changed():
    job = a_job(1, state="pending", submitted_ms=NOW_MS - 9, changed_ms=NOW_MS, not_before_ms=NOW_MS + HOUR_MS)
    assert clamp_job_times(job, NOW_MS) is job
    run = a_run(1)
    assert clamp_run_times(run, NOW_MS) is run


def test_a_server_that_starts_after_the_clock_was_set_back_clamps_the_times_of_its_jobs():
    """Order by number, unchanged pauses and no negative durations, in the store too."""

    async def main():
        ahead, store = NOW_MS + YEAR_MS, RecordingStore()
        store.open()
        pending = a_job(1, state="pending", submitted_ms=ahead, changed_ms=ahead, queued_ms=ahead)
        running = a_job(
            2, state="running", submitted_ms=ahead, changed_ms=ahead, started_ms=ahead, attempt=1, first_attempt=1
        )
        run = a_run(2, backend="fake", state="running", placed_ms=ahead, started_ms=ahead)
        store.commit([SaveJob(pending, new=True), SaveJob(running, new=True), SaveRun(run, new=True)])
        backend = FakeBackend()
        backend.known_runs = {run.id: RunObserved(run.id, "running", ahead)}
        clock = FakeClock()
        async with alive(a_service(store, backend, clock=clock)) as service:
            assert store.job(1).submitted_ms == store.job(2).started_ms == store.run(run.id).started_ms == NOW_MS
            later = await service.submit([a_job_spec("later")])
            assert store.job(later.ids[0]).submitted_ms >= store.job(1).submitted_ms
            clock.ms += 5
            backend.report(RunObserved(run.id, "succeeded", clock.ms, 0))
            await until(lambda: store.job(2).state == "succeeded")
            assert store.job(2).finished_ms >= store.job(2).started_ms
            assert store.run(run.id).finished_ms >= store.run(run.id).started_ms

    asyncio.run(main())


def test_an_end_before_its_start_gives_no_negative_duration():
    async def main():
        store, backend = RecordingStore(), FakeBackend()
        async with alive(a_service(store, backend)) as service:
            await service.submit([a_job_spec("one")])
            backend.report(RunObserved("1.0.1", "running", NOW_MS + HOUR_MS))
            await until(lambda: store.job(1).state == "running")
            backend.report(RunObserved("1.0.1", "succeeded", NOW_MS - HOUR_MS, 0))
            await until(lambda: store.job(1).state == "succeeded")
            run = store.run("1.0.1")
            assert run.started_ms <= NOW_MS
            assert run.finished_ms >= run.started_ms

    asyncio.run(main())


def a_retention_clock(time: TrustedTime | None = None, steady_ms: int = 0) -> RetentionClock:
    return RetentionClock(time or TrustedTime(NOW_MS), steady_ms, bound_ms=DAY_MS, hold_ms=DAY_MS)


def test_a_clock_without_jumps_is_trusted():
    clock = a_retention_clock()
    for hours in range(0, 24 * 60, 7):
        assert clock.update(NOW_MS + hours * HOUR_MS, hours * HOUR_MS) == NOW_MS + hours * HOUR_MS
    assert not clock.in_doubt


def test_a_jump_ahead_is_trusted_only_after_it_has_lasted():
    clock = a_retention_clock()
    assert clock.update(NOW_MS + YEAR_MS, 1000) == NOW_MS + 1000
    assert clock.in_doubt
    assert clock.update(NOW_MS + YEAR_MS + 12 * HOUR_MS, 1000 + 12 * HOUR_MS) == NOW_MS + 1000 + 12 * HOUR_MS
    assert clock.left_ms == 12 * HOUR_MS
    assert clock.update(NOW_MS + YEAR_MS + DAY_MS, 1000 + DAY_MS) == NOW_MS + YEAR_MS + DAY_MS
    assert not clock.in_doubt


def test_a_corrected_clock_is_trusted_at_once():
    clock = a_retention_clock()
    clock.update(NOW_MS + YEAR_MS, 1000)
    assert clock.update(NOW_MS + 2000, 2000) == NOW_MS + 2000
    assert not clock.in_doubt
    assert clock.update(NOW_MS - YEAR_MS, 3000) == NOW_MS - YEAR_MS  # an earlier time deletes nothing too early


def test_a_restart_does_not_confirm_a_jump():
    clock = a_retention_clock()
    clock.update(NOW_MS + YEAR_MS, 1000)
    for _ in range(20):  # a new process with the same wrong clock each time; its steady clock may restart at 0
        clock = a_retention_clock(msgspec.json.decode(msgspec.json.encode(clock.time), type=TrustedTime))
        clock.update(NOW_MS + YEAR_MS + 60_000, 0)
        trusted_ms = clock.update(NOW_MS + YEAR_MS + 120_000, 60_000)
        assert clock.in_doubt
        assert trusted_ms < NOW_MS + DAY_MS


def a_harness(store, clock, steady, **options):
    return a_service(
        store, FakeBackend(), clock=clock, retention_ms=30 * DAY_MS, audit_retention_ms=90 * DAY_MS,
        steady_ms=lambda: steady.ms, **options,
    )  # fmt: skip


def history(store) -> None:
    at_ms = NOW_MS - 2 * DAY_MS
    store.open()
    job = a_job(1, state="succeeded", submitted_ms=at_ms, changed_ms=at_ms, finished_ms=at_ms)
    store.commit([SaveJob(job, new=True), SaveAudit(AuditEntry(at_ms, "ada", "user", "jobs.submit"))])


@pytest.mark.parametrize("when", ["while the server runs", "while the server is down"])
def test_a_clock_that_jumps_beyond_the_retention_erases_neither_history_nor_audit(when):
    async def main():
        store, clock, steady = MemoryStore(), FakeClock(), FakeClock()
        history(store)
        if when == "while the server is down":
            async with alive(a_harness(store, clock, steady)) as service:
                await service.retention.prune()
            store, clock.ms = MemoryStore(of=store), clock.ms + YEAR_MS
        async with alive(a_harness(store, clock, steady)) as service:
            await service.retention.prune()
            clock.ms += YEAR_MS
            for _ in range(10):
                steady.ms += 60_000
                clock.ms += 60_000
                await service.retention.prune()
            assert store.job(1) is not None
            assert len(store.audit(AuditQuery())) == 1
            ok, text = service.retention.status()
            assert not ok
            assert "ahead of the expected time" in text
            assert b"hodei_retention_held 1.0" in service.metrics()
            # A restart does not confirm the jump.
        store = MemoryStore(of=store)
        async with alive(a_harness(store, clock, steady)) as service:
            await service.retention.prune()
            assert store.job(1) is not None
            assert not service.retention.status()[0]
            # Pruning continues when that time has really passed.
            clock.ms += DAY_MS
            steady.ms += DAY_MS
            await service.retention.prune()
            assert store.job(1) is None
            assert store.audit(AuditQuery()) == []
            assert service.retention.status()[0]

    asyncio.run(main())


def test_trust_clock_accepts_the_jump_at_once():
    async def main():
        store, clock, steady = MemoryStore(), FakeClock(), FakeClock()
        history(store)
        async with alive(a_harness(store, clock, steady)) as service:
            await service.retention.prune()
        store, clock.ms = MemoryStore(of=store), clock.ms + YEAR_MS
        async with alive(a_harness(store, clock, steady, trust_clock=True)) as service:
            await service.retention.prune()
            assert store.job(1) is None

    asyncio.run(main())


def test_a_store_without_a_stored_time_uses_its_newest_job():
    async def main():
        store, clock, steady = MemoryStore(), FakeClock(), FakeClock()
        history(store)
        clock.ms += YEAR_MS
        async with alive(a_harness(store, clock, steady)) as service:
            await service.retention.prune()
            assert store.job(1) is not None
            assert not service.retention.status()[0]

    asyncio.run(main())


def test_one_round_prunes_all_that_is_due():
    async def main():
        store, clock, steady = MemoryStore(), FakeClock(), FakeClock()
        store.open()
        old = NOW_MS - 40 * DAY_MS
        job = a_job(1, state="succeeded", submitted_ms=old, changed_ms=old, finished_ms=old)
        store.commit([SaveJob(structs.replace(job, id=id), new=True) for id in range(1, 3001)])
        store.commit([SaveJob(a_job(3001, state="succeeded", changed_ms=NOW_MS), new=True)])
        async with alive(a_harness(store, clock, steady)) as service:
            await service.retention.prune()
            assert [job.id for job in store.jobs(JobQuery()).jobs] == [3001]

    asyncio.run(main())
