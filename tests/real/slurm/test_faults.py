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


class ReopeningDesk(ReconnectingRecorder):
    """Opens the backend again after an outage, as the runtime does."""

    async def poll(self) -> None:
        try:
            await super().poll()
        except BackendError:
            with contextlib.suppress(BackendError):
                await self.backend.open()
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def a_desk(
    cluster: SlurmCluster, home: Path, mode: str = "placed", way: str = "commands"
) -> AsyncIterator[ReopeningDesk]:
    backend = a_slurm(cluster, home, mode, way)
    await backend.open()
    try:
        yield ReopeningDesk(backend, DEADLINE_S)
    finally:
        await backend.close()
        await asyncio.to_thread(cluster.clear)


def on(node: str, order: Start) -> Start:
    return structs.replace(order, run=structs.replace(order.run, node=node, backend="hpc"))


@pytest.mark.parametrize("way", ["commands", "rest"])
def test_a_job_that_slurm_forgets_in_a_crash_is_submitted_again_once(own_slurm, tmp_path, way):
    proof = tmp_path / "proof"

    async def story() -> None:
        async with a_desk(own_slurm, tmp_path / "home", way=way) as desk:
            slurm = lambda *words: asyncio.to_thread(own_slurm.slurm, *words)  # noqa: E731
            await slurm("scontrol", "update", "partitionname=main", "state=down")  # so that it stays pending
            await slurm("scontrol", "update", "partitionname=high", "state=down")
            order = on("hpc-n1", an_order(1, "/bin/sh", "-c", f"echo ran >> {proof}"))
            # Slurm writes its state some seconds after a change. The crash loses what came after this copy.
            await asyncio.to_thread(own_slurm.stop_ctld)
            await asyncio.to_thread(shutil.copytree, own_slurm.home / "state", tmp_path / "state")
            await asyncio.to_thread(own_slurm.start_ctld)
            await asyncio.to_thread(own_slurm.wait_for_ctld)
            await asyncio.to_thread(
                own_slurm.wait_until_idle
            )  # Slurm refuses jobs for nodes that have not registered again
            assert await desk.backend.start([order]) == {}
            number = desk.backend.tracked["1.0.1"].job
            await asyncio.to_thread(own_slurm.kill, "slurmctld")
            await asyncio.to_thread(shutil.rmtree, own_slurm.home / "state")
            await asyncio.to_thread(shutil.copytree, tmp_path / "state", own_slurm.home / "state")
            await asyncio.to_thread(own_slurm.start_ctld)
            await asyncio.to_thread(own_slurm.wait_for_ctld)
            known = own_slurm._quietly("squeue", "-h", "-t", "all", "-o", "%i").split()
            assert number not in known, "Slurm has not forgotten it, so this run of the test proves nothing"
            # Another job gets its id.
            other = await slurm("sbatch", "--parsable", "--partition=main", "--output=/dev/null", "--wrap=sleep 1000")
            assert other.strip() == number
            await slurm("scontrol", "update", "partitionname=main", "state=up")
            await slurm("scontrol", "update", "partitionname=high", "state=up")
            end = await desk.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("succeeded", 0), end.reason
            assert desk.backend.tracked["1.0.1"].job != number
            assert proof.read_text() == "ran\n"
            marks = await slurm("squeue", "-h", "-t", "all", "-O", "Comment:100")
            assert marks.count(desk.backend.mark("1.0.1")) == 1

    asyncio.run(story())


def test_similar_members_are_submitted_as_one_array_and_remain_separate_runs(own_slurm, tmp_path):
    async def story() -> None:
        async with a_desk(own_slurm, tmp_path, "delegate") as desk:
            script = 'echo "member $HODEI_MEMBER of $HODEI_WORLD_SIZE"; exit $HODEI_MEMBER'
            order = on("hpc-main", an_order(1, "/bin/sh", "-c", script, count=4))
            members = [
                structs.replace(
                    order, world_size=4, run=structs.replace(order.run, id=f"1.{member}.1", member=member, rank=member)
                )
                for member in range(4)
            ]
            ends = await desk.run(*members)
            assert [end.exit_code for end in ends] == [0, 1, 2, 3]
            assert await desk.log("1.2.1") == b"member 2 of 4\n"
            assert len({tracked.job.partition("_")[0] for tracked in desk.backend.tracked.values()}) == 1
            sleepers = [on("hpc-main", an_order(job, "/bin/sleep", "1000")) for job in (2, 3)]
            assert await desk.backend.start([structs.replace(one, spec=sleepers[0].spec) for one in sleepers]) == {}
            await desk.running("3.0.1")
            await desk.stop("2.0.1")
            assert (await desk.end_of("2.0.1")).state == "stopped"
            assert (await desk.backend.known())["3.0.1"].state == "running"

    asyncio.run(story())


def test_a_run_whose_node_dies_is_lost_and_the_next_attempt_runs_elsewhere(own_slurm, tmp_path):
    async def story() -> None:
        async with a_desk(own_slurm, tmp_path) as desk:
            await desk.backend.start([on("hpc-n2", an_order(1, "/bin/sleep", "1000"))])
            await desk.running("1.0.1")
            await asyncio.to_thread(own_slurm.kill, "n2")
            try:
                end = await desk.end_of("1.0.1")
                assert (end.state, end.reason_code) == ("lost", "lost")
                assert "NODE_FAIL" in end.reason
                nodes = {node.name: node for node in await desk.backend.nodes()}
                assert not nodes["hpc-n2"].ready
                assert "down" in nodes["hpc-n2"].not_ready_reason
                again = an_order(1, "/bin/true")
                again = structs.replace(again, run=structs.replace(again.run, id="1.0.2", attempt=2))
                assert (await desk.run(on("hpc-n3", again)))[0].state == "succeeded"
            finally:
                await asyncio.to_thread(own_slurm.start_slurmd, "n2")
            await asyncio.to_thread(own_slurm.wait_until_idle)
            assert all(node.ready for node in await desk.backend.nodes())

    asyncio.run(story())


def test_an_unreachable_controller_is_unhealthy_and_runs_are_found_again(own_slurm, tmp_path):
    script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; exit 7"

    async def story() -> None:
        async with a_desk(own_slurm, tmp_path) as desk:
            await desk.backend.start([on("hpc-n1", an_order(1, "/bin/sh", "-c", script))])
            await desk.running("1.0.1")
            await asyncio.to_thread(own_slurm.wait_until_saved)
            await asyncio.to_thread(own_slurm.kill, "slurmctld")
            health = await desk.backend.health()
            assert not health.ok
            (tmp_path / "go").touch()
            await asyncio.to_thread(own_slurm.start_ctld)
            end = await desk.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("failed", 7)

    asyncio.run(story())
