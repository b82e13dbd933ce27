"""Daemons that are killed or hang, and containers removed by others: the states of their runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_host import ReconnectingRecorder, alive, unique_installation, until
from docker_backends import a_docker
from docker_hosts import Daemon, DockerDaemons
from hodei.backends.docker.settings import Allow
from real.docker.test_runs import an_order, sh

pytestmark = pytest.mark.real


@contextlib.asynccontextmanager
async def hosts(home: Path, *daemons: Daemon, **fields: Any) -> AsyncIterator[ReconnectingRecorder]:
    desk = ReconnectingRecorder(a_docker(home, *daemons, **fields), 90)
    await desk.backend.open()
    try:
        yield desk
    finally:
        await desk.backend.close()
        for daemon in daemons:
            if daemon.up:
                daemon.thaw()
                daemon.clear()


async def node_is(desk: ReconnectingRecorder, name: str, ready: bool) -> str:
    """Wait for it; what the node says about it."""
    async with asyncio.timeout(60):
        while True:
            node = next(node for node in await desk.backend.nodes() if node.name == name)
            if node.ready == ready:
                return node.not_ready_reason
            await desk.backend.nodes_changed()


async def start_again(daemon: Daemon) -> None:
    await asyncio.to_thread(daemon.start)


EXITS_6_ON_TERM = "trap 'exit 6' TERM; sleep 300 & wait"


def process_of(daemon: Daemon, run: str) -> int:
    """The first process of the run's container, as this machine numbers it."""
    (container,) = [one for one in daemon.containers() if run in one["Labels"].values()]
    return int(daemon.request("GET", f"/containers/{container['Id']}/json")["State"]["Pid"])


