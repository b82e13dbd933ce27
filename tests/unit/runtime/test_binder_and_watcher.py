"""The binder and the watcher: lost replies, refusals, outages and reconciliation."""

from __future__ import annotations

import asyncio

import pytest

from builders import NOW_MS, a_job, a_job_spec, a_node, a_run
from hodei.model.backend import Capabilities
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint, WithdrawStop
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.facts import RunObserved, StopWithdrawn
from hodei.model.job import Checkpoint
from hodei.model.outcome import StopReason
from hodei.model.resources import format_time
from hodei.runtime.binder import Binder
from hodei.runtime.metrics import Metrics
from unit.runtime.harness import CallLog, FakeBackend, FakeClock, RecordingStore, a_service, alive, until


def _start(job=1, backend="fake"):
    spec = a_job(job).spec
    return Start(a_run(job, backend=backend), spec, spec.tasks[0])


def _binder(*backends, **callbacks):
    facts = []
    return Binder({b.name: b for b in backends}, FakeClock(), Metrics(), facts.extend, **callbacks), facts


def test_orders_whose_reply_was_lost_are_sent_again_in_order():
    async def main():
        backend = FakeBackend()
        backend.start_errors = [BackendError("lost"), OSError("broken pipe"), TimeoutError()]
        binder, facts = _binder(backend)
        serving = asyncio.create_task(binder.serve("fake"))
        binder.act([_start(1), Stop("9.0.1", "fake", 0, StopReason("cancelled"))])
        await until(lambda: len(backend.log.calls) == 1)
        binder.act([_start(2), Forget("8.0.1", "fake")])
        await until(lambda: ("forget", ["8.0.1"]) in backend.log.calls)
        assert backend.log.calls[0] == ("start", ["1.0.1"])
        assert backend.log.calls[-3:] == [("start", ["1.0.1", "2.0.1"]), ("stop", ["9.0.1"]), ("forget", ["8.0.1"])]
        assert facts == []
        serving.cancel()

    asyncio.run(main())


def test_a_failed_start_is_reported_as_permanent_or_not():
    async def main():
        backend = FakeBackend()
        backend.refuse = {"1.0.1": BackendError("busy"), "2.0.1": BackendRefused("no such image")}
        binder, facts = _binder(backend)
        serving = asyncio.create_task(binder.serve("fake"))
        binder.act([_start(1), _start(2), _start(3)])
        await until(lambda: facts)
        assert [(fact.run, fact.state, fact.reason, fact.permanent) for fact in facts] == [
            ("1.0.1", "failed", "busy", False),
            ("2.0.1", "failed", "no such image", True),
        ]
        serving.cancel()

    asyncio.run(main())


def test_a_start_on_a_removed_backend_fails_permanently_and_its_stops_are_dropped():
    async def main():
        binder, facts = _binder(FakeBackend())
        binder.act(
            [_start(1, backend="old"), Stop("1.0.1", "old", 0, StopReason("cancelled", "x")), Forget("1.0.1", "old")]
        )
        assert [(fact.run, fact.permanent) for fact in facts] == [("1.0.1", True)]

    asyncio.run(main())


def test_a_job_with_an_image_is_not_sent_to_a_backend_that_runs_none():
    """It would fail permanently there while the other backend is free."""

    async def main():
        without_images = FakeBackend("without-images", [a_node("b1", 64, backend="without-images")])
        with_images = FakeBackend("with-images", [a_node("c1", 2, backend="with-images")])
        with_images.capabilities = Capabilities(images=True)
        without_images.refuse = {"1.0.1": BackendRefused("no images here")}
        async with alive(a_service(RecordingStore(), without_images, with_images)) as service:
            assert service.controller.cluster.table.node("b1").cannot
            await service.submit([a_job_spec(image="busybox")])
            await until(lambda: ("start", ["1.0.1"]) in with_images.log.calls)
            assert ("start", ["1.0.1"]) not in without_images.log.calls

    asyncio.run(main())


def test_an_unreachable_backend_is_the_reason_of_jobs_that_only_it_could_run():
    async def main():
        unreachable, reachable = (
            FakeBackend("unreachable"),
            FakeBackend("reachable", [a_node("h1", 1, backend="reachable")]),
        )
        unreachable.open_errors = [BackendError("connection refused")] * 1000
        async with alive(a_service(RecordingStore(), unreachable, reachable)) as service:
            await until(lambda: service.controller.gate.unreached.usable_by(a_job_spec()))
            await service.submit([a_job_spec(cpu="2")])
            await until(lambda: service.store.job(1).reason_code == "BACKEND_UNAVAILABLE")
            assert "connection refused" in service.store.job(1).reason
            unreachable.open_errors.clear()
            await until(lambda: ("start", ["1.0.1"]) in unreachable.log.calls, 15)
            assert not service.controller.gate.unreached.usable_by(a_job_spec())

    asyncio.run(main())


