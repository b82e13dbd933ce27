"""Checkpoints of real processes before a stop and while they run, and processes bound to granted cores."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_host import ReconnectingRecorder, alive, an_order, kill_agent, local_agent, until
from hodei.agent.limits import enforcement
from hodei.model.effects import Forget, Stop
from hodei.model.facts import RunObserved
from hodei.model.job import Checkpoint
from hodei.model.node import Grant
from hodei.model.outcome import StopReason
from real.supervised_run import HOUR_MS, RUN, SAVES_ON_USR1, WAITS, begin, python, sh, with_grant

pytestmark = pytest.mark.real


async def stop(recorder: ReconnectingRecorder, grace_ms: int = 10_000, **hook: Any) -> None:
    checkpoint = Checkpoint(**hook) if hook else None
    await recorder.backend.stop([Stop(RUN, "local", grace_ms, StopReason("preempted", "by 7"), checkpoint)])


def outcome(end: RunObserved) -> tuple[str, int | None, str]:
    return end.state, end.exit_code, end.reason


def test_a_run_takes_a_checkpoint_on_a_signal_before_it_is_stopped(tmp_path):
    async def scenario() -> None:
        file = tmp_path / "model.ckpt"
        hook = Checkpoint(signal="USR1", timeout_ms=HOUR_MS, file=str(file))
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *SAVES_ON_USR1, checkpoint=hook)
            await recorder.backend.stop([Stop(RUN, "local", 10_000, StopReason("preempted", "by 7"), hook)])
            end = await recorder.end_of(RUN)
            assert outcome(end) == ("stopped", 143, "preempted by 7")
            assert file.read_text() == "step 7"
            assert end.checkpoint_ms == file.stat().st_mtime_ns // 1_000_000
            assert await recorder.log(RUN) == b"ready\nsaved\n"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("code", "state"), [pytest.param(0, "succeeded", id="done"), pytest.param(3, "stopped", id="more to do")]
)
def test_a_run_that_ends_during_its_checkpoint_is_reported_with_its_own_end(tmp_path, code, state):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *sh(f"trap 'exit {code}' USR1; echo ready; while :; do sleep 0.02; done"))
            await stop(recorder, signal="SIGUSR1", timeout_ms=HOUR_MS)
            end = await recorder.end_of(RUN)
            assert (end.state, end.exit_code) == (state, code)

    asyncio.run(scenario())


def test_a_run_without_a_checkpoint_is_stopped_at_the_checkpoint_timeout(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *sh("trap : USR1; echo ready; while :; do sleep 0.02; done"))
            await stop(recorder, signal="USR1", timeout_ms=200)
            end = await recorder.end_of(RUN)
            assert outcome(end) == ("stopped", 143, "preempted by 7; no checkpoint was seen within 0.2s")
            assert end.checkpoint_ms == 0

    asyncio.run(scenario())


def test_a_checkpoint_signal_that_would_end_the_wrapper_is_refused(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS)
            await stop(recorder, signal="XCPU")
            state, code, reason = outcome(await recorder.end_of(RUN))
            assert (state, code) == ("stopped", 143)
            assert reason.startswith("preempted by 7; its checkpoint was skipped: the signal XCPU cannot be used")

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR2", "VTALRM", "WINCH"])
def test_every_checkpoint_signal_reaches_the_command_but_not_its_wrapper(tmp_path, name):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            script = f"trap 'touch $HODEI_CHECKPOINT_FILE' {name}; echo ready; while :; do sleep 0.02; done"
            await begin(recorder, *sh(script))
            # The short grace period ends in KILL: a script that handles TERM would not end.
            await stop(recorder, grace_ms=100, signal=name, timeout_ms=HOUR_MS)
            end = await recorder.end_of(RUN)
            assert (end.state, end.reason) == ("stopped", "preempted by 7")
            assert end.checkpoint_ms > 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"MODEL": "it's 7"}, id="plain names"),
        pytest.param({"with.dot": "x", "MODEL": "it's 7"}, id="dots"),
    ],
)
def test_a_checkpoint_command_has_the_environment_of_its_run(tmp_path, env):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *sh("echo $$; echo ready; exec sleep 300"), env=env, workdir="/tmp")
            pid = (await recorder.log(RUN)).split()[0].decode()
            proof = tmp_path / "proof"
            save = f'kill -0 $HODEI_PID; echo "$?|$HODEI_PID|$HODEI_RUN_ID|$MODEL|$PWD" > {proof}; echo written by the hook'
            before_ms = time.time_ns() // 1_000_000
            await stop(recorder, command=sh(save), timeout_ms=HOUR_MS)
            end = await recorder.end_of(RUN)
            assert outcome(end) == ("stopped", 143, "preempted by 7")
            assert proof.read_text() == f"0|{pid}|{RUN}|it's 7|/tmp\n"
            assert before_ms <= end.checkpoint_ms <= end.at_ms
            assert b"written by the hook" in await recorder.log(RUN)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        pytest.param(sh("exit 7"), "its checkpoint command failed: exit code 7", id="exit code"),
        pytest.param(sh("kill -KILL $$"), "its checkpoint command failed: SIGKILL", id="ended by a signal"),
        pytest.param(("/no/such/program",), "its checkpoint command failed: exit code 127", id="no such program"),
        pytest.param(
            ("/bin/echo", "x" * (1 << 20)), "its checkpoint command could not be started: [Errno 7]", id="too long"
        ),
    ],
)
def test_a_failed_checkpoint_command_is_reported_and_the_stop_continues(tmp_path, command, problem):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS)
            await stop(recorder, command=command, timeout_ms=HOUR_MS)
            end = await recorder.end_of(RUN)
            assert (end.state, end.exit_code, end.checkpoint_ms) == ("stopped", 143, 0)
            assert end.reason.startswith(f"preempted by 7; {problem}")

    asyncio.run(scenario())


def test_a_checkpoint_command_that_hangs_is_killed_with_its_children(tmp_path):
    async def scenario() -> None:
        proof = tmp_path / "proof"
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS)
            await stop(recorder, command=sh(f"sleep 300 & echo $$ $! > {proof}; wait"), timeout_ms=3000)
            end = await recorder.end_of(RUN)
            assert outcome(end) == (
                "stopped", 143, "preempted by 7; its checkpoint command did not end within 3s",
            )  # fmt: skip
            for pid in map(int, proof.read_text().split()):
                await until(lambda pid=pid: not alive(pid))

    asyncio.run(scenario())


def test_a_checkpoint_command_ends_with_its_run(tmp_path):
    async def scenario() -> None:
        proof = tmp_path / "proof"
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *sh("trap 'exit 5' USR1; echo ready; while :; do sleep 0.02; done"))
            save = f"echo $$ > {proof}; kill -USR1 $HODEI_PID; exec sleep 300"
            await stop(recorder, command=sh(save), timeout_ms=HOUR_MS)
            assert outcome(await recorder.end_of(RUN))[:2] == ("stopped", 5)
            await until(lambda: not alive(int(proof.read_text())))

    asyncio.run(scenario())


@pytest.mark.skipif(not enforcement()["memory"].startswith("cgroup"), reason="no memory cgroup is writable here")
def test_a_checkpoint_command_is_inside_the_limits_of_its_run(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            show = "grep -E 'memory|^0::' /proc/self/cgroup"
            await begin(recorder, *sh(f"{show}; echo ready; exec sleep 300"), limits={"memory": 256 << 20})
            own = (await recorder.log(RUN)).removesuffix(b"ready\n")
            await stop(recorder, command=sh(show), timeout_ms=HOUR_MS)
            assert (await recorder.end_of(RUN)).reason == "preempted by 7"
            assert RUN.encode() in own
            assert await recorder.log(RUN) == own + b"ready\n" + own

    asyncio.run(scenario())


def gated(gate: Path, proof: Path) -> tuple[str, ...]:
    return sh(f"echo $$ >> {proof}; until [ -e {gate} ]; do sleep 0.02; done")


def test_a_second_stop_does_not_restart_the_checkpoint(tmp_path):
    async def scenario() -> None:
        gate, proof = tmp_path / "gate", tmp_path / "proof"
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS)
            for _ in range(3):
                await stop(recorder, command=gated(gate, proof), timeout_ms=HOUR_MS)
                await until(proof.exists)
            gate.touch()
            assert outcome(await recorder.end_of(RUN)) == ("stopped", 143, "preempted by 7")
            assert len(proof.read_text().split()) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("grace_ms", "code"), [pytest.param(0, 137, id="at once"), pytest.param(60_000, 143, id="with a grace period")]
)
def test_a_second_stop_without_a_checkpoint_aborts_the_first_ones_checkpoint(tmp_path, grace_ms, code):
    async def scenario() -> None:
        gate, proof = tmp_path / "gate", tmp_path / "proof"
        async with local_agent(tmp_path / "home") as recorder:
            await begin(recorder, *WAITS)
            await stop(recorder, command=gated(gate, proof), timeout_ms=HOUR_MS)
            await until(lambda: proof.exists() and proof.read_text().endswith("\n"))
            await stop(recorder, grace_ms=grace_ms)
            end = await recorder.end_of(RUN)
            assert outcome(end) == ("stopped", code, "preempted by 7; its checkpoint was cut short")
            await until(lambda: not alive(int(proof.read_text())))

    asyncio.run(scenario())


def stop_across_a_killed_agent(
    tmp_path: Path, without_agent: Callable[[Path], None], **hook: Any
) -> tuple[RunObserved, str]:
    """Kill the agent while a checkpoint command waits for its gate, call `without_agent` and start another agent.

    Returns the end of the run and the pids of all checkpoint commands that were started.
    """

    async def scenario() -> tuple[RunObserved, str]:
        home, gate, proof = tmp_path / "home", tmp_path / "gate", tmp_path / "proof"
        async with local_agent(home) as recorder:
            await begin(recorder, *WAITS)
            await stop(recorder, command=gated(gate, proof), **hook)
            await until(lambda: proof.exists() and proof.read_text().endswith("\n"))
            await recorder.backend.close()
            await kill_agent(home)
            without_agent(gate)
        async with local_agent(home, epoch=2) as recorder:
            gate.touch() if hook["timeout_ms"] == HOUR_MS else None
            end = await recorder.end_of(RUN)
            for pid in map(int, proof.read_text().split()):
                await until(lambda pid=pid: not alive(pid))
            return end, proof.read_text()

    return asyncio.run(scenario())


def test_a_checkpoint_command_is_awaited_by_the_next_agent(tmp_path):
    end, proof = stop_across_a_killed_agent(tmp_path, lambda gate: None, timeout_ms=HOUR_MS)
    assert outcome(end) == ("stopped", 143, "preempted by 7")
    assert end.checkpoint_ms > 0
    assert len(proof.split()) == 1


def test_a_checkpoint_command_that_ended_without_an_agent_counts(tmp_path):
    def open_gate_and_wait(gate: Path) -> None:
        gate.touch()
        status = tmp_path / "home" / "runs" / "test" / RUN / "hook"
        while b"exit" not in status.read_bytes():
            time.sleep(0.01)

    end, proof = stop_across_a_killed_agent(tmp_path, open_gate_and_wait, timeout_ms=HOUR_MS)
    assert outcome(end) == ("stopped", 143, "preempted by 7")
    assert end.checkpoint_ms > 0
    assert len(proof.split()) == 1


def test_the_checkpoint_timeout_holds_after_the_agent_was_killed(tmp_path):
    end, proof = stop_across_a_killed_agent(tmp_path, lambda gate: None, timeout_ms=4000)
    assert outcome(end) == ("stopped", 143, "preempted by 7; its checkpoint command did not end within 4s")
    assert len(proof.split()) == 1


def test_a_checkpoint_command_that_vanished_does_not_delay_the_stop(tmp_path):
    def kill_it(gate: Path) -> None:
        status = (tmp_path / "home" / "runs" / "test" / RUN / "hook").read_text()
        os.killpg(int(status.split()[2]), signal.SIGKILL)

    end, proof = stop_across_a_killed_agent(tmp_path, kill_it, timeout_ms=HOUR_MS)
    assert outcome(end) == ("stopped", 143, "preempted by 7; the exit code of its checkpoint command is lost")
    assert (end.checkpoint_ms, len(proof.split())) == (0, 1)


def test_a_checkpoint_signal_is_not_sent_again_by_the_next_agent(tmp_path):
    async def scenario() -> None:
        home, gate, file = tmp_path / "home", tmp_path / "gate", tmp_path / "saved"
        file.write_text("from an earlier run")
        script = (
            "n=0; trap 'n=$((n+1)); echo signal $n' USR1; echo ready; "
            f"until [ -e {gate} ]; do sleep 0.02; done; echo $n > {file}; while :; do sleep 0.02; done"
        )
        hook = Checkpoint(signal="USR1", timeout_ms=HOUR_MS, file=str(file))
        async with local_agent(home) as recorder:
            await begin(recorder, *sh(script), checkpoint=hook)
            await recorder.backend.stop([Stop(RUN, "local", 10_000, StopReason("preempted", "by 7"), hook)])
            await recorder.log_has(RUN, b"signal 1")
            await recorder.backend.close()
            await kill_agent(home)
        async with local_agent(home, epoch=2) as recorder:
            await recorder.backend.stop([Stop(RUN, "local", 10_000, StopReason("preempted", "by 7"), hook)])
            gate.touch()
            end = await recorder.end_of(RUN)
            assert outcome(end) == ("stopped", 143, "preempted by 7")
            assert end.checkpoint_ms > 0
            assert file.read_text() == "1\n"
            assert b"signal 2" not in await recorder.log(RUN)

    asyncio.run(scenario())


@pytest.mark.parametrize("named", [pytest.param(True, id="its own file"), pytest.param(False, id="the default file")])
def test_the_time_of_the_last_checkpoint_is_reported_during_the_run_and_with_its_end(tmp_path, named):
    async def scenario() -> None:
        gate, file = tmp_path / "gate", str(tmp_path / "x" / "saved") if named else ""
        (tmp_path / "x").mkdir()
        script = (
            "echo ready; : > $HODEI_CHECKPOINT_FILE; "
            f"until [ -e {gate} ]; do sleep 0.02; done; sleep 0.02; : > $HODEI_CHECKPOINT_FILE"
        )
        async with local_agent(tmp_path / "home") as recorder:
            checkpoint = Checkpoint(file=file) if named else Checkpoint(signal="USR1")
            await begin(recorder, *sh(script), checkpoint=checkpoint)
            while not any(seen.checkpoint_ms for seen in recorder.observed):
                await recorder.poll()
            first = recorder.observed[-1]
            assert (first.state, first.at_ms) == ("running", recorder.observed[0].at_ms)
            assert (await recorder.backend.known())[RUN] == first
            gate.touch()
            end = await recorder.end_of(RUN)
            assert end.state == "succeeded"
            assert first.checkpoint_ms < end.checkpoint_ms <= end.at_ms
            assert (await recorder.backend.known())[RUN] == end

    asyncio.run(scenario())


def test_a_checkpoint_from_before_the_run_does_not_count(tmp_path):
    async def scenario() -> None:
        file = tmp_path / "saved"
        file.touch()
        os.utime(file, (1, 1))
        async with local_agent(tmp_path / "home") as recorder:
            order = an_order(1, *sh("cat $HODEI_CHECKPOINT_FILE"), checkpoint=Checkpoint(file=str(file)))
            (end,) = await recorder.run(order)
            assert (end.state, end.checkpoint_ms) == ("succeeded", 0)

    asyncio.run(scenario())


def test_the_checkpoint_file_of_a_forgotten_run_is_removed(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            leave = 'touch "$HODEI_CHECKPOINT_FILE" "$HODEI_CHECKPOINT_FILE.new"; mkdir "$HODEI_CHECKPOINT_FILE.d"'
            assert (await recorder.run(an_order(1, *sh(leave), checkpoint=Checkpoint(signal="USR1"))))[
                0
            ].checkpoint_ms > 0
            await recorder.backend.forget([Forget(RUN, "local")])
            script = 'ls "$(dirname "$HODEI_CHECKPOINT_FILE")"'
            (end,) = await recorder.run(an_order(2, *sh(script), checkpoint=Checkpoint(signal="USR1")))
            assert end.checkpoint_ms == 0
            assert await recorder.log("2.0.1") == b"status\nstderr\nstdout\n"

    asyncio.run(scenario())


def test_a_run_and_its_checkpoint_command_are_bound_to_the_granted_cores(tmp_path):
    core = max(os.sched_getaffinity(0))
    show = "import os; print(os.environ['HODEI_CPUS'], sorted(os.sched_getaffinity(0)), flush=True)"

    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            wait = "; print('ready', flush=True); import time; time.sleep(300)"
            await begin(recorder, *python(show + wait), grant=Grant(cpus=(core,)))
            await stop(recorder, command=(sys.executable, "-S", "-c", show), timeout_ms=HOUR_MS)
            assert (await recorder.end_of(RUN)).reason == "preempted by 7"
            line = f"{core} [{core}]\n"
            assert (await recorder.log(RUN)).decode() == f"{line}ready\n{line}"

    asyncio.run(scenario())


def test_granted_cores_that_the_machine_does_not_have_are_not_bound(tmp_path):
    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            show = "import os; print(os.environ['HODEI_CPUS'], sorted(os.sched_getaffinity(0)))"
            (end,) = await recorder.run(with_grant(an_order(1, *python(show)), Grant(cpus=(4000, 4001))))
            assert end.state == "succeeded"
            assert (await recorder.log(RUN)).decode() == f"4000,4001 {sorted(os.sched_getaffinity(0))}\n"

    asyncio.run(scenario())