def ends_on_term(pid: int) -> bool:
    """Sent until it works: a container's first process ignores signals before it has set its trap."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    return not alive(pid)


def test_with_live_restore_runs_survive_a_killed_daemon_and_their_ends_are_found(
    dockerd: DockerDaemons, tmp_path: Path
):
    daemon = dockerd("h2", live_restore=True)

    async def story() -> None:
        async with hosts(tmp_path, daemon) as desk:
            stays = an_order(1, *sh("sleep 12; exit 5"), node="h2")
            ends = an_order(2, *sh(EXITS_6_ON_TERM), node="h2")
            assert await desk.backend.start([stays, ends]) == {}
            await desk.running("1.0.1")
            await desk.running("2.0.1")
            pid = process_of(daemon, "2.0.1")
            daemon.kill()
            assert await node_is(desk, "h2", False)
            assert (await desk.backend.known())["1.0.1"].state == "running"
            assert "1.0.1" not in await desk.backend.start([stays])
            await until(lambda: ends_on_term(pid), "the second run ends while the daemon is away")
            await start_again(daemon)
            await node_is(desk, "h2", True)
            end = await desk.end_of("2.0.1")
            assert (end.state, end.exit_code) == ("failed", 6)
            end = await desk.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("failed", 5)

    asyncio.run(story())


def test_without_live_restore_runs_of_a_killed_daemon_are_lost_not_failed(dockerd: DockerDaemons, tmp_path: Path):
    daemon = dockerd("h1")

    async def story() -> None:
        async with hosts(tmp_path, daemon) as desk:
            assert await desk.backend.start([an_order(1, "/bin/sleep", "300"), an_order(2, *sh(EXITS_6_ON_TERM))]) == {}
            await desk.running("1.0.1")
            await desk.running("2.0.1")
            pid = process_of(daemon, "2.0.1")
            daemon.kill()
            await node_is(desk, "h1", False)
            await until(lambda: ends_on_term(pid), "the second run ends while the daemon is away")
            await start_again(daemon)
            await node_is(desk, "h1", True)
            end = await desk.end_of("1.0.1")
            assert (end.state, end.reason_code) == ("lost", "lost")
            assert "shut down" in end.reason
            end = await desk.end_of("2.0.1")
            assert (end.state, end.exit_code) == ("failed", 6)
            (last,) = await desk.run(an_order(3))
            assert last.state == "succeeded"

    asyncio.run(story())


@pytest.mark.parametrize(
    "server_is_there", [pytest.param(True, id="while we look on"), pytest.param(False, id="while we are away")]
)
def test_a_run_whose_container_was_removed_by_others_is_lost(dockerd: DockerDaemons, tmp_path: Path, server_is_there):
    daemon, name = dockerd("h1"), unique_installation()

    def remove_all() -> None:
        for container in daemon.containers():
            daemon.request("DELETE", f"/containers/{container['Id']}?force=1")

    async def story() -> None:
        async with hosts(tmp_path, daemon, installation=name) as desk:
            await desk.backend.start([an_order(1, "/bin/sleep", "300")])
            await desk.running("1.0.1")
            if server_is_there:
                await asyncio.to_thread(remove_all)
                end = await desk.end_of("1.0.1")
                assert (end.state, end.reason_code) == ("lost", "lost")
                assert "removed" in end.reason
                return
            await desk.backend.close()
            await asyncio.to_thread(remove_all)
            desk.backend = a_docker(tmp_path, daemon, installation=name)
            await desk.backend.open()
            assert await desk.backend.known() == {}  # unknown, which the scheduler calls lost
            await desk.backend.close()

    asyncio.run(story())


def test_a_host_that_hangs_delays_only_its_own_runs(dockerd: DockerDaemons, tmp_path: Path):
    well, sick = dockerd("h1"), dockerd("h2", live_restore=True)

    async def story() -> None:
        async with hosts(tmp_path, well, sick, answer_within="1s") as desk:
            await desk.backend.start([an_order(1, *sh("sleep 4; exit 4"), node="h2")])
            await desk.running("1.0.1")
            sick.freeze()
            # Ordered before anybody knows: it waits for its host, and nobody waits for it.
            assert await desk.backend.start([an_order(2, node="h2")]) == {}
            loop = asyncio.get_running_loop()
            for job in range(10, 14):
                began = loop.time()
                assert await desk.backend.start([an_order(job, node="h1")]) == {}
                assert loop.time() - began < 1  # no call to the sick one is waited for
                assert (await desk.end_of(f"{job}.0.1")).state == "succeeded"
            assert "h2" in await node_is(desk, "h2", False)
            answer = await desk.backend.start([an_order(3, node="h2")])
            assert "h2" in answer["3.0.1"].message
            health = await desk.backend.health()
            assert health.ok
            assert "1 of 2" in health.text
            known = await desk.backend.known()
            assert known["1.0.1"].state == "running"
            assert known["2.0.1"].state == "placed"
            sick.thaw()
            await node_is(desk, "h2", True)
            assert (await desk.end_of("1.0.1")).exit_code == 4
            assert (await desk.end_of("2.0.1")).state == "succeeded"

    asyncio.run(story())


def test_a_run_that_ends_while_its_host_hangs_has_the_right_end_time(dockerd: DockerDaemons, tmp_path: Path):
    daemon, name = dockerd("h1"), unique_installation()

    def now_ms() -> int:
        return int(time.time() * 1000)

    async def story() -> None:
        async with hosts(
            tmp_path, daemon, installation=name, answer_within="500ms", allow=Allow(mounts=(f"{tmp_path}:rw",))
        ) as desk:
            ended = tmp_path / "ended"
            mounts = {"docker.hodei.io/mounts": f"{tmp_path}:/out:rw"}
            script = "while [ ! -e /out/go ]; do sleep 0.1; done; touch /out/ended"
            for job, code in ((1, 0), (2, 3)):
                order = an_order(job, *sh(f"{script}; exit {code}"), annotations=mounts)
                assert await desk.backend.start([order]) == {}
                began = await desk.running(f"{job}.0.1")
                daemon.freeze()
                await node_is(desk, "h1", False)
                (tmp_path / "go").touch()
                await until(ended.exists, "the run is over")
                await asyncio.sleep(2)  # the reported end must lie before the thaw by about this long
                thawed_ms = now_ms()
                daemon.thaw()
                end = await desk.end_of(f"{job}.0.1")
                assert end.exit_code == code
                assert began.at_ms <= end.at_ms <= thawed_ms - 1000, thawed_ms - end.at_ms
                assert end.started_ms == began.at_ms
                (tmp_path / "go").unlink()
                ended.unlink()
                await node_is(desk, "h1", True)

    asyncio.run(story())


def test_runs_of_an_unreachable_host_are_known_after_a_server_restart(dockerd: DockerDaemons, tmp_path: Path):
    well, away, name = dockerd("h1"), dockerd("h2", live_restore=True), unique_installation()

    async def story() -> None:
        async with hosts(tmp_path, well, away, installation=name) as desk:
            await desk.backend.start(
                [an_order(1, *sh("sleep 5; exit 3"), node="h2"), an_order(2, "/bin/sleep", "300", node="h2")]
            )
            await desk.running("1.0.1")
            await desk.running("2.0.1")
            await desk.backend.close()
            away.kill()
            desk.backend = a_docker(tmp_path, well, away, installation=name)
            desk.observed.clear()
            await desk.backend.open()
            known = await desk.backend.known()
            assert {run: seen.state for run, seen in known.items()} == {"1.0.1": "placed", "2.0.1": "placed"}
            await start_again(away)
            await node_is(desk, "h2", True)
            assert (await desk.running("2.0.1")).state == "running"
            assert (await desk.end_of("1.0.1")).exit_code == 3
            await desk.stop("2.0.1", grace_ms=0)
            assert (await desk.end_of("2.0.1")).state == "stopped"

    asyncio.run(story())


def test_a_host_silent_for_too_long_is_lost_and_its_runs_are_stopped_when_it_is_back(
    dockerd: DockerDaemons, tmp_path: Path
):
    well, sick = dockerd("h1"), dockerd("h2", live_restore=True)

    async def story() -> None:
        async with hosts(tmp_path, well, sick, answer_within="500ms", lost_after="2s") as desk:
            await desk.backend.start([an_order(1, "/bin/sleep", "300", node="h2", grace_ms=0)])
            await desk.running("1.0.1")
            sick.freeze()
            await nodes_are(desk, {"h1"})
            sick.thaw()
            await nodes_are(desk, {"h1", "h2"})
            end = await desk.end_of("1.0.1")
            assert (end.state, end.reason_code) == ("failed", "lost")

    asyncio.run(story())


async def nodes_are(desk: ReconnectingRecorder, names: set[str]) -> None:
    for _ in range(600):
        if {node.name for node in await desk.backend.nodes()} == names:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the nodes did not become {names}")


def test_a_container_is_adopted_after_a_lost_answer(dockerd: DockerDaemons, tmp_path: Path, monkeypatch):
    """The daemon makes and starts the container, and every answer to that is lost on its way."""
    daemon = dockerd("h1")

    async def story() -> None:
        async with hosts(tmp_path, daemon) as desk:
            engine = desk.backend._hosts["h1"].engine
            request, lost = engine.request, []

            async def unlucky(method: str, path: str, **how: Any) -> bytes:
                answer = await request(method, path, **how)
                if method == "POST" and path.endswith(("/create", "/start")) and path not in lost:
                    lost.append(path)
                    raise_lost(path)
                return answer

            monkeypatch.setattr(engine, "request", unlucky)
            (end,) = await desk.run(an_order(1, *sh("echo ran; sleep 0.5")))
            assert end.state == "succeeded"
            assert len(lost) == 2
            assert await desk.log("1.0.1") == b"ran\n"
            assert len(await asyncio.to_thread(daemon.containers)) == 1

    asyncio.run(story())


def raise_lost(path: str) -> None:
    from hodei.backends.docker.engine import DaemonError

    raise DaemonError(0, f"no answer to {path}")