def test_a_slow_backend_delays_only_its_own_orders():
    async def main():
        slow, quick = FakeBackend("slow"), FakeBackend("quick")
        slow.start_errors = [BackendError("down")] * 1000
        binder, _ = _binder(slow, quick)
        serving = [asyncio.create_task(binder.serve(name)) for name in ("slow", "quick")]
        binder.act([_start(1, backend="slow"), _start(2, backend="quick")])
        await until(lambda: ("start", ["2.0.1"]) in quick.log.calls)
        for task in serving:
            task.cancel()

    asyncio.run(main())


def test_an_unknown_run_is_stopped_and_forgotten_after_its_end():
    """For example a run whose start was given up and arrived late."""

    async def main():
        backend = FakeBackend()
        async with alive(a_service(RecordingStore(), backend)) as service:
            await service.submit([a_job_spec()])
            await until(lambda: ("start", ["1.0.1"]) in backend.log.calls)
            backend.report(RunObserved("7.0.1", "running", NOW_MS), RunObserved("1.0.1", "running", NOW_MS))
            await until(lambda: ("stop", ["7.0.1"]) in backend.log.calls)
            backend.report(RunObserved("7.0.1", "stopped", NOW_MS))
            await until(lambda: ("forget", ["7.0.1"]) in backend.log.calls)
            assert ("stop", ["1.0.1"]) not in backend.log.calls

    asyncio.run(main())


def test_a_refused_start_ends_the_job_and_a_failed_one_is_tried_again():
    async def main():
        clock, backend = FakeClock(), FakeBackend()
        backend.refuse = {"1.0.1": BackendRefused("no such image"), "2.0.1": BackendError("busy")}
        async with alive(a_service(RecordingStore(), backend, clock=clock)) as service:
            await service.submit([a_job_spec(), a_job_spec()])
            found = await service.wait(1, 5000)
            assert (found.state, found.reason_code, found.reason) == ("failed", "BACKEND_REFUSED", "no such image")
            await until(lambda: service.store.job(2).reason_code == "START_FAILED")
            clock.ms += 5000
            service.loop.enqueue([])
            await until(lambda: ("start", ["2.0.2"]) in backend.log.calls)

    asyncio.run(main())


def test_the_watcher_reconciles_after_an_outage():
    """After the reconnection, ends are recorded, missing starts are sent again and unknown runs are stopped."""

    async def main():
        log = CallLog()
        backend = FakeBackend(nodes=[a_node("n1", 8, backend="fake")], log=log)
        async with alive(a_service(RecordingStore(), backend)) as service:
            await service.submit([a_job_spec() for _ in range(3)])
            await until(lambda: any(kind == "start" for kind, _ in log.calls))
            backend.report(RunObserved("1.0.1", "running", NOW_MS), RunObserved("2.0.1", "running", NOW_MS))
            await until(lambda: service.store.job(2).state == "running")
            log.calls.clear()
            backend.known_runs = {
                "1.0.1": RunObserved("1.0.1", "succeeded", NOW_MS, 0),
                "7.0.1": RunObserved("7.0.1", "running", NOW_MS),
            }
            backend.open_errors = [BackendError("still down")]
            backend.disconnect()
            assert (await service.wait(1, 5000)).state == "succeeded"
            await until(lambda: service.store.job(2).reason_code == "LOST")
            await until(lambda: ("start", ["3.0.1"]) in log.calls)
            await until(lambda: ("stop", ["7.0.1"]) in log.calls)
            assert backend.opened == 2

    asyncio.run(main())


def test_during_an_outage_the_nodes_are_not_ready_with_the_reason():
    async def main():
        backend = FakeBackend()
        async with alive(a_service(RecordingStore(), backend)) as service:
            backend.open_errors = [BackendError("still down")] * 3
            backend.disconnect("the connection is lost")
            await until(lambda: not service.nodes()[0].node.ready)
            reason = f"backend fake is unreachable since {format_time(NOW_MS)}: the connection is lost"
            assert service.nodes()[0].node.not_ready_reason == reason
            await service.submit([a_job_spec()])
            answer = await service.why(1)
            assert (answer.code, answer.blockers[0].code) == ("BACKEND_UNAVAILABLE", "BACKEND_UNHEALTHY")
            await until(lambda: service.nodes()[0].node.ready)
            await until(lambda: ("start", ["1.0.1"]) in backend.log.calls)
            assert service.backend_manager.errors() == {"fake": ""}

    asyncio.run(main())


