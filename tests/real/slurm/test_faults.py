"""Daemons of Slurm are killed with -9 while runs are submitted or running."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs

from agent_host import ReconnectingRecorder, an_order
from hodei.model.effects import Start
from hodei.model.errors import BackendError
from hpc_backends import a_slurm
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.real, pytest.mark.slow]
DEADLINE_S = 120.0


class ReopeningRecorder(ReconnectingRecorder):
    """Opens the backend again after an outage, as the runtime does."""

    async def poll(self) -> None:
        try:
            await super().poll()
        except BackendError:
            with contextlib.suppress(BackendError):
                await self.backend.open()
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def open_backend(
    cluster: SlurmCluster, home: Path, mode: str = "placed", transport: str = "commands"
) -> AsyncIterator[ReopeningRecorder]:
    backend = a_slurm(cluster, home, mode, transport)
    await backend.open()
    try:
        yield ReopeningRecorder(backend, DEADLINE_S)
    finally:
        await backend.close()
        await asyncio.to_thread(cluster.clear)


def on(node: str, order: Start) -> Start:
    return structs.replace(order, run=structs.replace(order.run, node=node, backend="hpc"))


@pytest.mark.parametrize("transport", ["commands", "rest"])
def test_a_job_that_slurm_forgets_in_a_crash_is_submitted_again_once(own_slurm, tmp_path, transport):
    proof = tmp_path / "proof"

    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path / "home", transport=transport) as recorder:
            slurm = lambda *args: asyncio.to_thread(own_slurm.slurm, *args)  # noqa: E731
            await slurm("scontrol", "update", "partitionname=main", "state=down")  # so that it stays pending
            await slurm("scontrol", "update", "partitionname=high", "state=down")
            order = on("hpc-n1", an_order(1, "/bin/sh", "-c", f"echo ran >> {proof}"))
            # Slurm writes its state some seconds after a change. The crash loses all changes after this copy.
            await asyncio.to_thread(own_slurm.stop_ctld)
            await asyncio.to_thread(shutil.copytree, own_slurm.home / "state", tmp_path / "state")
            await asyncio.to_thread(own_slurm.start_ctld)
            await asyncio.to_thread(own_slurm.wait_for_ctld)
            await asyncio.to_thread(
                own_slurm.wait_until_idle
            )  # Slurm refuses jobs for nodes that have not registered again
            assert await recorder.backend.start([order]) == {}
            number = recorder.backend.tracked["1.0.1"].job
            await asyncio.to_thread(own_slurm.kill, "slurmctld")
            await asyncio.to_thread(shutil.rmtree, own_slurm.home / "state")
            await asyncio.to_thread(shutil.copytree, tmp_path / "state", own_slurm.home / "state")
            await asyncio.to_thread(own_slurm.start_ctld)
            await asyncio.to_thread(own_slurm.wait_for_ctld)
            known = own_slurm._quietly("squeue", "-h", "-t", "all", "-o", "%i").split()
            assert number not in known, "Slurm still has the job, so the test proves nothing"
            # Another job gets its id.
            other = await slurm("sbatch", "--parsable", "--partition=main", "--output=/dev/null", "--wrap=sleep 1000")
            assert other.strip() == number
            await slurm("scontrol", "update", "partitionname=main", "state=up")
            await slurm("scontrol", "update", "partitionname=high", "state=up")
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("succeeded", 0), end.reason
            assert recorder.backend.tracked["1.0.1"].job != number
            assert proof.read_text() == "ran\n"
            marks = await slurm("squeue", "-h", "-t", "all", "-O", "Comment:100")
            assert marks.count(recorder.backend.mark("1.0.1")) == 1

    asyncio.run(scenario())


def test_similar_members_are_submitted_as_one_array_and_remain_separate_runs(own_slurm, tmp_path):
    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path, "delegate") as recorder:
            script = 'echo "member $HODEI_MEMBER of $HODEI_WORLD_SIZE"; exit $HODEI_MEMBER'
            order = on("hpc-main", an_order(1, "/bin/sh", "-c", script, count=4))
            members = [
                structs.replace(
                    order, world_size=4, run=structs.replace(order.run, id=f"1.{member}.1", member=member, rank=member)
                )
                for member in range(4)
            ]
            ends = await recorder.run(*members)
            assert [end.exit_code for end in ends] == [0, 1, 2, 3]
            assert await recorder.log("1.2.1") == b"member 2 of 4\n"
            assert len({tracked.job.partition("_")[0] for tracked in recorder.backend.tracked.values()}) == 1
            sleepers = [on("hpc-main", an_order(job, "/bin/sleep", "1000")) for job in (2, 3)]
            assert (
                await recorder.backend.start([structs.replace(sleeper, spec=sleepers[0].spec) for sleeper in sleepers])
                == {}
            )
            await recorder.running("3.0.1")
            await recorder.stop("2.0.1")
            assert (await recorder.end_of("2.0.1")).state == "stopped"
            assert (await recorder.backend.known())["3.0.1"].state == "running"

    asyncio.run(scenario())


def test_a_run_whose_node_dies_is_lost_and_the_next_attempt_runs_elsewhere(own_slurm, tmp_path):
    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path) as recorder:
            await recorder.backend.start([on("hpc-n2", an_order(1, "/bin/sleep", "1000"))])
            await recorder.running("1.0.1")
            await asyncio.to_thread(own_slurm.kill, "n2")
            try:
                end = await recorder.end_of("1.0.1")
                assert (end.state, end.reason_code) == ("lost", "lost")
                assert "NODE_FAIL" in end.reason
                nodes = {node.name: node for node in await recorder.backend.nodes()}
                assert not nodes["hpc-n2"].ready
                assert "down" in nodes["hpc-n2"].not_ready_reason
                second = an_order(1, "/bin/true")
                second = structs.replace(second, run=structs.replace(second.run, id="1.0.2", attempt=2))
                assert (await recorder.run(on("hpc-n3", second)))[0].state == "succeeded"
            finally:
                await asyncio.to_thread(own_slurm.start_slurmd, "n2")
            await asyncio.to_thread(own_slurm.wait_until_idle)
            assert all(node.ready for node in await recorder.backend.nodes())

    asyncio.run(scenario())


def test_an_unreachable_controller_is_unhealthy_and_runs_are_found_again(own_slurm, tmp_path):
    script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; exit 7"

    async def scenario() -> None:
        async with open_backend(own_slurm, tmp_path) as recorder:
            await recorder.backend.start([on("hpc-n1", an_order(1, "/bin/sh", "-c", script))])
            await recorder.running("1.0.1")
            await asyncio.to_thread(own_slurm.wait_until_saved)
            await asyncio.to_thread(own_slurm.kill, "slurmctld")
            health = await recorder.backend.health()
            assert not health.ok
            (tmp_path / "go").touch()
            await asyncio.to_thread(own_slurm.start_ctld)
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("failed", 7)

    asyncio.run(scenario())
