"""Nothing runs twice on Docker when a create or start request gets no answer: the daemon hangs (SIGSTOP) for longer than the
timeout, or the answer is cut after the daemon has acted.

Every run appends a line to a file of the host, which counts real executions. HODEI_ROUNDS sets the number of repetitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_host import ReconnectingRecorder, until
from docker_backends import a_docker
from docker_hosts import IMAGE, Daemon, DockerDaemons
from fault_proxy import ABANDON, CUT, DROP, PASS, FaultProxy, freeze
from hodei.backends.docker import engine, start
from hodei.backends.docker.settings import Allow
from hodei.model.effects import Forget
from hodei.model.errors import BackendError
from real.docker.test_runs import an_order, sh
from real.installation import Installation
from real.installation import until as until_true

pytestmark = pytest.mark.real
ROUNDS = int(os.environ.get("HODEI_ROUNDS", "1"))
REQUEST = {"create": r"^POST .*/containers/create\?", "start": r"^POST .*/containers/[0-9a-f]+/start"}
ACTIONS = {"hangs": PASS, "hangs and is abandoned": ABANDON, "cut": CUT}
# Timeouts of a request and of a silent host; short, so that a hang exceeds both.
CHANGE_TIMEOUT_S, REACH_TIMEOUT_S = 0.6, 1.6


class ProxiedDocker:
    """A backend that reaches its daemon through a proxy, and the file that its runs write to."""

    def __init__(self, recorder: ReconnectingRecorder, daemon: Daemon, proxy: FaultProxy, written: Path) -> None:
        self.recorder, self.daemon, self.proxy, self.written = recorder, daemon, proxy, written

    def order(self, job: int, *, after: str = "true"):
        mounts = {"docker.hodei.io/mounts": f"{self.written.parent}:/out:rw"}
        script = f"echo {job} >> /out/{self.written.name}; {after}"
        return an_order(job, *sh(script), annotations=mounts, grace_ms=200)

    def executions(self, job: int) -> int:
        lines = self.written.read_text().split() if self.written.exists() else []
        return lines.count(str(job))

    async def host_is_up(self) -> None:
        await until(lambda: self.recorder.backend._hosts["h1"].up, "the host answers")

    async def exceed_timeouts(self) -> None:
        """Wait until the request and a wait for the host have both timed out."""
        await asyncio.to_thread(self.proxy.client_left.wait, 20)
        await until(lambda: not self.recorder.backend._hosts["h1"].up, "the host is known to be silent")
        await asyncio.sleep(REACH_TIMEOUT_S + 0.2)  # a wait for the host takes this long, and no event signals its end

    async def check_nothing_is_left(self, run: str) -> None:
        await until(self.proxy.is_idle, "the daemon has answered all requests")
        await self.recorder.backend.forget([Forget(run, "docker")])
        for _ in range(200):
            if not await asyncio.to_thread(self.daemon.containers):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"left behind: {await asyncio.to_thread(self.daemon.containers)}")


@pytest.fixture
def daemon(dockerd: DockerDaemons) -> Iterator[Daemon]:
    daemon = dockerd("h1")
    daemon.clear()
    try:
        yield daemon
    finally:
        daemon.thaw()
        daemon.clear()


def a_proxy(daemon: Daemon, path: Path) -> FaultProxy:
    return FaultProxy(path=str(path), to_path=daemon.socket)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "CHANGE_TIMEOUT_S", CHANGE_TIMEOUT_S)
    monkeypatch.setattr(engine, "REACH_TIMEOUT_S", REACH_TIMEOUT_S)
    monkeypatch.setattr(engine, "PING_EVERY_S", 0.1)


@contextlib.asynccontextmanager
async def a_docker_behind_a_proxy(daemon: Daemon, tmp_path: Path, **fields: Any) -> AsyncIterator[ProxiedDocker]:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    proxy = a_proxy(daemon, tmp_path / "proxy.sock")
    settings = {"hosts": {"h1": {"url": f"unix://{tmp_path}/proxy.sock"}}, "answer_within": "400ms", **fields}
    recorder = ReconnectingRecorder(
        a_docker(tmp_path / "home", daemon, allow=Allow(mounts=(f"{shared}:rw",)), **settings), 60
    )
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(BackendError):  # a busy machine may exceed so short a timeout
                await recorder.backend.open()
                break
            await asyncio.sleep(0.1)
    try:
        yield ProxiedDocker(recorder, daemon, proxy, shared / "written")
    finally:
        daemon.thaw()
        await recorder.backend.close()
        proxy.close()


@pytest.mark.parametrize("verb", REQUEST)
@pytest.mark.parametrize("fault", ACTIONS)
def test_a_run_whose_request_got_no_answer_is_executed_once(daemon, tmp_path, short_timeouts, verb, fault):
    hangs = fault != "cut"

    def freeze_daemon() -> None:
        freeze(daemon.pid)

    async def scenario() -> None:
        async with a_docker_behind_a_proxy(daemon, tmp_path) as docker:
            outcomes = []
            for job in range(1, ROUNDS + 1):
                await docker.host_is_up()
                docker.proxy.expect(REQUEST[verb], ACTIONS[fault], before=freeze_daemon if hangs else lambda: None)
                assert await docker.recorder.backend.start([docker.order(job)]) == {}
                assert await asyncio.to_thread(docker.proxy.matched.wait, 20)
                if hangs:
                    await docker.exceed_timeouts()
                    daemon.thaw()
                end = await docker.recorder.end_of(f"{job}.0.1")
                await docker.check_nothing_is_left(end.run)
                outcomes.append((end.state, end.reason_code, docker.executions(job)))
            # A container that was created and not started may be given up, as nothing of it runs.
            allowed = {("succeeded", "", 1), *([("failed", "not_reached", 0)] if verb == "create" else [])}
            assert set(outcomes) <= allowed, outcomes
            print(f"{verb} {fault}: {len(outcomes)} rounds, {sum(times for *_, times in outcomes)} executions")

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", REQUEST)
def test_a_run_cancelled_while_in_doubt_leaves_no_container(daemon, tmp_path, short_timeouts, verb):
    async def scenario() -> None:
        async with a_docker_behind_a_proxy(daemon, tmp_path) as docker:
            for job in range(1, ROUNDS + 1):
                await docker.host_is_up()
                docker.proxy.expect(REQUEST[verb], ABANDON, before=lambda: freeze(daemon.pid))
                assert await docker.recorder.backend.start([docker.order(job, after="exec sleep 300")]) == {}
                assert await asyncio.to_thread(docker.proxy.matched.wait, 20)
                await docker.exceed_timeouts()
                await docker.recorder.stop(f"{job}.0.1", grace_ms=0)
                daemon.thaw()
                end = await docker.recorder.end_of(f"{job}.0.1")
                assert end.state == "stopped" or (verb == "create" and end.reason_code == "not_reached")
                await docker.check_nothing_is_left(end.run)
                assert docker.executions(job) <= 1

    asyncio.run(scenario())


@pytest.mark.parametrize("seconds", [0, 1], ids=["it has ended", "it runs"])
def test_a_start_that_arrives_after_the_inspection_is_found(daemon, tmp_path, short_timeouts, seconds):
    """A start of unknown outcome takes effect between the inspection of the container and its removal."""

    def start_late(proxy: FaultProxy) -> None:
        (container,) = daemon.containers()
        assert container["State"] == "created"
        if not seconds:
            # The inspection after its end finds no container, and the event of its end arrives even later.
            proxy.expect(r"^GET .*/events", before=lambda: time.sleep(0.5), also=True)  # longer than the rest takes
            proxy.expect(
                r"^GET .*/json",
                before=lambda: until_true(lambda: not daemon.containers(), "the container is removed"),
                also=True,
            )
        daemon.request("POST", f"/containers/{container['Id']}/start")
        if not seconds:
            daemon.request("POST", f"/containers/{container['Id']}/wait")

    async def scenario() -> None:
        async with a_docker_behind_a_proxy(daemon, tmp_path) as docker:
            docker.proxy.expect(REQUEST["start"], DROP)
            docker.proxy.expect(r"^DELETE ", before=lambda: start_late(docker.proxy), also=True)
            (end,) = await docker.recorder.run(docker.order(1, after=f"sleep {seconds}; exit 3"))
            assert (end.state, end.exit_code, docker.executions(1)) == ("failed", 3, 1)
            await docker.check_nothing_is_left("1.0.1")

    asyncio.run(scenario())


def test_a_start_that_never_arrived_is_repeated(daemon, tmp_path, short_timeouts):
    async def scenario() -> None:
        async with a_docker_behind_a_proxy(daemon, tmp_path) as docker:
            docker.proxy.expect(REQUEST["start"], DROP)
            (end,) = await docker.recorder.run(docker.order(1))
            assert (end.state, docker.executions(1)) == ("succeeded", 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", REQUEST)
@pytest.mark.parametrize("fault", ACTIONS)
def test_a_server_that_is_killed_between_a_request_and_its_answer_runs_nothing_twice(
    installation: Installation, daemon, tmp_path, verb, fault
):
    """With `hangs` the next server starts while the daemon still holds the request."""
    if "HODEI_ROUNDS" not in os.environ and (verb == "create" or fault == "hangs and is abandoned"):
        pytest.skip("takes long; set HODEI_ROUNDS to run it")
    shared, proxy = tmp_path / "shared", a_proxy(daemon, tmp_path / "proxy.sock")
    shared.mkdir(mode=0o777)
    installation.configure(
        '[backends.local]\nkind = "local"\nenabled = false\n'
        f'[backends.farm]\nkind = "docker"\nimage = "{IMAGE}"\nnetwork = "none"\nanswer_within = "1s"\n'
        f'allow.mounts = ["{shared}:rw"]\n[[backends.farm.hosts]]\nname = "h1"\nurl = "unix://{tmp_path}/proxy.sock"\n'
    ).up()
    written = shared / "written"
    hangs = fault != "cut"

    def freeze_daemon() -> None:
        freeze(daemon.pid)

    def run_round(number: int) -> int:
        client = installation.client()
        until_true(lambda: any(node.state == "ready" for node in client.nodes()), "the host answers")
        proxy.expect(
            REQUEST[verb], ACTIONS[fault], before=freeze_daemon if hangs else lambda: None, after=installation.kill
        )
        (job,) = client.submit_all(
            [
                {
                    "name": f"round-{number}", "command": ["/bin/sh", "-c", f"echo {number} >> /out/written"],
                    "cpu": "10m", "memory": "8Mi", "annotations": {"docker.hodei.io/mounts": f"{shared}:/out:rw"},
                }
            ]
        )  # fmt: skip
        assert proxy.matched.wait(20)
        if hangs:
            installation.kill()
        until_true(lambda: installation.server.poll() is not None, "the server is dead")
        installation.start()
        if hangs:
            until_true(
                lambda: "did not answer" in installation.server_output(), "the next server has timed out on the daemon"
            )
            daemon.thaw()
        until_true(lambda: "is up at" in installation.server_output(), "the server is up", 120)
        installation.until_up()
        client = installation.client()
        until_true(lambda: client.job(job).job.state == "succeeded", "it has run")
        until_true(proxy.is_idle, "the daemon has answered all requests")
        until_true(lambda: daemon.containers() == [], "its container is removed")
        return written.read_text().split().count(str(number))

    try:
        times = [run_round(number) for number in range(1, ROUNDS + 1)]
        assert set(times) == {1}, times
        print(f"killed, {verb} {fault}: {len(times)} rounds, {sum(times)} executions")
    finally:
        daemon.thaw()
        proxy.close()
