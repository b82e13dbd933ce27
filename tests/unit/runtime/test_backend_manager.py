"""Backends of a running server: health, circuits, disabling, adding, and one that hangs while others do not.

The backends are fakes: nothing here proves how a real system fails.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from builders import NOW_MS, a_job_spec, a_node, a_run
from hodei.control.lifecycle.retry import Backoff, CircuitPolicy
from hodei.model.backend import Capabilities, ExecResult, Health
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, Conflict, InvalidInput, NotFound, Unsupported
from hodei.model.facts import RunObserved
from hodei.model.job import BackendChoice, Checkpoint
from hodei.model.resources import format_time
from hodei.runtime import job_actions
from hodei.runtime.backend_manager import BackendFactory
from hodei.runtime.watcher import HealthPolicy
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, FakeClock, a_service, alive, until

# Health is checked only when a test calls `check_health`.
MANUAL_CHECKS = HealthPolicy(every_ms=0, timeout_ms=50, circuit=CircuitPolicy(failures=2))


class ControlledBackend(FakeBackend):
    """The test sets its health; it can also hang in any call until `hung` is set."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, [a_node(f"{name}-1", 8, backend=name)], **options)
        self.healths: list[Health | Exception] = []
        self.hung: asyncio.Event | None = None
        self.hang_open = False

    async def _maybe_hang(self) -> None:
        if self.hung is not None:
            await self.hung.wait()

    async def open(self) -> None:
        if self.hang_open:
            await asyncio.Event().wait()
        await super().open()

    async def health(self) -> Health:
        await self._maybe_hang()
        answer = self.healths.pop(0) if self.healths else Health(True, "fine", 3)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def start(self, orders: Any) -> Any:
        await self._maybe_hang()
        return await super().start(orders)

    async def execute(self, run: str, command: Any, timeout_ms: int) -> ExecResult:
        return ExecResult(0, " ".join(command).encode())


def on(name: str, **fields: Any) -> Any:
    return a_job_spec(backend=BackendChoice("specific", (name,)), **fields)


def check_health(service: Any, name: str) -> Any:
    return service.backend_manager._managed[name].health.check()


def test_an_unhealthy_backend_is_skipped_and_why_names_the_time():
    async def main():
        bad, clock = ControlledBackend("bad"), FakeClock()
        async with alive(
            a_service(MemoryStore(), bad, ControlledBackend("good"), clock=clock, health=MANUAL_CHECKS)
        ) as service:
            bad.healths = [Health(False, "disk failure"), Health(False, "still failing")]
            await check_health(service, "bad")
            assert service.backend_manager.status("bad").state == "ok"
            clock.ms += 5000
            await check_health(service, "bad")
            status = service.backend_manager.status("bad")
            assert (status.state, status.since_ms, status.text) == ("unhealthy", NOW_MS, "disk failure")
            await service.submit([on("bad"), a_job_spec()])
            await until(lambda: ("start", ["2.0.1"]) in service.backend_manager.backends["good"].log.calls)
            why = await service.why(1)
            text = f"backend bad is unhealthy since {format_time(NOW_MS)}: disk failure"
            assert text in repr(why)
            assert "BACKEND_UNHEALTHY" in repr(why)
            assert service.backend_manager.errors() == {"bad": "disk failure", "good": ""}
            clock.ms += 5000
            await check_health(service, "bad")
            await until(lambda: ("start", ["1.0.1"]) in bad.log.calls)
            kinds = [event.kind for event in service.store.events()]
            assert "backend.unhealthy" in kinds
            assert "backend.healthy" in kinds

    asyncio.run(main())


