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
    recorder = ReconnectingRecorder(a_docker(home, *daemons, **fields), 90)
    await recorder.backend.open()
    try:
        yield recorder
    finally:
        await recorder.backend.close()
        for daemon in daemons:
            if daemon.up:
                daemon.thaw()
                daemon.clear()


async def node_is(recorder: ReconnectingRecorder, name: str, ready: bool) -> str:
    """Wait for that state; returns the reason of a node that is not ready."""
    async with asyncio.timeout(60):
        while True:
            node = next(node for node in await recorder.backend.nodes() if node.name == name)
            if node.ready == ready:
                return node.not_ready_reason
            await recorder.backend.nodes_changed()


async def restart(daemon: Daemon) -> None:
    await asyncio.to_thread(daemon.start)


def exits_on_term(code: int) -> tuple[str, ...]:
    return sh(f"trap 'exit {code}' TERM; sleep 300 & wait")


def process_of(daemon: Daemon, run: str) -> int:
    """The first process of the run's container, as numbered on this machine."""
    (container,) = [each for each in daemon.containers() if run in each["Labels"].values()]
    return int(daemon.request("GET", f"/containers/{container['Id']}/json")["State"]["Pid"])


def ends_on_term(pid: int) -> bool:
    """Sent repeatedly: the first process of a container ignores signals until it has set its trap."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    return not alive(pid)


def test_with_live_restore_runs_survive_a_killed_daemon_and_their_ends_are_found(
    dockerd: DockerDaemons, tmp_path: Path
):
    daemon = dockerd("h2", live_restore=True)

    async def scenario() -> None:
        async with hosts(tmp_path, daemon) as recorder:
            first = an_order(1, *exits_on_term(5), node="h2")
            second = an_order(2, *exits_on_term(6), node="h2")
            assert await recorder.backend.start([first, second]) == {}
            await recorder.running("1.0.1")
            await recorder.running("2.0.1")
            pids = {run: process_of(daemon, run) for run in ("1.0.1", "2.0.1")}
            daemon.kill()
            assert await node_is(recorder, "h2", False)
            assert (await recorder.backend.known())["1.0.1"].state == "running"
            assert "1.0.1" not in await recorder.backend.start([first])
            await until(lambda: ends_on_term(pids["2.0.1"]), "the second run ends while the daemon is down")
            await restart(daemon)
            await node_is(recorder, "h2", True)
            end = await recorder.end_of("2.0.1")
            assert (end.state, end.exit_code) == ("failed", 6)
            await until(lambda: ends_on_term(pids["1.0.1"]), "the first run ends after the restart")
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("failed", 5)

    asyncio.run(scenario())


def test_without_live_restore_runs_of_a_killed_daemon_are_lost_not_failed(dockerd: DockerDaemons, tmp_path: Path):
    daemon = dockerd("h1")

    async def scenario() -> None:
        async with hosts(tmp_path, daemon) as recorder:
            assert (
                await recorder.backend.start([an_order(1, "/bin/sleep", "300"), an_order(2, *exits_on_term(6))]) == {}
            )
            await recorder.running("1.0.1")
            await recorder.running("2.0.1")
            pid = process_of(daemon, "2.0.1")
            daemon.kill()
            await node_is(recorder, "h1", False)
            await until(lambda: ends_on_term(pid), "the second run ends while the daemon is down")
            await restart(daemon)
            await node_is(recorder, "h1", True)
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.reason_code) == ("lost", "lost")
            assert "shut down" in end.reason
            end = await recorder.end_of("2.0.1")
            assert (end.state, end.exit_code) == ("failed", 6)
            (last,) = await recorder.run(an_order(3))
            assert last.state == "succeeded"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "server_runs", [pytest.param(True, id="while the server runs"), pytest.param(False, id="while the server is down")]
)
def test_a_run_whose_container_was_removed_by_others_is_lost(dockerd: DockerDaemons, tmp_path: Path, server_runs):
    daemon, name = dockerd("h1"), unique_installation()

    def remove_all() -> None:
        for container in daemon.containers():
            daemon.request("DELETE", f"/containers/{container['Id']}?force=1")

    async def scenario() -> None:
        async with hosts(tmp_path, daemon, installation=name) as recorder:
            await recorder.backend.start([an_order(1, "/bin/sleep", "300")])
            await recorder.running("1.0.1")
            if server_runs:
                await asyncio.to_thread(remove_all)
                end = await recorder.end_of("1.0.1")
                assert (end.state, end.reason_code) == ("lost", "lost")
                assert "removed" in end.reason
                return
            await recorder.backend.close()
            await asyncio.to_thread(remove_all)
            recorder.backend = a_docker(tmp_path, daemon, installation=name)
            await recorder.backend.open()
            assert await recorder.backend.known() == {}  # absent, which the scheduler treats as lost
            await recorder.backend.close()

    asyncio.run(scenario())


def test_a_host_that_hangs_delays_only_its_own_runs(dockerd: DockerDaemons, tmp_path: Path):
    healthy, hung = dockerd("h1"), dockerd("h2", live_restore=True)

    async def scenario() -> None:
        async with hosts(tmp_path, healthy, hung, answer_within="1s") as recorder:
            await recorder.backend.start([an_order(1, *exits_on_term(4), node="h2")])
            await recorder.running("1.0.1")
            pid = process_of(hung, "1.0.1")
            hung.freeze()
            # Sent before the host is known to hang: it waits for its host and delays no other start.
            assert await recorder.backend.start([an_order(2, node="h2")]) == {}
            loop = asyncio.get_running_loop()
            for job in range(10, 14):
                began = loop.time()
                assert await recorder.backend.start([an_order(job, node="h1")]) == {}
                assert loop.time() - began < 1  # no call waits for the hung host
                assert (await recorder.end_of(f"{job}.0.1")).state == "succeeded"
            assert "h2" in await node_is(recorder, "h2", False)
            answer = await recorder.backend.start([an_order(3, node="h2")])
            assert "h2" in answer["3.0.1"].message
            health = await recorder.backend.health()
            assert health.ok
            assert "1 of 2" in health.text
            known = await recorder.backend.known()
            assert known["1.0.1"].state == "running"
            assert known["2.0.1"].state == "placed"
            hung.thaw()
            await node_is(recorder, "h2", True)
            await until(lambda: ends_on_term(pid), "the run ends")
            assert (await recorder.end_of("1.0.1")).exit_code == 4
            assert (await recorder.end_of("2.0.1")).state == "succeeded"

    asyncio.run(scenario())


def test_a_run_that_ends_while_its_host_hangs_has_the_right_end_time(dockerd: DockerDaemons, tmp_path: Path):
    daemon, name = dockerd("h1"), unique_installation()

    def now_ms() -> int:
        return int(time.time() * 1000)

    async def scenario() -> None:
        async with hosts(
            tmp_path, daemon, installation=name, answer_within="500ms", allow=Allow(mounts=(f"{tmp_path}:rw",))
        ) as recorder:
            ended = tmp_path / "ended"
            mounts = {"docker.hodei.io/mounts": f"{tmp_path}:/out:rw"}
            script = "while [ ! -e /out/go ]; do sleep 0.1; done; touch /out/ended"
            for job, code in ((1, 0), (2, 3)):
                order = an_order(job, *sh(f"{script}; exit {code}"), annotations=mounts)
                assert await recorder.backend.start([order]) == {}
                began = await recorder.running(f"{job}.0.1")
                daemon.freeze()
                await node_is(recorder, "h1", False)
                (tmp_path / "go").touch()
                await until(ended.exists, "the run has ended")
                await asyncio.sleep(1)  # between the end and the thaw, so that their times differ measurably
                thawed_ms = now_ms()
                daemon.thaw()
                end = await recorder.end_of(f"{job}.0.1")
                assert end.exit_code == code
                assert began.at_ms <= end.at_ms <= thawed_ms - 500, thawed_ms - end.at_ms
                # The start event is stamped some milliseconds after the start of the container.
                assert 0 <= began.at_ms - end.started_ms < 1000
                (tmp_path / "go").unlink()
                ended.unlink()
                await node_is(recorder, "h1", True)

    asyncio.run(scenario())


def test_runs_of_an_unreachable_host_are_known_after_a_server_restart(dockerd: DockerDaemons, tmp_path: Path):
    healthy, down, name = dockerd("h1"), dockerd("h2", live_restore=True), unique_installation()

    async def scenario() -> None:
        async with hosts(tmp_path, healthy, down, installation=name) as recorder:
            await recorder.backend.start(
                [an_order(1, *exits_on_term(3), node="h2"), an_order(2, "/bin/sleep", "300", node="h2")]
            )
            await recorder.running("1.0.1")
            await recorder.running("2.0.1")
            pid = process_of(down, "1.0.1")
            await recorder.backend.close()
            down.kill()
            await until(lambda: ends_on_term(pid), "the first run ends while the daemon is down")
            recorder.backend = a_docker(tmp_path, healthy, down, installation=name)
            recorder.observed.clear()
            await recorder.backend.open()
            known = await recorder.backend.known()
            assert {run: observed.state for run, observed in known.items()} == {"1.0.1": "placed", "2.0.1": "placed"}
            await restart(down)
            await node_is(recorder, "h2", True)
            assert (await recorder.running("2.0.1")).state == "running"
            assert (await recorder.end_of("1.0.1")).exit_code == 3
            await recorder.stop("2.0.1", grace_ms=0)
            assert (await recorder.end_of("2.0.1")).state == "stopped"

    asyncio.run(scenario())


def test_a_host_that_hangs_too_long_is_lost_and_its_runs_are_stopped_when_it_returns(
    dockerd: DockerDaemons, tmp_path: Path
):
    healthy, hung = dockerd("h1"), dockerd("h2", live_restore=True)

    async def scenario() -> None:
        async with hosts(tmp_path, healthy, hung, answer_within="500ms", lost_after="2s") as recorder:
            await recorder.backend.start([an_order(1, "/bin/sleep", "300", node="h2", grace_ms=0)])
            await recorder.running("1.0.1")
            hung.freeze()
            await nodes_are(recorder, {"h1"})
            hung.thaw()
            await nodes_are(recorder, {"h1", "h2"})
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.reason_code) == ("failed", "lost")

    asyncio.run(scenario())


async def nodes_are(recorder: ReconnectingRecorder, names: set[str]) -> None:
    for _ in range(600):
        if {node.name for node in await recorder.backend.nodes()} == names:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the nodes did not become {names}")


def test_a_container_is_adopted_after_a_lost_answer(dockerd: DockerDaemons, tmp_path: Path, monkeypatch):
    """The daemon creates and starts the container, and both answers are lost."""
    daemon = dockerd("h1")

    async def scenario() -> None:
        async with hosts(tmp_path, daemon) as recorder:
            engine = recorder.backend._hosts["h1"].engine
            request, lost = engine.request, []

            async def lose_answers(method: str, path: str, **options: Any) -> bytes:
                answer = await request(method, path, **options)
                if method == "POST" and path.endswith(("/create", "/start")) and path not in lost:
                    lost.append(path)
                    raise_lost(path)
                return answer

            monkeypatch.setattr(engine, "request", lose_answers)
            (end,) = await recorder.run(an_order(1, "/bin/echo", "ran"))
            assert end.state == "succeeded"
            assert len(lost) == 2
            assert await recorder.log("1.0.1") == b"ran\n"
            assert len(await asyncio.to_thread(daemon.containers)) == 1

    asyncio.run(scenario())


def raise_lost(path: str) -> None:
    from hodei.backends.docker.engine import DaemonError

    raise DaemonError(0, f"no answer to {path}")