def test_a_node_that_its_backend_no_longer_offers_is_lost():
    async def main():
        backend = FakeBackend(nodes=[a_node("n1", backend="fake"), a_node("n2", backend="fake")])
        async with alive(a_service(RecordingStore(), backend)) as service:
            assert [status.node.name for status in service.nodes()] == ["n1", "n2"]
            backend.offered.pop()
            backend.disconnect()
            await until(lambda: [status.node.name for status in service.nodes()] == ["n1"])

    asyncio.run(main())


class FailingBackend(FakeBackend):
    """Fails calls of some kinds: each error once, in order."""

    def __init__(self, **errors: list[Exception]) -> None:
        super().__init__()
        self.errors = errors

    def _fail(self, kind: str) -> None:
        if self.errors.get(kind):
            raise self.errors[kind].pop(0)

    async def stop(self, orders):
        await super().stop(orders)
        self._fail("stop")

    async def checkpoint(self, orders):
        await super().checkpoint(orders)
        self._fail("checkpoint")

    async def forget(self, orders):
        await super().forget(orders)
        self._fail("forget")


@pytest.mark.parametrize("error", [BackendRefused, BackendError], ids=lambda e: e.code)
@pytest.mark.parametrize("kind", ["stop", "checkpoint"])
def test_a_failed_order_does_not_delay_orders_of_another_kind(kind, error):
    async def main():
        backend = FailingBackend(**{kind: [error("it cannot be done")]})
        binder, facts = _binder(backend)
        serving = asyncio.create_task(binder.serve("fake"))
        stop, take_checkpoint = (
            Stop("7.0.1", "fake", 0, StopReason("cancelled")),
            TakeCheckpoint("8.0.1", "fake", Checkpoint(signal="USR1")),
        )
        binder.act([stop, take_checkpoint, Forget("9.0.1", "fake")])
        await until(lambda: ("forget", ["9.0.1"]) in backend.log.calls)
        assert {kind for kind, _ in backend.log.calls} == {"stop", "checkpoint", "forget"}
        if error is BackendError:
            await until(lambda: [kind for kind, _ in backend.log.calls].count(kind) == 2)
        binder.act([Forget("10.0.1", "fake")])
        await until(lambda: ("forget", ["10.0.1"]) in backend.log.calls)
        # A forget that succeeded is not sent again with later ones.
        assert [runs for kind, runs in backend.log.calls if kind == "forget"] == [["9.0.1"], ["10.0.1"]]
        serving.cancel()
        assert facts == []

    asyncio.run(main())


def test_a_forget_that_fails_is_sent_again_with_the_next_ones():
    async def main():
        backend = FailingBackend(forget=[BackendError("cut off"), OSError("cut off")])
        binder, _ = _binder(backend)
        serving = asyncio.create_task(binder.serve("fake"))
        binder.act([Forget("9.0.1", "fake")])
        await until(lambda: len(backend.log.calls) == 1)
        binder.act([Forget("10.0.1", "fake")])
        await until(lambda: not backend.errors["forget"] and len(backend.log.calls) >= 3)
        assert {run for _, runs in backend.log.calls[2:] for run in runs} == {"9.0.1", "10.0.1"}
        serving.cancel()

    asyncio.run(main())


def _stop(run="9.0.1"):
    return Stop(run, "fake", 0, StopReason("preempted", "by job 5"))


def test_a_withdrawn_stop_that_was_not_sent_is_dropped():
    async def main():
        backend = FakeBackend()
        binder, facts = _binder(backend)
        binder.act([_stop("9.0.1"), _stop("8.0.1")])
        binder.act([WithdrawStop("9.0.1", "fake"), WithdrawStop("7.0.1", "fake")])
        assert facts == [StopWithdrawn("9.0.1")]
        serving = asyncio.create_task(binder.serve("fake"))
        await until(lambda: backend.log.calls)
        assert backend.log.calls == [("stop", ["8.0.1"])]
        binder.act([WithdrawStop("8.0.1", "fake")])  # too late
        assert facts == [StopWithdrawn("9.0.1")]
        serving.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("code", [NOT_REACHED, "BACKEND"], ids=["not reached", "maybe reached"])
def test_a_withdrawn_stop_that_failed_is_dropped_only_if_it_was_not_reached(code):
    async def main():
        backend = FakeBackend()
        backend.start_errors = [BackendError("no", code=code)] * 1000
        failed = asyncio.Event()
        binder, facts = _binder(backend, on_failure=lambda name, text: failed.set())
        serving = asyncio.create_task(binder.serve("fake"))
        binder.act([_start(1), _stop()])
        await asyncio.wait_for(failed.wait(), 10)
        binder.act([WithdrawStop("9.0.1", "fake")])
        assert facts == ([StopWithdrawn("9.0.1")] if code == NOT_REACHED else [])
        serving.cancel()

    asyncio.run(main())