def test_a_backend_that_was_never_reached_is_unreachable_even_if_its_health_check_fails():
    class Unreachable(ControlledBackend):
        async def open(self) -> None:
            raise BackendError("refused")

    async def main():
        unreachable, clock = Unreachable("unreachable"), FakeClock()
        async with alive(
            a_service(MemoryStore(), unreachable, ControlledBackend("good"), clock=clock, health=MANUAL_CHECKS)
        ) as service:
            await service.submit([on("unreachable")])
            await until(lambda: "is unreachable" in service.store.job(1).reason)
            unreachable.healths = [Health(False, "no answer"), Health(False, "no answer")]
            clock.ms += 30_000
            await check_health(service, "unreachable")
            await check_health(service, "unreachable")
            await until(lambda: "backend.unhealthy" in [event.kind for event in service.store.events()])
            why = await service.why(1)
            assert f"backend unreachable is unreachable since {format_time(NOW_MS)}: refused" in why.summary
            assert why.code == "BACKEND_UNAVAILABLE"

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(RuntimeError("a bug"), id="it raises"),
        pytest.param(None, id="it does not answer"),
    ],
)
def test_a_failed_or_missing_answer_is_unhealthy(answer):
    async def main():
        bad = ControlledBackend("bad")
        async with alive(a_service(MemoryStore(), bad, health=MANUAL_CHECKS)) as service:
            if answer is None:
                bad.hung = asyncio.Event()
            bad.healths = [answer, answer] if answer else []
            assert not (await check_health(service, "bad")).ok
            await check_health(service, "bad")
            assert service.backend_manager.status("bad").state == "unhealthy"

    asyncio.run(main())


def test_a_backend_that_recovers_from_an_outage_is_checked_at_once():
    async def main():
        # The clock does not advance, so the pause never ends.
        bad = ControlledBackend("bad")
        policy = HealthPolicy(every_ms=3_600_000, circuit=CircuitPolicy(2, Backoff(3_600_000, 2, 3_600_000, 0)))
        async with alive(a_service(MemoryStore(), bad, health=policy)) as service:
            bad.healths = [Health(False, "down"), Health(False, "down")]
            await check_health(service, "bad")
            await check_health(service, "bad")
            assert service.backend_manager.status("bad").state == "unhealthy"
            bad.disconnect()
            await until(lambda: bad.opened == 2)
            await until(lambda: service.backend_manager.status("bad").state == "ok")

    asyncio.run(main())


def test_a_backend_that_hangs_does_not_delay_others():
    async def main():
        hung, good = ControlledBackend("hung"), ControlledBackend("good")
        async with alive(a_service(MemoryStore(), hung, good, health=MANUAL_CHECKS)) as service:
            hung.hung = asyncio.Event()
            await service.submit([on("hung"), on("good")])
            await until(lambda: ("start", ["2.0.1"]) in good.log.calls)
            good.report(RunObserved("2.0.1", "succeeded", NOW_MS, 0))
            assert (await service.wait(2, 5000)).state == "succeeded"
            assert service.store.job(1).state == "scheduled"
            hung.hung.set()
            await until(lambda: ("start", ["1.0.1"]) in hung.log.calls)

    asyncio.run(main())


def test_a_server_is_ready_without_a_backend_that_hangs(monkeypatch):
    monkeypatch.setattr("hodei.runtime.watcher.FIRST_TRY_S", 0.05)

    async def main():
        unreachable = ControlledBackend("unreachable")
        unreachable.hang_open = True
        async with alive(
            a_service(MemoryStore(), unreachable, ControlledBackend("good"), health=MANUAL_CHECKS)
        ) as service:
            assert service.ready
            assert {status.backend.name: status.state for status in service.backend_manager.statuses()} == {
                "good": "ok",
                "unreachable": "connecting",
            }

    asyncio.run(main())


def test_starts_that_were_not_sent_move_to_another_backend_and_starts_in_doubt_wait():
    async def main():
        bad, good = ControlledBackend("bad"), ControlledBackend("good")
        async with alive(a_service(MemoryStore(), bad, good, health=MANUAL_CHECKS)) as service:
            bad.start_errors = [
                BackendError("no answer"),
                *(BackendError("refused", code=NOT_REACHED) for _ in range(9)),
            ]
            spec = a_job_spec(backend=BackendChoice("preferred", ("bad", "good")))
            await service.submit([spec])
            await until(lambda: len(bad.log.calls) >= 2)  # the first start is in doubt
            await until(lambda: service.backend_manager.status("bad").state == "unhealthy")
            await service.submit([spec])
            await until(lambda: any(kind == "start" for kind, _ in good.log.calls))
            assert good.log.calls[-1][1][0].startswith("2.")
            assert service.store.job(1).state == "scheduled"

    asyncio.run(main())


