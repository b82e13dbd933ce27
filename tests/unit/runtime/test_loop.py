"""Commit, then act: nothing is acknowledged, published or sent to a backend before it is stored, and nothing stored is lost."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from builders import NOW_MS, a_job_spec, a_node
from hodei.backends.instant import InstantBackend
from hodei.model.config import SchedulingConfig
from hodei.model.effects import SaveJob, SaveRun
from hodei.model.errors import Conflict, StaleEpoch, Unavailable
from hodei.model.facts import NodeOverridden, RunObserved
from hodei.runtime.decision_log import DecisionLog
from hodei.store.memory import MemoryStore
from unit.runtime.harness import CallLog, FakeBackend, FakeClock, RecordingStore, a_service, alive, until


def _instant(log=None):
    return InstantBackend("instant", [a_node("n1", 4, backend="instant")])


def _hold_commits(store: RecordingStore) -> tuple[threading.Event, threading.Event]:
    """Commits set the first event and wait for the second."""
    writing, release = threading.Event(), threading.Event()

    def hold() -> None:
        writing.set()
        release.wait(5)

    store.hold = hold
    return writing, release


def test_a_submit_that_was_acknowledged_is_in_the_store():
    async def main():
        store = RecordingStore()
        async with alive(a_service(store, FakeBackend())) as service:
            answer = await service.submit([a_job_spec("one"), a_job_spec("two")])
            assert answer.ids == (1, 2)
            assert [store.job(id).spec.name for id in answer.ids] == ["one", "two"]

    asyncio.run(main())


def test_a_submit_is_not_acknowledged_while_the_store_is_still_writing():
    async def main():
        store = RecordingStore()
        async with alive(a_service(store, FakeBackend())) as service:
            writing, release = _hold_commits(store)
            submitting = asyncio.create_task(service.submit([a_job_spec()]))
            await until(writing.is_set)
            assert not submitting.done()
            assert store.job(1) is None
            release.set()
            assert (await submitting).ids == (1,)

    asyncio.run(main())


def test_a_run_is_started_after_its_commit_and_forgotten_after_the_commit_of_its_end():
    async def main():
        log = CallLog()
        backend = FakeBackend(log=log)
        async with alive(a_service(RecordingStore(log), backend)) as service:
            await service.submit([a_job_spec() for _ in range(3)])
            await until(lambda: sum(len(argument) for kind, argument in log.calls if kind == "start") == 3)
            backend.report(*(RunObserved(f"{id}.0.1", "succeeded", NOW_MS, 0) for id in (1, 2, 3)))
            for id in (1, 2, 3):
                assert (await service.wait(id, 5000)).state == "succeeded"
            await until(lambda: any(kind == "forget" for kind, _ in log.calls))
        placed, ended = set(), set()
        for kind, argument in log.calls:
            if kind == "commit":
                runs = [save.run for save in argument if isinstance(save, SaveRun)]
                placed |= {run.id for run in runs}
                ended |= {run.id for run in runs if run.state == "succeeded"}
            elif kind == "start":
                assert placed >= set(argument)
            elif kind == "forget":
                assert ended >= set(argument)

    asyncio.run(main())


def test_all_saves_of_one_step_are_one_commit():
    async def main():
        log = CallLog()
        async with alive(a_service(RecordingStore(log), FakeBackend(log=log))) as service:
            await service.submit([a_job_spec() for _ in range(4)])
        commits = [argument for kind, argument in log.calls if kind == "commit"]
        (saves_of_step,) = [saves for saves in commits if any(isinstance(save, SaveJob) for save in saves)]
        assert sum(isinstance(save, SaveJob) and save.new for save in saves_of_step) == 4
        assert sum(isinstance(save, SaveRun) and save.new for save in saves_of_step) == 4

    asyncio.run(main())


def test_a_store_outage_delays_everything_and_loses_nothing():
    async def main():
        log = CallLog()
        store = RecordingStore(log)
        async with alive(a_service(store, _instant())) as service:
            store.errors = [Unavailable("disk full"), Unavailable("disk full")]
            answer = await service.submit([a_job_spec() for _ in range(5)])
            assert store.errors == []
            for id in answer.ids:
                assert (await service.wait(id, 5000)).state == "succeeded"
        assert [event.seq for event in store.events(limit=100)] == list(range(1, len(store.events(limit=100)) + 1))

    asyncio.run(main())


def test_a_stop_during_an_outage_acknowledges_nothing_and_fails_all_callers():
    async def main():
        store = RecordingStore()
        service = a_service(store, FakeBackend())
        await service.start()
        assert await service.until_ready(5)
        store.errors = [Unavailable("disk full")] * 1000
        submitting = asyncio.create_task(service.submit([a_job_spec()]))
        await until(lambda: len(store.errors) < 1000)
        async with asyncio.timeout(10):
            await service.stop()
            with pytest.raises(Unavailable):
                await submitting
        assert store.job(1) is None

    asyncio.run(main())


def test_a_loop_whose_store_was_taken_over_stops_and_refuses():
    async def main():
        store = RecordingStore()
        service = a_service(store, FakeBackend())
        await service.start()
        assert await service.until_ready(5)
        MemoryStore(of=store).open()
        async with asyncio.timeout(10):
            with pytest.raises(Unavailable):
                await service.submit([a_job_spec()])
            await service.until_loop_ends()
            assert isinstance(service.loop.fatal, StaleEpoch)
            assert not service.ready
            with pytest.raises(Unavailable):
                await service.submit([a_job_spec()])
            await service.stop()
        assert store.job(1) is None

    asyncio.run(main())


def test_a_repeated_key_creates_no_second_job_and_with_another_body_is_a_conflict():
    async def main():
        store = RecordingStore()
        async with alive(a_service(store, FakeBackend())) as service:
            first = await service.submit([a_job_spec()], key="k", fingerprint="f")
            again = await service.submit([a_job_spec()], key="k", fingerprint="f")
            assert (first.ids, first.repeated) == ((1,), False)
            assert (again.ids, again.repeated) == ((1,), True)
            with pytest.raises(Conflict) as error:
                await service.submit([a_job_spec("other")], key="k", fingerprint="g")
            assert error.value.code == "KEY_REUSED"
            assert store.job(2) is None

    asyncio.run(main())


def test_concurrent_requests_with_one_key_create_one_job():
    async def main():
        store = RecordingStore()
        async with alive(a_service(store, FakeBackend())) as service:
            answers = await asyncio.gather(
                *(service.submit([a_job_spec()], key="k", fingerprint="f") for _ in range(20))
            )
            assert {answer.ids for answer in answers} == {(1,)}
            assert sum(not answer.repeated for answer in answers) == 1
            assert store.job(2) is None
            assert service.ready

    asyncio.run(main())


def test_a_repeated_key_after_a_cancelled_call_gives_the_same_job():
    async def main():
        store = RecordingStore()
        async with alive(a_service(store, FakeBackend())) as service:
            writing, release = _hold_commits(store)
            first = asyncio.create_task(service.submit([a_job_spec()], key="k", fingerprint="f"))
            await until(writing.is_set)
            first.cancel()
            again = asyncio.create_task(service.submit([a_job_spec()], key="k", fingerprint="f"))
            await asyncio.sleep(0)  # the second call has started
            release.set()
            assert (await again).ids == (1,)
            assert store.job(2) is None
            assert service.ready

    asyncio.run(main())


def test_wait_returns_at_the_end_or_the_timeout():
    async def main():
        backend = FakeBackend()
        async with alive(a_service(RecordingStore(), backend)) as service:
            await service.submit([a_job_spec()])
            assert (await service.wait(1, 20)).state == "scheduled"
            waiting = asyncio.create_task(service.wait(1, 5000))
            backend.report(RunObserved("1.0.1", "failed", NOW_MS, 7))
            found = await waiting
            assert (found.state, found.exit_code) == ("failed", 7)
            assert (await service.wait(1, 5000)).state == "failed"

    asyncio.run(main())


def test_cancel_hold_release_and_requeue_are_visible_when_they_return():
    async def main():
        backend = FakeBackend()
        async with alive(a_service(RecordingStore(), backend)) as service:
            await service.submit([a_job_spec(cpu="4"), a_job_spec(cpu="4"), a_job_spec(cpu="4")])
            assert (await service.hold(2)).state == "held"
            assert (await service.hold(2)).state == "held"
            assert (await service.release(2)).state == "pending"
            assert (await service.cancel(3, "enough")).state == "cancelled"
            for refused in (service.cancel(3), service.hold(1), service.release(1), service.requeue(2)):
                with pytest.raises(Conflict):
                    await refused
            backend.report(RunObserved("1.0.1", "failed", NOW_MS, 1))
            assert (await service.wait(1, 5000)).state == "failed"
            again = await service.requeue(1)
            assert (again.state, again.failures) == ("pending", 0)

    asyncio.run(main())


def test_a_restart_restores_stored_jobs_and_active_runs():
    async def main():
        store, backend = RecordingStore(), FakeBackend()
        async with alive(a_service(store, backend)) as service:
            await service.submit([a_job_spec(cpu="3"), a_job_spec(cpu="3")])
            await until(lambda: ("start", ["1.0.1"]) in backend.log.calls)
            backend.report(RunObserved("1.0.1", "running", NOW_MS))
            await until(lambda: store.job(1).state == "running")
            await service.override_node(NodeOverridden("n1", labels={"seen": "yes"}))
        second, later = RecordingStore(of=store), FakeBackend()
        later.known_runs = {"1.0.1": RunObserved("1.0.1", "succeeded", NOW_MS, 0)}
        async with alive(a_service(second, later)) as service:
            assert (await service.wait(1, 5000)).state == "succeeded"
            await until(lambda: ("start", ["2.0.1"]) in later.log.calls)
            assert service.nodes()[0].node.labels["seen"] == "yes"
            assert (await service.submit([a_job_spec()])).ids == (3,)

    asyncio.run(main())


def test_the_decision_log_holds_the_configuration_the_facts_and_the_plans(tmp_path):
    async def main():
        path = tmp_path / "logs" / "decisions.jsonl"
        log = DecisionLog(path, SchedulingConfig(), 0)
        async with alive(a_service(RecordingStore(), _instant(), decision_log=log)) as service:
            await service.submit([a_job_spec()])
            assert (await service.wait(1, 5000)).state == "succeeded"
        first, *rest = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert first["hodei_decision_log"] == 1
        facts = [fact["fact"] for line in rest for fact in line["facts"]]
        assert facts.index("NodeJoined") < facts.index("JobSubmitted") < facts.index("RunObserved")
        assert [bind["job"] for line in rest for bind in line["plan"].get("binds", [])] == [1]
        assert path.stat().st_mode & 0o777 == 0o600
        DecisionLog(path, SchedulingConfig(), 0).close()
        assert path.with_name("decisions.jsonl.1").exists()

    asyncio.run(main())


def test_events_reach_a_subscriber_after_the_commit_and_in_order():
    async def main():
        store = RecordingStore()
        async with alive(a_service(store, _instant())) as service:
            reader = service.event_hub.subscribe()
            await service.submit([a_job_spec()])
            received = []
            async for event in reader:
                assert store.events(after=event.seq - 1, limit=1)[0] == event
                received.append(event.kind)
                if event.kind == "job.ended":
                    break
            assert received == ["job.submitted", "job.scheduled", "job.started", "run.ended", "job.ended"]
            reader.close()

    asyncio.run(main())


def test_a_retry_starts_when_its_pause_is_over():
    async def main():
        clock, backend = FakeClock(), FakeBackend()
        async with alive(a_service(RecordingStore(), backend, clock=clock)) as service:
            await service.submit([a_job_spec(retries=1)])
            backend.report(RunObserved("1.0.1", "failed", NOW_MS, 1))
            await until(lambda: service.store.job(1).state == "pending")
            clock.ms += 5000
            service.loop.enqueue([])
            await until(lambda: ("start", ["1.0.2"]) in backend.log.calls)

    asyncio.run(main())
