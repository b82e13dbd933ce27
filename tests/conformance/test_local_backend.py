"""The local backend with a real agent: guarantees beyond the conformance suite in `test_backends.py`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import ReconnectingRecorder, alive, an_order, local_agent, until
from hodei.model.effects import Forget, Stop, TakeCheckpoint
from hodei.model.errors import BackendRefused, NotFound
from hodei.model.job import Checkpoint, HealthCheck
from hodei.model.node import Grant
from hodei.model.outcome import StopReason

pytestmark = pytest.mark.real


def run(home: Path, scenario: Callable[[ReconnectingRecorder], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with local_agent(home) as recorder:
            await scenario(recorder)

    asyncio.run(main())


def test_many_starts_in_one_call_all_end(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        ends = await recorder.run(*(an_order(job) for job in range(1, 101)))
        assert {end.state for end in ends} == {"succeeded"}

    run(tmp_path, scenario)


def test_exit_codes_are_reported_unchanged(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        ends = await recorder.run(
            an_order(1, "/bin/sh", "-c", "exit 0"),
            an_order(2, "/bin/sh", "-c", "exit 3"),
            an_order(3, "/bin/sh", "-c", "kill -SEGV $$"),
            an_order(4, "no-such-command-anywhere"),
            an_order(5, "/etc/passwd"),
            an_order(6, "/bin/sh", "-c", "exit 125"),
            an_order(7, "false"),
            an_order(8, "/bin/true", workdir="/no/such/directory"),
        )
        seen = [(end.state, end.exit_code, end.reason_code) for end in ends]
        assert seen == [
            ("succeeded", 0, ""),
            ("failed", 3, ""),
            ("failed", 139, "killed"),
            ("failed", 127, ""),
            ("failed", 126, ""),
            ("failed", 125, ""),
            ("failed", 1, ""),
            ("failed", None, "error"),
        ]
        assert "/no/such/directory" in ends[-1].reason
        assert b"no-such-command-anywhere: not found" in await recorder.log("4.0.1", "stderr")

    run(tmp_path, scenario)


def test_a_start_whose_reply_was_lost_is_adopted_by_the_next_order(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        proof, gate = tmp_path / "proof", tmp_path / "gate"
        order = an_order(1, "/bin/sh", "-c", f"echo ran >> {proof}; until [ -e {gate} ]; do sleep 0.02; done")
        # The connection breaks after the order is sent and before its reply is read.
        lost = asyncio.create_task(recorder.backend.start([order]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        recorder.backend._agent.link.close()
        await asyncio.gather(lost, return_exceptions=True)
        assert await recorder.backend.start([order]) == {}
        gate.touch()
        assert (await recorder.end_of("1.0.1")).state == "succeeded"
        assert proof.read_text() == "ran\n"

    run(tmp_path / "home", scenario)


def test_a_stop_reaches_the_whole_process_group_and_its_reason_is_reported(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        script = "sleep 300 & echo $! ; sleep 300 & echo $! ; echo ready; wait"
        await recorder.backend.start([an_order(1, "/bin/sh", "-c", script)])
        output = await recorder.log_has("1.0.1", b"ready")
        await recorder.stop("1.0.1", reason=StopReason("preempted", "by 7"))
        await recorder.stop("1.0.1", reason=StopReason("cancelled", "a second time"))
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 143, "preempted by 7")
        for child in output.split()[:2]:
            await until(lambda child=child: not alive(int(child)))

    run(tmp_path, scenario)


def test_a_stop_right_after_the_start_is_not_lost(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        orders = [an_order(job, "/bin/sleep", "300") for job in range(1, 21)]
        assert await recorder.backend.start(orders) == {}
        for order in orders:
            await recorder.stop(order.run.id, grace_ms=600_000)
        assert {(await recorder.end_of(order.run.id)).state for order in orders} == {"stopped"}

    run(tmp_path, scenario)


def test_ends_are_repeated_after_a_reconnect_until_they_are_forgotten(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        first, second = await recorder.run(an_order(1), an_order(2, "/bin/sh", "-c", "exit 4"))
        await recorder.backend.forget([Forget(first.run, "local")])
        recorder.observed.clear()
        recorder.backend._agent.link.close()
        assert await recorder.end_of("2.0.1") == second
        assert {seen.run for seen in recorder.observed} == {"2.0.1"}

    run(tmp_path, scenario)


def test_logs_are_read_from_an_offset(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        await recorder.run(an_order(1, "/bin/sh", "-c", "printf 0123456789; printf error >&2"))
        logs = recorder.backend.logs
        assert await logs("1.0.1", "stdout", 0, 4) == (b"0123", 4)
        assert await logs("1.0.1", "stdout", 4, 100) == (b"456789", 10)
        assert await logs("1.0.1", "stdout", 10, 100) == (b"", 10)
        assert await logs("1.0.1", "stderr", 0, 100) == (b"error", 5)
        await recorder.backend.forget([Forget("1.0.1", "local")])
        assert await logs("1.0.1", "stdout", 0, 4) == (b"0123", 4)
        with pytest.raises(NotFound):
            await logs("99.0.1", "stdout", 0, 4)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "requested",
    [
        pytest.param({"GREETING": "hello 'you' \"there\" $HOME `id`\nand a new line"}, id="plain names"),
        pytest.param(
            {"with.dot": "1", "IFS": "x", "OPTIND": "abc", "PWD": "/x", "_": "y"}, id="names that a shell rejects"
        ),
        pytest.param({"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "d": "kept", "_hodei": "z"}, id="own path"),
    ],
)
def test_the_environment_is_exactly_as_requested(tmp_path, requested, monkeypatch):
    monkeypatch.setenv("HODEI_TOKEN", "a secret of the server")
    monkeypatch.setenv("SOMETHING_ELSE", "of the server")

    async def scenario(recorder: ReconnectingRecorder) -> None:
        await recorder.run(an_order(1, "/usr/bin/env", "-0", env=requested, workdir="/tmp", project="ml"))
        seen = dict(pair.split("=", 1) for pair in (await recorder.log("1.0.1")).decode().split("\0") if pair)
        own = {
            "HODEI_JOB_ID": "1", "HODEI_RUN_ID": "1.0.1", "HODEI_TASK": "main", "HODEI_RANK": "0",
            "HODEI_MEMBER": "0", "HODEI_WORLD_SIZE": "1", "HODEI_MIN_WORLD_SIZE": "1", "HODEI_MAX_WORLD_SIZE": "1",
            "HODEI_ATTEMPT": "1", "HODEI_NODE": "n1", "HODEI_PROJECT": "ml", "HODEI_QOS": "burstable",
            "HODEI_CHECKPOINT_FILE": seen["HODEI_CHECKPOINT_FILE"],
        }  # fmt: skip
        names = ("HOME", "USER", "LOGNAME", "LANG", "TZ", "PATH")
        inherited = {name: os.environ[name] for name in names if name in os.environ}
        assert seen == {**inherited, "PWD": "/tmp", **requested, **own}

    run(tmp_path, scenario)


def test_a_run_gets_its_rank_and_its_granted_devices_in_the_environment(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        order = an_order(1, "/usr/bin/env", env={"HODEI_RANK": "99", "CUDA_VISIBLE_DEVICES": "all"}, count=4)
        core = min(os.sched_getaffinity(0))
        grant = Grant(cpus=(core,), gpus=((2, 1000), (5, 250)))
        run = structs.replace(order.run, member=3, rank=1, grant=grant)
        await recorder.run(structs.replace(order, run=run, world_size=2, addresses=("10.0.0.1", "10.0.0.2")))
        seen = set((await recorder.log("1.0.1")).decode().splitlines())
        assert seen > {
            "HODEI_RANK=1", "HODEI_MEMBER=3", "HODEI_WORLD_SIZE=2", "HODEI_MAX_WORLD_SIZE=4",
            "HODEI_ADDRESSES=10.0.0.1,10.0.0.2", "HODEI_MASTER_ADDRESS=10.0.0.1",
            f"HODEI_CPUS={core}", "HODEI_GPUS=2,5", "CUDA_VISIBLE_DEVICES=2,5", "HODEI_GPU_MILLI=250",
        }  # fmt: skip

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "trigger",
    [
        pytest.param({"signal": "USR1"}, id="by a signal"),
        pytest.param({"command": ("/bin/sh", "-c", 'echo saved; touch "$HODEI_CHECKPOINT_FILE"')}, id="by a command"),
    ],
)
def test_a_stop_waits_for_the_checkpoint_and_reports_its_time(tmp_path, trigger):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        hook = Checkpoint(timeout_ms=3_600_000, **trigger)
        script = """
            trap 'echo saved; touch "$HODEI_CHECKPOINT_FILE"' USR1; trap 'echo stopping; exit 9' TERM
            echo ready; while :; do sleep 0.02; done
        """
        await recorder.backend.start([an_order(1, "/bin/sh", "-c", script, checkpoint=hook)])
        await recorder.log_has("1.0.1", b"ready")
        stop = Stop("1.0.1", recorder.backend.name, 600_000, StopReason("preempted", "by 7"), hook)
        await recorder.backend.stop([stop])
        await recorder.backend.stop([stop])
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 9, "preempted by 7")
        assert await recorder.log("1.0.1") == b"ready\nsaved\nstopping\n"
        assert recorder.observed[0].at_ms <= end.checkpoint_ms <= end.at_ms

    run(tmp_path, scenario)


def test_a_run_takes_a_checkpoint_continues_and_reports_its_time(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        hook = Checkpoint(signal="USR1", timeout_ms=3_600_000)
        script = "trap 'touch \"$HODEI_CHECKPOINT_FILE\"' USR1; echo ready; while :; do sleep 0.02; done"
        await recorder.backend.start([an_order(1, "/bin/sh", "-c", script, checkpoint=hook)])
        await recorder.log_has("1.0.1", b"ready")
        order = TakeCheckpoint("1.0.1", recorder.backend.name, hook)
        await recorder.backend.checkpoint([order, order])
        async with asyncio.timeout(20):
            while not any(seen.checkpoint_ms for seen in recorder.observed):
                await recorder.poll()
        assert {seen.state for seen in recorder.observed} == {"running"}

    run(tmp_path, scenario)


def test_a_run_that_fails_its_health_checks_is_stopped_as_unhealthy(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        check = HealthCheck(command=("/bin/false",), every_ms=50, failures=2)
        (end,) = await recorder.run(an_order(1, "/bin/sleep", "300", health=check))
        assert (end.state, end.reason_code) == ("failed", "unhealthy")

    run(tmp_path, scenario)


def test_a_program_named_like_a_shell_keyword_is_run(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        await recorder.run(an_order(1, "echo", "-e", r"a\tb"), an_order(2, "exit", "3"), an_order(3, "eval", "echo hi"))
        assert await recorder.log("1.0.1") == b"a\tb\n"
        assert [(await recorder.end_of(f"{job}.0.1")).exit_code for job in (2, 3)] == [127, 127]

    run(tmp_path, scenario)


def test_an_order_that_can_never_run_is_refused_with_a_reason(tmp_path):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        errors = await recorder.backend.start(
            [
                an_order(1, image="python:3.12"),
                an_order(2, "/bin/echo", "a\0b"),
                an_order(3, "/bin/echo", "x" * (2 << 20)),
                an_order(4),
            ]
        )
        assert {run: type(error) for run, error in errors.items()} == dict.fromkeys(
            ("1.0.1", "2.0.1", "3.0.1"), BackendRefused
        )
        assert (await recorder.end_of("4.0.1")).state == "succeeded"

    run(tmp_path, scenario)
