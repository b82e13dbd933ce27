"""Supervision of real processes: health checks, checkpoints and idle timeouts."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_host import DEADLINE_S, ReconnectingRecorder, alive, an_order, kill_agent, local_agent, until
from hodei.model.effects import Forget, Stop, TakeCheckpoint
from hodei.model.facts import RunObserved
from hodei.model.job import Checkpoint, HealthCheck, Interactive
from hodei.model.outcome import StopReason
from real.supervised_run import HOUR_MS, RUN, SAVES_ON_USR1, WAITS, begin, sh

pytestmark = pytest.mark.real


def quick(**fields: Any) -> HealthCheck:
    """Ten checks per second; unhealthy after three failures."""
    return HealthCheck(**{"every_ms": 100, "timeout_ms": HOUR_MS, **fields})


async def until_observed(recorder: ReconnectingRecorder, matches: Callable[[RunObserved], bool]) -> RunObserved:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for seen in recorder.observed:
                if seen.run == RUN and matches(seen):
                    return seen
            await recorder.poll()


def test_a_run_whose_health_check_fails_three_times_in_a_row_is_stopped(tmp_path):
    async def scenario() -> None:
        checks = tmp_path / "checks"
        check = quick(command=sh(f"echo check >> {checks}; echo out of memory; exit 4"))
        async with local_agent(tmp_path / "home") as recorder:
            await begin(
                recorder,
                *sh("trap 'echo stopping; exit 9' TERM; echo ready; while :; do sleep 0.02; done"),
                health=check,
            )
            end = await recorder.end_of(RUN)
            assert (end.state, end.exit_code, end.reason_code) == ("failed", 9, "unhealthy")
            assert end.reason == "its health check failed 3 times in a row: exit code 4: out of memory"
            assert checks.read_text() == "check\n" * 3
            assert await recorder.log(RUN) == b"ready\nstopping\n"
            assert [seen.health for seen in recorder.observed if seen.health] == ["failing"]

    asyncio.run(scenario())


def test_one_passed_health_check_resets_the_failures(tmp_path):
    async def scenario() -> None:
        count = tmp_path / "count"
        # Every third check passes.
        check = quick(command=sh(f"echo x >> {count}; test $(($(wc -l < {count}) % 3)) = 0"))
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS, health=check)
            await until(lambda: count.exists() and len(count.read_text().split()) >= 9)
            assert (await recorder.backend.known())[RUN].state == "running"
            await until_observed(recorder, lambda seen: seen.health == "ok")

    asyncio.run(scenario())


def test_a_health_check_that_hangs_is_killed_with_its_children(tmp_path):
    async def scenario() -> None:
        pids = tmp_path / "pids"
        check = quick(command=sh(f"sleep 300 & echo $! $$ >> {pids}; wait"), timeout_ms=2000, failures=1)
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS, health=check)
            end = await recorder.end_of(RUN)
            assert (end.reason_code, end.reason) == (
                "unhealthy", "its health check failed once: it did not end within 2s",
            )  # fmt: skip
            for pid in pids.read_text().split():
                await until(lambda pid=pid: not alive(int(pid)))

    asyncio.run(scenario())


def test_a_health_check_has_the_environment_and_directory_of_its_run(tmp_path):
    async def scenario() -> None:
        out = tmp_path / "out"
        check = quick(command=sh(f'echo "$GREETING $HODEI_RUN_ID $PWD" > {out}'))
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS, health=check, env={"GREETING": "hello"}, workdir="/tmp")
            await until_observed(recorder, lambda seen: seen.health == "ok")
            assert out.read_text() == f"hello {RUN} /tmp\n"

    asyncio.run(scenario())


def test_an_http_health_check_with_a_bad_status_is_unhealthy(tmp_path):
    status = 200

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def scenario() -> None:
        nonlocal status
        async with local_agent(tmp_path / "home") as recorder:
            check = quick(http=f"http://node:{server.server_port}/ready")
            await begin(recorder, *WAITS, health=check)
            await until_observed(recorder, lambda seen: seen.health == "ok")
            status = 503
            end = await recorder.end_of(RUN)
            assert (end.reason_code, end.reason) == (
                "unhealthy", "its health check failed 3 times in a row: status 503",
            )  # fmt: skip

    try:
        asyncio.run(scenario())
    finally:
        server.shutdown()
        server.server_close()


def test_an_http_health_check_of_another_host_is_refused_by_the_agent(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            errors = await recorder.backend.start([an_order(1, health=quick(http="http://192.0.2.1/"))])
            assert "localhost or an address of this node" in errors[RUN].message

    asyncio.run(scenario())


def test_a_run_whose_heartbeat_stops_is_stopped(tmp_path):
    async def scenario() -> None:
        beat, stop = tmp_path / "beat", tmp_path / "stop"
        script = f"echo ready; while :; do test -e {stop} || echo beat >> {beat}; sleep 0.01; done"
        async with local_agent(tmp_path / "home") as recorder:
            # Slow enough that a busy machine delays no beat for three checks.
            await begin(recorder, *sh(script), health=quick(file=str(beat), every_ms=1000))
            await until_observed(recorder, lambda seen: seen.health == "ok")
            stop.touch()
            end = await recorder.end_of(RUN)
            assert end.reason_code == "unhealthy"
            assert f"{beat} has not changed for 1s" in end.reason

    asyncio.run(scenario())


def test_health_checks_continue_after_the_agent_was_killed(tmp_path):
    async def scenario() -> None:
        home, pids, fail = tmp_path / "home", tmp_path / "pids", tmp_path / "fail"
        check = quick(command=sh(f"echo $$ >> {pids}; test -e {fail} && exit 1; exec sleep 300"))
        async with local_agent(home) as recorder:
            await begin(recorder, *WAITS, health=check)
            await until(lambda: pids.exists() and pids.read_text().endswith("\n"))
            fail.touch()
            await kill_agent(home)
            end = await recorder.end_of(RUN)
            assert end.reason_code == "unhealthy"
            await until(lambda: not alive(int(pids.read_text().split()[0])))

    asyncio.run(scenario())


HOOKS = [
    pytest.param(Checkpoint(signal="USR1", timeout_ms=HOUR_MS), id="by a signal"),
    pytest.param(Checkpoint(command=sh('kill -USR1 "$HODEI_PID"; sleep 0.05'), timeout_ms=HOUR_MS), id="by a command"),
]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_takes_a_checkpoint_on_request_and_continues(tmp_path, hook):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *SAVES_ON_USR1, checkpoint=hook)
            await recorder.backend.checkpoint(
                [TakeCheckpoint(RUN, "local", hook), TakeCheckpoint("77.0.1", "local", hook)]
            )
            first = await until_observed(recorder, lambda seen: seen.checkpoint_ms > 0)
            assert first.state == "running"
            await recorder.log_has(RUN, b"saved")
            # An order during a checkpoint joins it, so it may take several orders until there is a second one.
            again = first
            while again.checkpoint_ms == first.checkpoint_ms:
                await recorder.backend.checkpoint([TakeCheckpoint(RUN, "local", hook)])
                again = (await recorder.backend.known())[RUN]
            assert (again.state, again.checkpoint_ms > first.checkpoint_ms) == ("running", True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "trigger", [{"signal": "USR1"}, {"command": sh("touch $HODEI_CHECKPOINT_FILE")}], ids=["signal", "command"]
)
def test_a_run_takes_checkpoints_at_its_interval(tmp_path, trigger):
    async def scenario() -> None:
        # The interval leaves the script time to install its handler; an earlier signal would end it.
        hook = Checkpoint(timeout_ms=HOUR_MS, every_ms=3000, **trigger)
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *SAVES_ON_USR1, checkpoint=hook)
            first = await until_observed(recorder, lambda seen: seen.checkpoint_ms > 0)
            await kill_agent(tmp_path / "home")
            later = await until_observed(recorder, lambda seen: seen.checkpoint_ms > first.checkpoint_ms)
            assert later.state == "running"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        pytest.param(
            Checkpoint(signal="USR2", timeout_ms=300), "no checkpoint was seen within 0.3s", id="no checkpoint"
        ),
        pytest.param(
            Checkpoint(command=sh("exit 5")), "the checkpoint command failed: exit code 5", id="a command that fails"
        ),
        pytest.param(
            Checkpoint(command=sh("sleep 300"), timeout_ms=200),
            "the checkpoint command failed: it did not end within 0.2s",
            id="a command that hangs",
        ),
    ],
)
def test_a_failed_checkpoint_is_reported_and_the_run_continues(tmp_path, hook, error):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *sh("trap '' USR2; echo ready; while :; do sleep 0.02; done"), checkpoint=hook)
            await recorder.backend.checkpoint([TakeCheckpoint(RUN, "local", hook)])
            seen = await until_observed(recorder, lambda seen: bool(seen.checkpoint_error))
            assert (seen.checkpoint_error, seen.state) == (error, "running")

    asyncio.run(scenario())


def test_a_stop_aborts_a_checkpoint_in_progress_and_takes_its_own(tmp_path):
    async def scenario() -> None:
        pids = tmp_path / "pids"
        hangs = Checkpoint(command=sh(f"echo $$ >> {pids}; exec sleep 300"), timeout_ms=HOUR_MS)
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS, checkpoint=hangs)
            await recorder.backend.checkpoint([TakeCheckpoint(RUN, "local", hangs)])
            await until(lambda: pids.exists() and pids.read_text().endswith("\n"))
            saves = Checkpoint(command=sh("echo saved"), timeout_ms=HOUR_MS)
            await recorder.backend.stop([Stop(RUN, "local", 10_000, StopReason("preempted", "by 7"), saves)])
            end = await recorder.end_of(RUN)
            assert (end.state, end.reason, end.checkpoint_ms > 0) == ("stopped", "preempted by 7", True)
            await until(lambda: not alive(int(pids.read_text())))

    asyncio.run(scenario())


def test_an_idle_run_is_stopped(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS, workload=Interactive(idle_timeout_ms=1500))
            end = await recorder.end_of(RUN)
            assert (end.state, end.reason_code) == ("failed", "idle")
            assert end.reason == "it was idle for 1.5s"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("while :; do :; done", id="it uses cpu"),
        pytest.param("while :; do sleep 0.2; echo still here; done", id="it writes output"),
        # The child ends when the run has ended: it is in its own session, so no stop reaches it.
        pytest.param(
            'setsid sh -c "while kill -0 $$ 2>/dev/null; do :; done" & while :; do sleep 300; done',
            id="a child in its own session uses cpu",
        ),
    ],
)
def test_an_active_run_is_not_stopped_as_idle(tmp_path, script):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            idle = an_order(2, *WAITS, workload=Interactive(idle_timeout_ms=6000))
            await begin(recorder, *sh(f"echo ready; {script}"), workload=Interactive(idle_timeout_ms=3000))
            # When this run is stopped, twice the idle timeout of the other one has passed.
            await recorder.backend.start([idle])
            assert (await recorder.end_of("2.0.1")).reason_code == "idle"
            assert (await recorder.backend.known())[RUN].state == "running"

    asyncio.run(scenario())


def test_the_files_of_health_checks_are_removed_with_the_run(tmp_path: Path):
    async def scenario() -> None:
        home, gate = tmp_path / "home", tmp_path / "gate"
        async with local_agent(home) as recorder:
            script = f"echo ready; until [ -e {gate} ]; do sleep 0.02; done"
            await begin(recorder, *sh(script), health=quick(command=("true",)))
            await until_observed(recorder, lambda seen: seen.health == "ok")
            gate.touch()
            await recorder.end_of(RUN)
            await recorder.backend.forget([Forget(RUN, "local")])
            kept = {path.name for path in (home / "runs" / "test" / RUN).iterdir()}
            assert kept <= {"stdout", "stderr", "status"}

    asyncio.run(scenario())