def test_a_disabled_backend_starts_nothing_more_and_stays_disabled_over_a_restart():
    async def main():
        store, clock = MemoryStore(), FakeClock()
        backend = ControlledBackend("one")
        async with alive(a_service(store, backend, clock=clock, health=MANUAL_CHECKS)) as service:
            await service.submit([a_job_spec()])
            await until(lambda: ("start", ["1.0.1"]) in backend.log.calls)
            backend.report(RunObserved("1.0.1", "running", NOW_MS))
            assert (await service.backend_manager.disable("one")).state == "disabled"
            await service.submit([a_job_spec()])
            why = await service.why(2)
            assert why.code == "BACKEND_DISABLED"
            assert f"backend one is disabled since {format_time(NOW_MS)}" in repr(why)
            await until(lambda: service.store.job(1).state == "running")
        backend = ControlledBackend("one")
        backend.known_runs = {"1.0.1": RunObserved("1.0.1", "running", NOW_MS)}
        clock.ms += 1000
        async with alive(a_service(MemoryStore(of=store), backend, clock=clock, health=MANUAL_CHECKS)) as service:
            assert service.backend_manager.status("one").since_ms == NOW_MS
            assert (await service.why(2)).code == "BACKEND_DISABLED"
            assert (await service.backend_manager.enable("one")).state == "ok"
            await until(lambda: ("start", ["2.0.1"]) in backend.log.calls)

    asyncio.run(main())


def a_factory(backends: list[ControlledBackend], **tables: Any) -> BackendFactory:
    def make(name: str, table: Any) -> ControlledBackend:
        if table.get("kind") != "controlled":
            raise InvalidInput("no such kind")
        backends.append(ControlledBackend(name))
        return backends[-1]

    def with_cost(table: Any) -> Any:
        return lambda node: structs.replace(node, cost_milli=table.get("cost", 0))

    return BackendFactory(make, with_cost, tables)


def test_a_backend_is_added_at_run_time_kept_over_a_restart_and_removed():
    async def main():
        store, backends = MemoryStore(), []
        factory = a_factory(backends, first={})
        async with alive(
            a_service(store, ControlledBackend("first"), health=MANUAL_CHECKS, backend_factory=factory)
        ) as service:
            await service.backend_manager.add("second", {"kind": "controlled", "cost": 7, "password": "secret"})
            await until(lambda: service.backend_manager.status("second").state == "ok")
            await service.submit([on("second")])
            await until(lambda: ("start", ["1.0.1"]) in backends[0].log.calls)
            assert {status.node.name: status.node.cost_milli for status in service.nodes()} == {
                "first-1": 0,
                "second-1": 7,
            }
            with pytest.raises(Conflict):
                await service.backend_manager.add("second", {"kind": "controlled"})
            with pytest.raises(InvalidInput):
                await service.backend_manager.add("third", {"kind": "other"})
            with pytest.raises(InvalidInput):
                await service.backend_manager.add("a/b", {"kind": "controlled"})
        store = MemoryStore(of=store)
        async with alive(
            a_service(store, ControlledBackend("first"), health=MANUAL_CHECKS, backend_factory=factory)
        ) as service:
            assert service.backend_manager.status("second").source == "added"
            backends[1].report(RunObserved("1.0.1", "running", NOW_MS))
            with pytest.raises(Conflict, match="backend second has 1 active runs"):
                await service.backend_manager.remove("second")
            with pytest.raises(Conflict, match="configuration file"):
                await service.backend_manager.remove("first")
            with pytest.raises(NotFound, match="did you mean 'second'"):
                await service.backend_manager.remove("secnd")
            await service.backend_manager.remove("second", force=True)
            await until(lambda: [status.node.name for status in service.nodes()] == ["first-1"])
            await until(lambda: service.store.job(1).reason_code == "LOST")
            assert service.backends == ("first",)
        async with alive(
            a_service(MemoryStore(of=store), ControlledBackend("first"), health=MANUAL_CHECKS, backend_factory=factory)
        ) as service:
            assert service.backends == ("first",)

    asyncio.run(main())


def test_a_node_with_the_name_of_another_backends_node_is_ignored():
    async def main():
        first, second = ControlledBackend("first"), ControlledBackend("second")
        second.offered = [a_node("first-1", backend="second"), a_node("own", backend="second")]
        async with alive(a_service(MemoryStore(), first, second, health=MANUAL_CHECKS)) as service:
            assert {s.node.name: s.node.backend for s in service.nodes()} == {"first-1": "first", "own": "second"}

    asyncio.run(main())


