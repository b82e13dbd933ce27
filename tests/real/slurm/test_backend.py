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
async def open_backend(
    cluster: SlurmCluster, home: Path, mode: str, transport: str = "commands", **fields: Any
) -> AsyncIterator[ReconnectingRecorder]:
    backend = a_slurm(cluster, home, mode, transport, **fields)
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

    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path, "placed", "rest", **fields) as recorder:
            (end,) = await recorder.run(on("n1", an_order(1, "/bin/sh", "-c", "exit 7")))
            assert end.exit_code == 7
            token.write_text("not a token\n")
            assert not (await recorder.backend.health()).ok

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["commands", "rest"])
def test_a_run_gets_the_gpus_that_slurm_assigns(own_slurm, tmp_path, transport):
    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path, "placed", transport) as recorder:
            nodes = {node.name: node for node in await recorder.backend.nodes()}
            assert (nodes["hpc-n1"].capacity["gpu"], nodes["hpc-n1"].gpu_type) == (2000, "a100")
            print_variables = ("/bin/sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES on $SLURMD_NODENAME"')
            env = {"CUDA_VISIBLE_DEVICES": "7"}
            await recorder.run(on("n1", an_order(1, *print_variables, gpu=2, gpu_type="a100", env=env)))
            assert await recorder.log("1.0.1") == b"0,1 on n1\n"
            answer = await recorder.backend.start(
                [
                    on("n1", an_order(2, "true", gpu="500m")),
                    on("n2", an_order(3, "true", gpu=1)),
                    on("n9", an_order(4, "true")),
                ]
            )
            assert {run: type(error) for run, error in answer.items()} == dict.fromkeys(
                ("2.0.1", "3.0.1", "4.0.1"), BackendRefused
            )

    asyncio.run(scenario())


def test_a_timeout_is_enforced_to_the_second_and_a_bad_directory_is_reported(own_slurm, tmp_path):
    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path, "placed") as recorder:
            long, lost = await recorder.run(
                on("n1", an_order(1, "/bin/sleep", "300", timeout_ms=1000)),
                on("n2", an_order(2, "true", workdir="/no/such/place")),
            )
            assert (long.state, long.exit_code, long.reason_code) == ("failed", 143, "timeout")
            assert (lost.state, lost.exit_code, lost.reason_code) == ("failed", None, "error")
            assert "/no/such/place" in lost.reason

    asyncio.run(scenario())


def pids_with_argument(secret: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if secret.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("transport", ["commands", "rest"])
def test_values_of_env_are_in_no_output_no_command_of_slurm_and_no_command_line(own_slurm, tmp_path, transport):
    secret = f"secret{os.getpid()}secret"

    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path, "placed", transport) as recorder:
            script = 'echo "${#DB_PASSWORD}"; while [ ! -e "$GO" ]; do sleep 0.05; done; kill -$SIGN $$'
            orders = [
                on("n1", an_order(number, "/bin/sh", "-c", script, env={"DB_PASSWORD": secret, "SIGN": sign, "GO": str(tmp_path / "go")}))
                for number, sign in enumerate(("TERM", "KILL", "SEGV"), 1)
            ]  # fmt: skip
            assert await recorder.backend.start(orders) == {}
            for number in (1, 2, 3):
                await recorder.log_has(f"{number}.0.1", str(len(secret)).encode())
            assert pids_with_argument(secret) == []
            shown = await asyncio.to_thread(own_slurm.slurm, "scontrol", "show", "job", "--details")
            shown += await asyncio.to_thread(own_slurm.slurm, "squeue", "--json")
            assert secret not in shown
            (tmp_path / "go").touch()
            for number in (1, 2, 3):
                assert (await recorder.end_of(f"{number}.0.1")).reason_code == "killed"
                assert await recorder.log(f"{number}.0.1", "stderr") == b""
                assert await recorder.log(f"{number}.0.1") == f"{len(secret)}\n".encode()
            # The first three runs were one array in Slurm; this one is submitted alone.
            (single,) = await recorder.run(
                structs.replace(orders[1], run=structs.replace(orders[1].run, id="4.0.1", job=4))
            )
            assert (single.reason_code, await recorder.log("4.0.1", "stderr")) == ("killed", b"")

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["commands", "rest"])
def test_a_job_gets_the_array_index_of_hodei_and_not_that_of_slurm(own_slurm, tmp_path, transport):
    """Runs submitted together are an array for Slurm, with its own indices."""

    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path, "placed", transport) as recorder:
            print_variables = ("/bin/sh", "-c", 'echo "$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID/$HODEI_ARRAY_INDEX"')
            elements = [
                on("n3", an_order(job, *print_variables, array=ArrayElement(20, index, 8, 0, 5)))
                for job, index in enumerate(range(5, 13), 20)
            ]
            await recorder.run(
                *elements, on("n3", an_order(40, *print_variables)), on("n3", an_order(41, *print_variables))
            )
            output = [await recorder.log(f"{job}.0.1") for job in (*range(20, 28), 40, 41)]
            assert output == [f"20/{index}/{index}\n".encode() for index in range(5, 13)] + [b"//\n", b"//\n"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param({"signal": "USR1"}, id="by a signal"),
        pytest.param({"command": ("/bin/sh", "-c", 'touch "$HODEI_CHECKPOINT_FILE"')}, id="by a command"),
    ],
)
def test_checkpoints_are_taken_periodically_and_before_a_stop(own_slurm, tmp_path, checkpoint):
    async def scenario() -> None:
        hook = Checkpoint(timeout_ms=60_000, **checkpoint)
        script = """
            trap 'touch "$HODEI_CHECKPOINT_FILE"' USR1; trap 'echo stopping; exit 9' TERM
            echo ready; while :; do sleep 0.05; done
        """
        async with open_backend(own_slurm, tmp_path, "placed") as recorder:
            await recorder.backend.start([on("n1", an_order(1, "/bin/sh", "-c", script, checkpoint=hook))])
            await recorder.log_has("1.0.1", b"ready")
            await recorder.backend.checkpoint([TakeCheckpoint("1.0.1", "hpc", hook)])
            async with asyncio.timeout(30):
                while not any(observed.checkpoint_ms for observed in recorder.observed):
                    await recorder.poll()
            await recorder.backend.stop([Stop("1.0.1", "hpc", 60_000, StopReason("cancelled", "by user"), hook)])
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code, end.reason) == ("stopped", 9, "cancelled by user")
            assert max(observed.checkpoint_ms for observed in recorder.observed) <= end.at_ms

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["commands", "rest"])
def test_a_job_in_the_queue_of_slurm_has_its_reason_and_expected_start(own_slurm, tmp_path, transport):
    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path, "delegate", transport, partitions=("gpu",)) as recorder:
            first, second = (on("gpu", an_order(job, "/bin/sleep", "300", cpu=4, timeout_ms=60_000)) for job in (1, 2))
            assert await recorder.backend.start([first]) == {}
            await recorder.running("1.0.1")
            assert await recorder.backend.start([second]) == {}
            waiting = await recorder.first("2.0.1", frozenset({"placed"}))
            assert waiting.reason.startswith("Slurm: ")
            for _ in range(100):  # Slurm estimates starts in its backfill
                if expected := await recorder.backend.expected():
                    break
                await asyncio.sleep(0.2)
            assert list(expected) == ["2.0.1"]

    asyncio.run(scenario())


def test_why_shows_the_expected_start_of_a_job_in_the_queue_of_slurm(own_slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(backend_manager, "_QUEUE_INTERVAL_S", 0.2)

    async def scenario() -> None:
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

    asyncio.run(scenario())
