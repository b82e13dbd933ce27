"""The contract of every backend (`hodei.ports.Backend`), tested against its real system.

Tests of optional features run for backends that claim the capability, and are skipped for the others. Commands are
POSIX, so the smallest image has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hodei.backends.base import BackendContext
from hodei.model.backend import Capabilities, needs_of, unmet_by
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused, NotFound, Unsupported
from hodei.model.facts import RunObserved
from hodei.model.job import RUN_ENDED, Checkpoint, HealthCheck, Interactive
from hodei.model.outcome import StopReason
from hodei.ports import Backend, Stream
from hodei.testing.builders import an_order

DEADLINE_S = 120.0  # only how long a failing test takes


class WallClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def backend_context(home: Path, *, installation: str = "test", epoch: int = 1) -> BackendContext:
    """What a server passes to `make(name, settings, context)`."""
    return BackendContext(installation, epoch, home, WallClock())


class RunRecorder:
    """A backend and all its observations so far."""

    def __init__(self, backend: Backend, deadline_s: float = DEADLINE_S) -> None:
        self.backend = backend
        self.observed: list[RunObserved] = []
        self._deadline_s = deadline_s

    async def run(self, *orders: Start) -> list[RunObserved]:
        """Start these and wait for their ends, in the same order."""
        assert await self.backend.start(orders) == {}
        return [await self.end_of(order.run.id) for order in orders]

    async def poll(self) -> None:
        self.observed += await self.backend.observe()

    async def first(self, run: str, states: frozenset[str]) -> RunObserved:
        async with asyncio.timeout(self._deadline_s):
            while True:
                for observation in self.observed:
                    if observation.run == run and observation.state in states:
                        return observation
                await self.poll()

    async def end_of(self, run: str) -> RunObserved:
        return await self.first(run, RUN_ENDED)

    async def running(self, run: str) -> RunObserved:
        return await self.first(run, frozenset({"running"}))

    async def stop(self, run: str, grace_ms: int = 10_000, reason: StopReason | None = None) -> None:
        reason = reason or StopReason("cancelled", "by the test")
        await self.backend.stop([Stop(run, self.backend.name, grace_ms, reason)])

    async def log(self, run: str, stream: Stream = "stdout") -> bytes:
        out, offset = b"", 0
        while True:
            data, offset = await self.backend.logs(run, stream, offset, 1 << 20)
            if not data:
                return out
            out += data

    async def log_has(self, run: str, text: bytes) -> bytes:
        """Wait until the run has written this text."""
        for _ in range(int(self._deadline_s / 0.01)):
            if text in (output := await self.log(run)):
                return output
            await asyncio.sleep(0.01)
        raise AssertionError(f"{run} did not write {text!r}")


class Bench(RunRecorder):
    """An open backend under test. `make` creates another one for the same system, as a restarted server does."""

    def __init__(
        self, make: Callable[[], Backend], home: Path, *, fields: Mapping[str, Any], deadline_s: float
    ) -> None:
        super().__init__(make(), deadline_s)
        self.make, self.home, self._fields = make, home, fields
        self._node = ""

    async def order(self, job: int, *command: str, **fields: Any) -> Start:
        """A start on a node that the backend offers."""
        if not self._node:
            self._node = min(node.name for node in await self.backend.nodes() if node.ready)
        order = an_order(job, *command, **{**self._fields, **fields})
        return structs.replace(order, run=structs.replace(order.run, node=self._node, backend=self.backend.name))

    async def restart(self, *, after_s: float = 0) -> None:
        """The server stops, and after a while another one starts without any state."""
        await self.backend.close()
        await asyncio.sleep(after_s)
        self.observed.clear()
        self.backend = self.make()
        await self.backend.open()

    async def stop_all(self) -> None:
        left = [run for run, seen in (await self.backend.known()).items() if seen.state not in RUN_ENDED]
        for run in left:
            await self.stop(run, 0, StopReason("cancelled", "the test is over"))


# Arguments that a shell would interpret.
HOSTILE = (
    "a b", "$(id)", "`id`", "; id #", "'", '"', "\\", "*", "-n", "${HOME}", "a\nb", "%s", "é", "&& id", "|id", "!!",
)  # fmt: skip


def sh(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


def _command_lines() -> str:
    out = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            out.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(out)


def backend_test(*needed: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test of an open backend, skipped unless the backend claims these capabilities."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(self: BackendConformance, tmp_path: Path, **arguments: Any) -> None:
            home = tmp_path / "home"
            claimed = self.claims(home)
            missing = [name for name in needed if not getattr(claimed, name)]
            if missing:
                pytest.skip(f"the backend does not claim {', '.join(missing)}")

            async def run_open() -> None:
                async with self.open(home) as bench:
                    await test(self, bench, **arguments)

            asyncio.run(run_open())

        del run.__wrapped__
        own, bench, *others = inspect.signature(test).parameters.values()
        # pytest reads the fixtures from the signature.
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [own, bench.replace(name="tmp_path", annotation=Path), *others]
        )
        return run

    return decorate


class BackendConformance:
    """Subclass it, name the subclass `Test...`, and define `make_backend`.

    Each test starts with a system that has no runs of this installation. A fixture with `autouse` may set attributes of
    `self`, for example the address of a daemon.
    """

    capabilities: Capabilities | None = None  # what it must claim; None for whatever it claims
    order_fields: Mapping[str, Any] = {}  # put into every order: an image, for example
    shared_files = False  # whether runs see the test's directories under the same paths
    secret_names: tuple[str, ...] = ("API_TOKEN",)  # environment variables that may carry a secret
    deadline_s = 20.0  # for a run that ends at once

    def make_backend(self, home: Path) -> Backend:
        """A new backend, not open, for the same system at each call in one test. `home` is an empty directory."""
        raise TypeError(f"{type(self).__name__} does not define make_backend")

    async def clean_up(self) -> None:
        """After a test, when the backend is closed."""

    def claims(self, home: Path) -> Capabilities:
        return self.make_backend(home).capabilities if self.capabilities is None else self.capabilities

    @contextlib.asynccontextmanager
    async def open(self, home: Path) -> AsyncIterator[Bench]:
        bench = Bench(lambda: self.make_backend(home), home, fields=self.order_fields, deadline_s=self.deadline_s)
        await bench.backend.open()
        try:
            yield bench
        finally:
            with contextlib.suppress(Exception):
                await bench.stop_all()
            await bench.backend.close()
            await self.clean_up()

    @backend_test()
    async def test_a_backend_has_its_capabilities_and_is_healthy(self, bench: Bench) -> None:
        assert bench.backend.capabilities == self.claims(bench.home)
        health = await bench.backend.health()
        assert health.ok, health.text
        assert 0 <= health.took_ms < 10_000

    @backend_test()
    async def test_nodes_carry_the_name_of_their_backend_and_stay_the_same(self, bench: Bench) -> None:
        nodes = await bench.backend.nodes()
        assert nodes
        assert all(node.capacity["cpu"] > 0 for node in nodes)
        assert {node.backend for node in nodes} == {bench.backend.name}
        assert await bench.backend.nodes() == nodes

    @backend_test()
    async def test_a_run_is_seen_running_and_then_ended(self, bench: Bench) -> None:
        (end,) = await bench.run(await bench.order(1))
        assert (end.state, end.exit_code, end.reason_code) == ("succeeded", 0, "")
        seen = [seen.state for seen in bench.observed if seen.run == "1.0.1" and seen.state != "placed"]
        assert seen[-1] == "succeeded"
        assert set(seen) <= {"running", "succeeded"}

    @backend_test()
    async def test_a_start_ordered_twice_happens_once(self, bench: Bench) -> None:
        order = await bench.order(1)
        assert await bench.backend.start([order, order]) == {}
        assert await bench.backend.start([order]) == {}
        end = await bench.end_of("1.0.1")
        assert await bench.backend.start([order]) == {}
        assert await bench.backend.known() == {"1.0.1": end}

    @backend_test()
    async def test_a_run_that_was_never_ordered_is_unknown_and_not_finished(self, bench: Bench) -> None:
        await bench.run(await bench.order(1))
        assert "2.0.1" not in await bench.backend.known()

    @backend_test()
    async def test_stopping_unknown_and_ended_runs_is_no_error(self, bench: Bench) -> None:
        (end,) = await bench.run(await bench.order(1))
        await bench.stop("1.0.1")
        await bench.stop("77.0.1")
        hook = Checkpoint(signal="USR1")
        await bench.backend.stop(
            [Stop(run, bench.backend.name, 0, StopReason("cancelled", "enough"), hook) for run in ("1.0.1", "77.0.1")]
        )
        assert (await bench.backend.known())["1.0.1"] == end

    @backend_test()
    async def test_a_checkpoint_of_an_unknown_or_ended_run_does_nothing(self, bench: Bench) -> None:
        (end,) = await bench.run(await bench.order(1))
        hook = Checkpoint(signal="USR1")
        await bench.backend.checkpoint([TakeCheckpoint(run, bench.backend.name, hook) for run in ("1.0.1", "77.0.1")])
        assert await bench.backend.known() == {"1.0.1": end}

    @backend_test()
    async def test_an_end_stays_known_until_it_is_forgotten(self, bench: Bench) -> None:
        await bench.run(await bench.order(1), await bench.order(2))
        await bench.backend.forget([Forget("1.0.1", bench.backend.name)])
        await bench.backend.forget([Forget("1.0.1", bench.backend.name), Forget("9.0.1", bench.backend.name)])
        assert list(await bench.backend.known()) == ["2.0.1"]

    @backend_test()
    async def test_many_starts_in_one_call_all_end(self, bench: Bench) -> None:
        ends = await bench.run(*[await bench.order(job, cpu="10m", memory="1Mi") for job in range(1, 21)])
        assert {end.state for end in ends} == {"succeeded"}

    @backend_test()
    async def test_a_backend_refuses_what_it_does_not_claim_and_names_an_alternative(self, bench: Bench) -> None:
        backend, can = bench.backend, bench.backend.capabilities
        optional = {
            "reserve": lambda: backend.reserve([]),
            "execute": lambda: backend.execute("1.0.1", ["/bin/true"], 1000),
            "usage": backend.usage,
            "run_usage": lambda: backend.run_usage(["1.0.1"]),
            "suspend": lambda: backend.suspend(["1.0.1"]),
            "expects": backend.expected,
        }
        for name in (name for name in optional if not getattr(can, name)):
            with pytest.raises(BackendRefused) as refusal:
                await optional[name]()
            assert refusal.value.code == "BACKEND_CANNOT"
            assert backend.name in refusal.value.message
            assert refusal.value.hint

    @backend_test("commands")
    @pytest.mark.parametrize(
        ("script", "state", "code"),
        [
            pytest.param("exit 0", "succeeded", 0, id="0"),
            pytest.param("exit 1", "failed", 1, id="1"),
            pytest.param("exit 7", "failed", 7, id="7"),
            pytest.param("kill -KILL $$", "failed", 137, id="137 by a signal"),
            pytest.param("exit 137", "failed", 137, id="137 by itself"),
        ],
    )
    async def test_exit_codes_are_exact(self, bench: Bench, script: str, state: str, code: int) -> None:
        (end,) = await bench.run(await bench.order(1, *sh(script)))
        assert (end.state, end.exit_code) == (state, code)

    @backend_test("commands")
    async def test_arguments_reach_the_program_unchanged(self, bench: Bench) -> None:
        show = sh('for word; do printf "[%s]" "$word"; done')
        (end,) = await bench.run(await bench.order(1, *show, "sh", *HOSTILE))
        assert end.exit_code == 0
        assert await bench.log("1.0.1") == "".join(f"[{word}]" for word in HOSTILE).encode()

    @backend_test("commands")
    async def test_a_run_has_its_environment_its_directory_and_its_name(self, bench: Bench) -> None:
        env = {"GREETING": "hello 'you' \"there\" $HOME `id` \\", "HODEI_RANK": "99"}
        script = 'printf "%s|" "$GREETING" "$(pwd)" "$HODEI_RUN_ID" "$HODEI_JOB_ID" "$HODEI_RANK" "$HODEI_PROJECT"'
        await bench.run(await bench.order(1, *sh(script), env=env, workdir="/tmp", project="ml"))
        assert (await bench.log("1.0.1")).decode().split("|") == [env["GREETING"], "/tmp", "1.0.1", "1", "0", "ml", ""]

    @backend_test("commands")
    async def test_logs_are_read_from_an_offset(self, bench: Bench) -> None:
        await bench.run(await bench.order(1, *sh("printf 0123456789")))
        logs = bench.backend.logs
        assert await bench.log_has("1.0.1", b"0123456789")
        assert await logs("1.0.1", "stdout", 0, 4) == (b"0123", 4)
        assert await logs("1.0.1", "stdout", 4, 100) == (b"456789", 10)
        assert await logs("1.0.1", "stdout", 10, 100) == (b"", 10)
        await bench.backend.forget([Forget("1.0.1", bench.backend.name)])
        with pytest.raises(NotFound):
            await logs("99.0.1", "stdout", 0, 4)

    @backend_test("commands", "two_streams")
    async def test_stdout_and_stderr_are_separate(self, bench: Bench) -> None:
        await bench.run(await bench.order(1, *sh("echo out; echo error >&2")))
        assert await bench.log_has("1.0.1", b"out") == b"out\n"
        assert await bench.log("1.0.1", "stderr") == b"error\n"

    @backend_test("commands")
    async def test_output_is_readable_while_the_run_is_running(self, bench: Bench) -> None:
        await bench.backend.start([await bench.order(1, *sh("echo ready; sleep 300"))])
        assert await bench.log_has("1.0.1", b"ready\n")
        await bench.stop("1.0.1", grace_ms=0)
        await bench.end_of("1.0.1")

    @backend_test("commands")
    async def test_a_stop_ends_the_run_and_carries_its_reason_back(self, bench: Bench) -> None:
        script = "trap 'echo got TERM; exit 9' TERM; echo ready; while :; do sleep 0.1; done"
        await bench.backend.start([await bench.order(1, *sh(script))])
        await bench.log_has("1.0.1", b"ready")
        await bench.stop("1.0.1", grace_ms=600_000, reason=StopReason("preempted", "by 7"))
        await bench.stop("1.0.1", grace_ms=600_000, reason=StopReason("cancelled", "a second time"))
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 9, "preempted by 7")
        assert b"got TERM" in await bench.log("1.0.1")

    @backend_test("commands")
    async def test_a_run_that_ignores_term_is_killed_after_its_grace_period(self, bench: Bench) -> None:
        script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
        await bench.backend.start([await bench.order(1, *sh(script))])
        await bench.log_has("1.0.1", b"ready")
        await bench.stop("1.0.1", grace_ms=200)
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code) == ("stopped", 137)

    @backend_test("commands")
    async def test_a_stop_right_after_the_start_is_not_lost(self, bench: Bench) -> None:
        orders = [await bench.order(job, "/bin/sleep", "300", cpu="10m", memory="1Mi") for job in range(1, 6)]
        assert await bench.backend.start(orders) == {}
        for order in orders:
            await bench.stop(order.run.id, grace_ms=0)
        assert {(await bench.end_of(order.run.id)).state for order in orders} == {"stopped"}

    @backend_test("commands")
    async def test_an_order_that_can_never_run_is_refused_and_the_others_start(self, bench: Bench) -> None:
        answer = await bench.backend.start(
            [await bench.order(1, "/bin/echo", "a\0b"), await bench.order(2, "/bin/echo", "fine")]
        )
        assert {run: type(error) for run, error in answer.items()} == {"1.0.1": BackendRefused}
        assert (await bench.end_of("2.0.1")).state == "succeeded"

    @backend_test("commands", "images")
    async def test_an_image_that_does_not_exist_is_named_in_the_reason(self, bench: Bench) -> None:
        image = "127.0.0.1:1/no-such-image:never"
        answer = await bench.backend.start([await bench.order(1, "/bin/true", image=image)])
        reason = answer["1.0.1"].message if answer else (await bench.end_of("1.0.1")).reason
        assert "no-such-image" in reason

    @backend_test("commands")
    async def test_a_run_that_ends_while_the_server_is_down_is_found_with_its_exit_code(self, bench: Bench) -> None:
        await bench.backend.start([await bench.order(1, *sh("sleep 1; exit 7"))])
        await bench.running("1.0.1")
        await bench.restart(after_s=2)
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code) == ("failed", 7)
        assert (await bench.backend.known())["1.0.1"] == end

    @backend_test("commands")
    async def test_a_run_survives_a_server_restart(self, bench: Bench) -> None:
        order = await bench.order(1, *sh("echo ready; sleep 300"))
        await bench.backend.start([order])
        await bench.log_has("1.0.1", b"ready")
        await bench.restart()
        assert (await bench.backend.known())["1.0.1"].state == "running"
        assert await bench.backend.start([order]) == {}
        await bench.stop("1.0.1", grace_ms=0)
        assert (await bench.end_of("1.0.1")).state == "stopped"

    @backend_test("commands")
    async def test_ends_are_observed_again_after_a_restart_until_they_are_forgotten(self, bench: Bench) -> None:
        first, second = await bench.run(await bench.order(1), await bench.order(2, *sh("exit 4")))
        await bench.backend.forget([Forget(first.run, bench.backend.name)])
        await bench.restart()
        again = await bench.end_of("2.0.1")
        assert (again.state, again.exit_code) == (second.state, second.exit_code)
        assert {seen.run for seen in bench.observed} == {"2.0.1"}

    @backend_test("commands")
    @pytest.mark.parametrize("late_s", [0.0, 0.001, 0.01, 0.05, 0.2], ids=lambda late_s: f"after {late_s * 1000:g} ms")
    async def test_a_start_whose_answer_was_lost_is_adopted_and_not_repeated(self, bench: Bench, late_s: float) -> None:
        """The server is killed during the call, and the next one repeats the start."""
        proof = bench.home.parent / "proof"
        script = f"echo ran >> {proof}; echo ran" if self.shared_files else "echo ran"
        order = await bench.order(1, *sh(script))
        lost = asyncio.create_task(bench.backend.start([order]))
        await asyncio.wait({lost}, timeout=late_s)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        await bench.restart()
        for _ in range(100):
            with contextlib.suppress(BackendError):
                assert await bench.backend.start([order]) == {}
                break
            await asyncio.sleep(0.1)
        assert (await bench.end_of("1.0.1")).state == "succeeded"
        assert await bench.log_has("1.0.1", b"ran\n") == b"ran\n"
        assert list(await bench.backend.known()) == ["1.0.1"]
        if self.shared_files:
            assert proof.read_text() == "ran\n"

    @backend_test("commands")
    async def test_a_backend_that_is_not_open_is_unhealthy_at_once(self, bench: Bench) -> None:
        other = bench.make()
        health = await other.health()  # never opened
        assert not health.ok
        assert health.text
        await other.close()

    @backend_test("commands")
    async def test_a_secret_is_on_no_command_line_in_no_log_and_in_no_error(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Reads the command lines of this machine while the run is running."""
        caplog.set_level(logging.DEBUG)
        secret = "hush-7d1c5a0e42-not-for-others"
        env = dict.fromkeys(self.secret_names, secret)
        script = sh('test -n "$API_TOKEN" && echo ready; sleep 300')
        bad = await bench.order(2, "/bin/echo", "a\0b", env=env)
        answer = await bench.backend.start([await bench.order(1, *script, env=env), bad])
        text = "".join(f"{error.message}{error.hint}" for error in answer.values())
        for _ in range(20):
            assert secret not in await asyncio.to_thread(_command_lines)
            await asyncio.sleep(0.01)
        await bench.log_has("1.0.1", b"ready")
        assert secret not in await asyncio.to_thread(_command_lines)
        text += repr(await bench.backend.known()) + repr(await bench.backend.nodes())
        await bench.stop("1.0.1", grace_ms=0)
        text += repr(await bench.end_of("1.0.1"))
        assert secret not in text
        assert secret not in caplog.text

    @backend_test("commands", "execute")
    async def test_exec_runs_a_command_in_a_run_and_no_shell_interprets_its_arguments(self, bench: Bench) -> None:
        await bench.backend.start([await bench.order(1, *sh("echo ready; sleep 300"), env={"MINE": "yes"})])
        await bench.log_has("1.0.1", b"ready")
        execute = bench.backend.execute
        show = sh('for word; do printf "[%s]" "$word"; done; exit 3')
        done = await execute("1.0.1", [*show, "sh", *HOSTILE], 10_000)
        assert (done.exit_code, done.stdout) == (3, "".join(f"[{word}]" for word in HOSTILE).encode())
        assert (await execute("1.0.1", sh('echo "$MINE"'), 10_000)).stdout == b"yes\n"
        assert (await execute("1.0.1", ["/bin/sleep", "300"], 200)).exit_code is None
        both = await asyncio.gather(*(execute("1.0.1", ["/bin/echo", str(n)], 10_000) for n in range(4)))
        assert [one.stdout for one in both] == [b"0\n", b"1\n", b"2\n", b"3\n"]
        await bench.stop("1.0.1", grace_ms=0)
        await bench.end_of("1.0.1")
        for run in ("1.0.1", "99.0.1"):
            with pytest.raises(NotFound):
                await execute(run, ["/bin/true"], 10_000)
        assert await bench.log("1.0.1") == b"ready\n"

    @backend_test("usage")
    async def test_usage_is_of_offered_nodes(self, bench: Bench) -> None:
        usage = await bench.backend.usage()
        assert usage.keys() <= {node.name for node in await bench.backend.nodes()}
        assert all(amount >= 0 for node in usage.values() for amount in node.used.values())

    @backend_test("commands", "run_usage")
    async def test_usage_is_of_live_runs_grows_and_is_part_of_the_end(self, bench: Bench) -> None:
        run_usage = bench.backend.run_usage
        assert await run_usage(["1.0.1", "99.0.1"]) == {}
        await bench.backend.start([await bench.order(1, *sh("echo ready; while :; do :; done"))])
        await bench.log_has("1.0.1", b"ready")
        cpu_ms = -1
        async with asyncio.timeout(DEADLINE_S):
            while cpu_ms < 200:
                found = await run_usage(["1.0.1", "99.0.1"])
                assert found.keys() <= {"1.0.1"}
                used = found["1.0.1"].cpu_ms if found else None
                assert used is None or used >= cpu_ms
                cpu_ms = cpu_ms if used is None else used
                await asyncio.sleep(0.05)
        await bench.stop("1.0.1", grace_ms=0)
        end = await bench.end_of("1.0.1")
        assert end.usage is not None
        assert end.usage.cpu_ms is not None
        assert end.usage.cpu_ms >= cpu_ms
        assert await run_usage(["1.0.1"]) == {}

    @backend_test("commands", "suspend")
    async def test_a_suspended_run_does_nothing_until_it_is_resumed(self, bench: Bench) -> None:
        script = "echo ready; n=0; while [ $n -lt 1000 ]; do n=$((n+1)); echo $n; sleep 0.05; done"
        await bench.backend.start([await bench.order(1, *sh(script))])
        await bench.log_has("1.0.1", b"ready")
        await bench.backend.suspend(["1.0.1", "99.0.1"])
        await bench.backend.suspend(["1.0.1"])
        before = await bench.log("1.0.1")
        await asyncio.sleep(0.5)
        assert len(await bench.log("1.0.1")) - len(before) < 20
        assert (await bench.backend.known())["1.0.1"].state not in RUN_ENDED
        await bench.backend.resume(["1.0.1", "99.0.1"])
        await bench.log_has("1.0.1", before.split(b"\n")[-2] + b"\n")
        await bench.stop("1.0.1", grace_ms=0)
        assert (await bench.end_of("1.0.1")).state == "stopped"

    @backend_test("commands", "reserve")
    async def test_reserving_and_unreserving_are_idempotent(self, bench: Bench) -> None:
        orders = [await bench.order(1), await bench.order(2)]
        await bench.backend.reserve(orders)
        await bench.backend.reserve(orders)
        await bench.backend.unreserve(["2.0.1"])
        await bench.backend.unreserve(["2.0.1", "99.0.1"])
        assert await bench.backend.known() == {}
        assert (await bench.run(orders[0]))[0].state == "succeeded"

    @backend_test("expects")
    async def test_expected_starts_are_of_known_runs(self, bench: Bench) -> None:
        assert (await bench.backend.expected()).keys() <= (await bench.backend.known()).keys()

    @backend_test("commands")
    async def test_claimed_features_work_and_others_are_refused(self, bench: Bench) -> None:
        """The filter `capabilities` trusts the claims: a backend that claims too much fails jobs for good."""
        cannot = unmet_by(bench.backend.capabilities)
        features: dict[str, dict[str, Any]] = {
            "bare": {"image": ""},
            "health_checks": {"health": HealthCheck(command=("/bin/true",))},
            "checkpoint": {"checkpoint": Checkpoint(signal="USR1")},
            "checkpoint_commands": {"checkpoint": Checkpoint(command=("/bin/true",))},
            "limits": {"limits": {"memory": 256 << 20}, "memory": "32Mi"},
            "idle_timeouts": {"workload": Interactive(600_000)},
        }
        jobs = {need: number for number, need in enumerate(features, 1)}
        orders = [await bench.order(jobs[need], "/bin/true", **fields) for need, fields in features.items()]
        orders = [order for order in orders if not set(needs_of(order.spec, order.task)) & set(cannot)]
        assert orders
        assert await bench.backend.start(orders) == {}
        for order in orders:
            end = await bench.end_of(order.run.id)
            assert (end.state, end.exit_code) == ("succeeded", 0), f"{order.run.id}: {end.reason}"
        never = {"images": {"image": "busybox:local"}, "health_checks": features["health_checks"]}
        for number, (need, fields) in enumerate(never.items(), 20):
            if need in cannot:
                order = await bench.order(number, "/bin/true", **fields)
                answer = await bench.backend.start([order])
                assert isinstance(answer[order.run.id], BackendRefused)

    @backend_test("commands", "limits")
    async def test_a_memory_limit_is_enforced(self, bench: Bench) -> None:
        greedy = sh("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}")
        small = await bench.order(1, *greedy, memory="32Mi", limits={"memory": 64 << 20})
        large = await bench.order(2, *greedy, memory="32Mi", limits={"memory": 1 << 30})
        assert await bench.backend.start([small, large]) == {}
        assert (await bench.end_of("1.0.1")).state == "failed"
        end = await bench.end_of("2.0.1")
        assert (end.state, end.exit_code) == ("succeeded", 0), end.reason

    @backend_test("commands")
    async def test_an_operator_runs_a_command_on_a_node_where_the_backend_can(self, bench: Bench) -> None:
        execute = bench.backend.execute_on
        (*_, node) = sorted(node.name for node in await bench.backend.nodes() if node.ready)
        if not bench.backend.capabilities.node_execute:
            with pytest.raises(Unsupported, match="cannot run a command on a node") as refusal:
                await execute(node, ["/bin/true"], 10_000)
            assert refusal.value.hint
            return
        show = sh('for word; do printf "[%s]" "$word"; done; echo oops >&2; exit 3')
        done = await execute(node, [*show, "sh", *HOSTILE], 20_000)
        assert (done.exit_code, done.stdout) == (3, "".join(f"[{word}]" for word in HOSTILE).encode())
        assert b"oops" in done.stderr
        assert (await execute(node, ["/bin/sleep", "300"], 500)).exit_code is None
        with pytest.raises(NotFound):
            await execute("no-such-node", ["/bin/true"], 10_000)
