"""The local backend with a real agent: what it guarantees beyond the conformance suite in `test_backends.py`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import Desk, a_host, alive, an_order, until
from hodei.model.effects import Forget, Stop, TakeCheckpoint
from hodei.model.errors import BackendRefused, NotFound
from hodei.model.job import Checkpoint, HealthCheck
from hodei.model.node import Grant
from hodei.model.outcome import StopReason

pytestmark = pytest.mark.real
Story = Callable[[Desk], Coroutine[Any, Any, None]]


def tell(home: Path, story: Story) -> None:
    async def whole() -> None:
        async with a_host(home) as desk:
            await story(desk)

    asyncio.run(whole())


def test_many_starts_in_one_call_all_end(tmp_path):
    async def story(desk: Desk) -> None:
        ends = await desk.run(*(an_order(job) for job in range(1, 101)))
        assert {end.state for end in ends} == {"succeeded"}

    tell(tmp_path, story)


def test_exit_codes_arrive_as_they_were(tmp_path):
    async def story(desk: Desk) -> None:
        ends = await desk.run(
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
        assert b"no-such-command-anywhere: not found" in await desk.log("4.0.1", "stderr")

    tell(tmp_path, story)


def test_a_start_whose_reply_was_lost_is_adopted_by_the_next_order(tmp_path):
    async def story(desk: Desk) -> None:
        proof = tmp_path / "proof"
        order = an_order(1, "/bin/sh", "-c", f"echo ran >> {proof}; sleep 0.2")
        # The connection breaks the moment the order is on its way: nobody hears the answer.
        lost = asyncio.create_task(desk.backend.start([order]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        desk.backend._agent.link.close()
        await asyncio.gather(lost, return_exceptions=True)
        assert await desk.backend.start([order]) == {}
        assert (await desk.end_of("1.0.1")).state == "succeeded"
        assert proof.read_text() == "ran\n"

    tell(tmp_path / "home", story)


def test_a_stop_reaches_the_whole_group_and_carries_its_reason_back(tmp_path):
    async def story(desk: Desk) -> None:
        script = "sleep 300 & echo $! ; sleep 300 & echo $! ; echo ready; wait"
        await desk.backend.start([an_order(1, "/bin/sh", "-c", script)])
        said = await desk.log_has("1.0.1", b"ready")
        await desk.stop("1.0.1", reason=StopReason("preempted", "by 7"))
        await desk.stop("1.0.1", reason=StopReason("cancelled", "a second time"))
        end = await desk.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 143, "preempted by 7")
        for child in said.split()[:2]:
            await until(lambda child=child: not alive(int(child)))

    tell(tmp_path, story)


def test_a_stop_right_behind_the_start_is_not_lost(tmp_path):
    async def story(desk: Desk) -> None:
        orders = [an_order(job, "/bin/sleep", "300") for job in range(1, 21)]
        assert await desk.backend.start(orders) == {}
        for order in orders:
            await desk.stop(order.run.id, grace_ms=600_000)
        assert {(await desk.end_of(order.run.id)).state for order in orders} == {"stopped"}

    tell(tmp_path, story)


def test_ends_are_repeated_after_a_reconnect_until_they_are_forgotten(tmp_path):
    async def story(desk: Desk) -> None:
        first, second = await desk.run(an_order(1), an_order(2, "/bin/sh", "-c", "exit 4"))
        await desk.backend.forget([Forget(first.run, "local")])
        desk.observed.clear()
        desk.backend._agent.link.close()
        assert await desk.end_of("2.0.1") == second
        assert {seen.run for seen in desk.observed} == {"2.0.1"}

    tell(tmp_path, story)


def test_logs_are_read_from_an_offset(tmp_path):
    async def story(desk: Desk) -> None:
        await desk.run(an_order(1, "/bin/sh", "-c", "printf 0123456789; printf error >&2"))
        logs = desk.backend.logs
        assert await logs("1.0.1", "stdout", 0, 4) == (b"0123", 4)
        assert await logs("1.0.1", "stdout", 4, 100) == (b"456789", 10)
        assert await logs("1.0.1", "stdout", 10, 100) == (b"", 10)
        assert await logs("1.0.1", "stderr", 0, 100) == (b"error", 5)
        await desk.backend.forget([Forget("1.0.1", "local")])
        assert await logs("1.0.1", "stdout", 0, 4) == (b"0123", 4)
        with pytest.raises(NotFound):
            await logs("99.0.1", "stdout", 0, 4)

    tell(tmp_path, story)


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"GREETING": "hello 'you' \"there\" $HOME `id`\nand a new line"}, id="plain names"),
        pytest.param({"with.dot": "1", "IFS": "x", "OPTIND": "abc", "PWD": "/x", "_": "y"}, id="a shell would object"),
        pytest.param({"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "d": "kept", "_hodei": "z"}, id="own path"),
    ],
)
def test_the_environment_is_exactly_as_requested(tmp_path, asked, monkeypatch):
    monkeypatch.setenv("HODEI_TOKEN", "a secret of the server")
    monkeypatch.setenv("SOMETHING_ELSE", "of the server")

    async def story(desk: Desk) -> None:
        await desk.run(an_order(1, "/usr/bin/env", "-0", env=asked, workdir="/tmp", project="ml"))
        seen = dict(pair.split("=", 1) for pair in (await desk.log("1.0.1")).decode().split("\0") if pair)
        own = {
            "HODEI_JOB_ID": "1", "HODEI_RUN_ID": "1.0.1", "HODEI_TASK": "main", "HODEI_RANK": "0",
            "HODEI_MEMBER": "0", "HODEI_WORLD_SIZE": "1", "HODEI_MIN_WORLD_SIZE": "1", "HODEI_MAX_WORLD_SIZE": "1",
            "HODEI_ATTEMPT": "1", "HODEI_NODE": "n1", "HODEI_PROJECT": "ml", "HODEI_QOS": "burstable",
            "HODEI_CHECKPOINT_FILE": seen["HODEI_CHECKPOINT_FILE"],
        }  # fmt: skip
        given = {name: os.environ[name] for name in ("HOME", "USER", "LOGNAME", "LANG", "TZ") if name in os.environ}
        given["PATH"] = os.environ["PATH"]
        assert seen == {**given, "PWD": "/tmp", **asked, **own}

    tell(tmp_path, story)


def test_a_run_gets_its_rank_and_its_granted_devices_in_the_environment(tmp_path):
    async def story(desk: Desk) -> None:
        order = an_order(1, "/usr/bin/env", env={"HODEI_RANK": "99", "CUDA_VISIBLE_DEVICES": "all"}, count=4)
        core = min(os.sched_getaffinity(0))
        grant = Grant(cpus=(core,), gpus=((2, 1000), (5, 250)))
        run = structs.replace(order.run, member=3, rank=1, grant=grant)
        await desk.run(structs.replace(order, run=run, world_size=2, addresses=("10.0.0.1", "10.0.0.2")))
        seen = set((await desk.log("1.0.1")).decode().splitlines())
        assert seen > {
            "HODEI_RANK=1", "HODEI_MEMBER=3", "HODEI_WORLD_SIZE=2", "HODEI_MAX_WORLD_SIZE=4",
            "HODEI_ADDRESSES=10.0.0.1,10.0.0.2", "HODEI_MASTER_ADDRESS=10.0.0.1",
            f"HODEI_CPUS={core}", "HODEI_GPUS=2,5", "CUDA_VISIBLE_DEVICES=2,5", "HODEI_GPU_MILLI=250",
        }  # fmt: skip

    tell(tmp_path, story)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"signal": "USR1"}, id="by a signal"),
        pytest.param({"command": ("/bin/sh", "-c", 'echo saved; touch "$HODEI_CHECKPOINT_FILE"')}, id="by a command"),
    ],
)
def test_a_stop_waits_for_the_checkpoint_and_reports_its_time(tmp_path, how):
    async def story(desk: Desk) -> None:
        hook = Checkpoint(timeout_ms=3_600_000, **how)
        script = """
            trap 'echo saved; touch "$HODEI_CHECKPOINT_FILE"' USR1; trap 'echo told to go; exit 9' TERM
            echo ready; while :; do sleep 0.02; done
        """
        await desk.backend.start([an_order(1, "/bin/sh", "-c", script, checkpoint=hook)])
        await desk.log_has("1.0.1", b"ready")
        stop = Stop("1.0.1", desk.backend.name, 600_000, StopReason("preempted", "by 7"), hook)
        await desk.backend.stop([stop])
        await desk.backend.stop([stop])
        end = await desk.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 9, "preempted by 7")
        assert await desk.log("1.0.1") == b"ready\nsaved\ntold to go\n"
        assert desk.observed[0].at_ms <= end.checkpoint_ms <= end.at_ms

    tell(tmp_path, story)


def test_a_run_takes_a_checkpoint_continues_and_reports_its_time(tmp_path):
    async def story(desk: Desk) -> None:
        hook = Checkpoint(signal="USR1", timeout_ms=3_600_000)
        script = "trap 'touch \"$HODEI_CHECKPOINT_FILE\"' USR1; echo ready; while :; do sleep 0.02; done"
        await desk.backend.start([an_order(1, "/bin/sh", "-c", script, checkpoint=hook)])
        await desk.log_has("1.0.1", b"ready")
        order = TakeCheckpoint("1.0.1", desk.backend.name, hook)
        await desk.backend.checkpoint([order, order])
        async with asyncio.timeout(20):
            while not any(seen.checkpoint_ms for seen in desk.observed):
                await desk.poll()
        assert {seen.state for seen in desk.observed} == {"running"}

    tell(tmp_path, story)


def test_a_run_that_fails_its_health_checks_is_stopped_as_unhealthy(tmp_path):
    async def story(desk: Desk) -> None:
        check = HealthCheck(command=("/bin/false",), every_ms=50, failures=2)
        (end,) = await desk.run(an_order(1, "/bin/sleep", "300", health=check))
        assert (end.state, end.reason_code) == ("failed", "unhealthy")

    tell(tmp_path, story)


def test_a_program_named_like_a_shell_keyword_is_run(tmp_path):
    async def story(desk: Desk) -> None:
        await desk.run(an_order(1, "echo", "-e", r"a\tb"), an_order(2, "exit", "3"), an_order(3, "eval", "echo hi"))
        assert await desk.log("1.0.1") == b"a\tb\n"
        assert [(await desk.end_of(f"{job}.0.1")).exit_code for job in (2, 3)] == [127, 127]

    tell(tmp_path, story)


def test_what_can_never_run_is_refused_with_a_reason(tmp_path):
    async def story(desk: Desk) -> None:
        answer = await desk.backend.start(
            [
                an_order(1, image="python:3.12"),
                an_order(2, "/bin/echo", "a\0b"),
                an_order(3, "/bin/echo", "x" * (2 << 20)),
                an_order(4),
            ]
        )
        assert {run: type(error) for run, error in answer.items()} == dict.fromkeys(
            ("1.0.1", "2.0.1", "3.0.1"), BackendRefused
        )
        assert (await desk.end_of("4.0.1")).state == "succeeded"

    tell(tmp_path, story)
