"""Behaviour of a real Slurm beyond the conformance suite: tokens, GPUs, time limits, checkpoints, its queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import ReconnectingRecorder, an_order
from builders import a_job_spec
from hodei.model.array import ArrayElement
from hodei.model.effects import Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendRefused
from hodei.model.job import Checkpoint
from hodei.model.outcome import StopReason
from hodei.runtime import backend_manager
from hodei.runtime.clock import SystemClock
from hodei.store.memory import MemoryStore
from hpc_backends import a_slurm
from slurm_cluster import SlurmCluster
from unit.runtime.harness import a_service, until

pytestmark = [pytest.mark.real, pytest.mark.slow]


@contextlib.asynccontextmanager
async def a_desk(
    cluster: SlurmCluster, home: Path, mode: str, way: str = "commands", **fields: Any
) -> AsyncIterator[ReconnectingRecorder]:
    backend = a_slurm(cluster, home, mode, way, **fields)
    await backend.open()
    try:
        yield ReconnectingRecorder(backend, 60)
    finally:
        await backend.close()
        await asyncio.to_thread(cluster.clear)


def on(node: str, order: Start) -> Start:
    return structs.replace(order, run=structs.replace(order.run, node=f"hpc-{node}", backend="hpc"))


def test_slurmrestd_is_called_with_a_token_from_a_file(own_slurm, tmp_path):
    token = tmp_path / "token"
    token.write_text(f"SLURM_JWT={own_slurm.token()}\n")
    fields = {"rest": f"http://127.0.0.1:{own_slurm.ports['rest']}", "rest_user": "root", "rest_token_file": str(token)}

    async def story() -> None:
        async with a_desk(own_slurm, tmp_path, "placed", "rest", **fields) as desk:
            (end,) = await desk.run(on("n1", an_order(1, "/bin/sh", "-c", "exit 7")))
            assert end.exit_code == 7
            token.write_text("not a token\n")
            assert not (await desk.backend.health()).ok

    asyncio.run(story())


@pytest.mark.parametrize("way", ["commands", "rest"])
def test_a_run_gets_the_gpus_that_slurm_assigns(own_slurm, tmp_path, way):
    async def story() -> None:
        async with a_desk(own_slurm, tmp_path, "placed", way) as desk:
            nodes = {node.name: node for node in await desk.backend.nodes()}
            assert (nodes["hpc-n1"].capacity["gpu"], nodes["hpc-n1"].gpu_type) == (2000, "a100")
            show = ("/bin/sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES on $SLURMD_NODENAME"')
            env = {"CUDA_VISIBLE_DEVICES": "7"}
            await desk.run(on("n1", an_order(1, *show, gpu=2, gpu_type="a100", env=env)))
            assert await desk.log("1.0.1") == b"0,1 on n1\n"
            answer = await desk.backend.start(
                [
                    on("n1", an_order(2, "true", gpu="500m")),
                    on("n2", an_order(3, "true", gpu=1)),
                    on("n9", an_order(4, "true")),
                ]
            )
            assert {run: type(error) for run, error in answer.items()} == dict.fromkeys(
                ("2.0.1", "3.0.1", "4.0.1"), BackendRefused
            )

    asyncio.run(story())


def test_a_timeout_is_enforced_to_the_second_and_a_bad_directory_is_reported(own_slurm, tmp_path):
    async def story() -> None:
        async with a_desk(own_slurm, tmp_path, "placed") as desk:
            long, lost = await desk.run(
                on("n1", an_order(1, "/bin/sleep", "300", timeout_ms=1000)),
                on("n2", an_order(2, "true", workdir="/no/such/place")),
            )
            assert (long.state, long.exit_code, long.reason_code) == ("failed", 143, "timeout")
            assert (lost.state, lost.exit_code, lost.reason_code) == ("failed", None, "error")
            assert "/no/such/place" in lost.reason

    asyncio.run(story())


def in_any_command_line(secret: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if secret.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("way", ["commands", "rest"])
def test_values_of_env_are_in_no_output_no_command_of_slurm_and_no_command_line(own_slurm, tmp_path, way):
    secret = f"hush{os.getpid()}hush"

    async def story() -> None:
        async with a_desk(own_slurm, tmp_path, "placed", way) as desk:
            script = 'echo "${#DB_PASSWORD}"; while [ ! -e "$GO" ]; do sleep 0.05; done; kill -$SIGN $$'
            orders = [
                on("n1", an_order(number, "/bin/sh", "-c", script, env={"DB_PASSWORD": secret, "SIGN": sign, "GO": str(tmp_path / "go")}))
                for number, sign in enumerate(("TERM", "KILL", "SEGV"), 1)
            ]  # fmt: skip
            assert await desk.backend.start(orders) == {}
            for number in (1, 2, 3):
                await desk.log_has(f"{number}.0.1", str(len(secret)).encode())
            assert in_any_command_line(secret) == []
            shown = await asyncio.to_thread(own_slurm.slurm, "scontrol", "show", "job", "--details")
            shown += await asyncio.to_thread(own_slurm.slurm, "squeue", "--json")
            assert secret not in shown
            (tmp_path / "go").touch()
            for number in (1, 2, 3):
                assert (await desk.end_of(f"{number}.0.1")).reason_code == "killed"
                assert await desk.log(f"{number}.0.1", "stderr") == b""
                assert await desk.log(f"{number}.0.1") == f"{len(secret)}\n".encode()
            # The first three were one array for Slurm; this one is submitted alone.
            (alone,) = await desk.run(structs.replace(orders[1], run=structs.replace(orders[1].run, id="4.0.1", job=4)))
            assert (alone.reason_code, await desk.log("4.0.1", "stderr")) == ("killed", b"")

    asyncio.run(story())


@pytest.mark.parametrize("way", ["commands", "rest"])
def test_a_job_sees_the_array_index_of_hodei_and_not_that_of_slurm(own_slurm, tmp_path, way):
    """Runs submitted together are an array for Slurm, with its own indices."""

    async def story() -> None:
        async with a_desk(own_slurm, tmp_path, "placed", way) as desk:
            show = ("/bin/sh", "-c", 'echo "$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID/$HODEI_ARRAY_INDEX"')
            elements = [
                on("n3", an_order(job, *show, array=ArrayElement(20, index, 8, 0, 5)))
                for job, index in enumerate(range(5, 13), 20)
            ]
            await desk.run(*elements, on("n3", an_order(40, *show)), on("n3", an_order(41, *show)))
            said = [await desk.log(f"{job}.0.1") for job in (*range(20, 28), 40, 41)]
            assert said == [f"20/{index}/{index}\n".encode() for index in range(5, 13)] + [b"//\n", b"//\n"]

    asyncio.run(story())


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"signal": "USR1"}, id="by a signal"),
        pytest.param({"command": ("/bin/sh", "-c", 'touch "$HODEI_CHECKPOINT_FILE"')}, id="by a command"),
    ],
)
def test_checkpoints_are_taken_periodically_and_before_a_stop(own_slurm, tmp_path, how):
    async def story() -> None:
        hook = Checkpoint(timeout_ms=60_000, **how)
        script = """
            trap 'touch "$HODEI_CHECKPOINT_FILE"' USR1; trap 'echo stopping; exit 9' TERM
            echo ready; while :; do sleep 0.05; done
        """
        async with a_desk(own_slurm, tmp_path, "placed") as desk:
            await desk.backend.start([on("n1", an_order(1, "/bin/sh", "-c", script, checkpoint=hook))])
            await desk.log_has("1.0.1", b"ready")
            await desk.backend.checkpoint([TakeCheckpoint("1.0.1", "hpc", hook)])
            async with asyncio.timeout(30):
                while not any(seen.checkpoint_ms for seen in desk.observed):
                    await desk.poll()
            await desk.backend.stop([Stop("1.0.1", "hpc", 60_000, StopReason("cancelled", "enough"), hook)])
            end = await desk.end_of("1.0.1")
            assert (end.state, end.exit_code, end.reason) == ("stopped", 9, "cancelled enough")
            assert max(seen.checkpoint_ms for seen in desk.observed) <= end.at_ms

    asyncio.run(story())


@pytest.mark.parametrize("way", ["commands", "rest"])
def test_a_job_in_slurms_queue_has_its_reason_and_expected_start(own_slurm, tmp_path, way):
    async def story() -> None:
        async with a_desk(own_slurm, tmp_path, "delegate", way, partitions=("gpu",)) as desk:
            first, second = (on("gpu", an_order(job, "/bin/sleep", "300", cpu=4, timeout_ms=60_000)) for job in (1, 2))
            assert await desk.backend.start([first]) == {}
            await desk.running("1.0.1")
            assert await desk.backend.start([second]) == {}
            waiting = await desk.first("2.0.1", frozenset({"placed"}))
            assert waiting.reason.startswith("Slurm: ")
            for _ in range(100):  # Slurm estimates starts in its backfill
                if expected := await desk.backend.expected():
                    break
                await asyncio.sleep(0.2)
            assert list(expected) == ["2.0.1"]

    asyncio.run(story())


def test_why_shows_the_expected_start_of_a_job_in_slurms_queue(own_slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(backend_manager, "_QUEUE_INTERVAL_S", 0.2)

    async def story() -> None:
        # Twice the capacity is submitted, so the second job waits in the queue of Slurm.
        backend = a_slurm(own_slurm, tmp_path, "delegate", partitions=("gpu",), transport="commands", ahead=2.0)
        service = a_service(MemoryStore(), backend, clock=SystemClock())
        await service.start()
        try:
            assert await service.until_ready(30)
            job = a_job_spec(cpu=4, command=("/bin/sleep", "300"), timeout_ms=60_000)
            await service.submit([job])
            await until(lambda: service.controller.cluster.jobs[1].state == "running", 30)
            await service.submit([job])
            await until(service.backend_manager.expected_starts, 60)  # after a round of backfill
            answer = await service.why(2)
            assert answer.backend_queue is not None
            assert (answer.status, answer.backend_queue.backend) == ("placed", "hpc")
            assert answer.backend_queue.start_ms > service.controller.cluster.jobs[1].started_ms
            assert answer.backend_queue.reason.startswith("Slurm: ")
        finally:
            await service.stop()
            await asyncio.to_thread(own_slurm.clear)

    asyncio.run(story())