def test_a_command_goes_to_the_backend_of_its_run():
    async def main():
        async with alive(a_service(MemoryStore(), ControlledBackend("one"), health=MANUAL_CHECKS)) as service:
            await service.submit([a_job_spec()])
            await until(lambda: service.store.runs(1))
            done = await service.backend_manager.execute(service.store.runs(1)[0], ("echo", "$HOME"), 1000)
            assert done.stdout == b"echo $HOME"

    asyncio.run(main())


def test_a_checkpoint_is_refused_if_the_backend_does_not_support_it():
    async def main():
        backend = FakeBackend()
        backend.capabilities = Capabilities(checkpoint=True)
        async with alive(a_service(MemoryStore(), backend, health=MANUAL_CHECKS)) as service:
            await service.submit([a_job_spec(checkpoint=Checkpoint(signal="USR1"))])
            await until(lambda: backend.log.calls)
            backend.report(RunObserved("1.0.1", "running", NOW_MS))
            await until(lambda: service.store.job(1).state == "running")
            backend.capabilities = Capabilities()  # its settings changed after the placement
            with pytest.raises(Unsupported, match=r"fake .* cannot request a checkpoint") as error:
                await job_actions.checkpoint(service, 1)
            assert "hodei backend show" in error.value.hint
            backend.capabilities = Capabilities(checkpoint=True)
            await job_actions.checkpoint(service, 1)
            await until(lambda: ("checkpoint", ["1.0.1"]) in backend.log.calls)

    asyncio.run(main())


class ReservingBackend(ControlledBackend):
    """Reserves capacity; there is none for the runs in `full`."""

    capabilities = Capabilities(reserve=True)
    full: frozenset[str] = frozenset()

    async def reserve(self, orders: Any) -> None:
        self.log.record("reserve", [order.run.id for order in orders])
        if any(order.run.id in self.full for order in orders):
            raise BackendError("no capacity")

    async def unreserve(self, runs: Any) -> None:
        self.log.record("unreserve", list(runs))


def test_a_gang_starts_after_its_capacity_is_reserved_and_single_runs_need_no_reservation():
    async def main():
        backend = ReservingBackend("one")
        async with alive(a_service(MemoryStore(), backend, health=MANUAL_CHECKS)) as service:
            backend.full = frozenset({"2.1.1"})
            await service.submit([a_job_spec(), a_job_spec(count=2), a_job_spec(count=2)])
            await until(lambda: any(kind == "start" and "3.0.1" in runs for kind, runs in backend.log.calls))
            started = [run for kind, runs in backend.log.calls if kind == "start" for run in runs]
            assert sorted(started) == ["1.0.1", "3.0.1", "3.1.1"]
            assert [runs for kind, runs in backend.log.calls if kind == "reserve"][:2] == [
                ["2.0.1", "2.1.1"],
                ["3.0.1", "3.1.1"],
            ]
            await until(lambda: service.store.job(2).reason_code == "START_FAILED")

    asyncio.run(main())


def test_reserved_capacity_is_released_for_members_that_are_refused():
    async def main():
        backend = ReservingBackend("one")
        backend.refuse = {"1.1.1": BackendRefused("never")}
        async with alive(a_service(MemoryStore(), backend, health=MANUAL_CHECKS)) as service:
            await service.submit([a_job_spec(count=2)])
            await until(lambda: ("unreserve", ["1.1.1"]) in backend.log.calls)

    asyncio.run(main())


def test_a_run_that_has_not_started_has_an_empty_log():
    class WithoutLogs(ControlledBackend):
        async def logs(self, run: str, stream: Any, offset: int, limit: int) -> tuple[bytes, int]:
            raise NotFound(f"there is no output of run {run}")

    async def main():
        async with alive(a_service(MemoryStore(), WithoutLogs("one"), health=MANUAL_CHECKS)) as service:
            placed = a_run(7, backend="one", node="one-1")
            assert await service.backend_manager.logs(placed, "stdout", 5, 100) == (b"", 5)
            with pytest.raises(NotFound):
                await service.backend_manager.logs(structs.replace(placed, state="running"), "stdout", 0, 100)

    asyncio.run(main())
