"""Limits, options and supervision of runs in containers; with a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import ReconnectingRecorder, unique_installation, until
from agent_host import an_order as a_plain_order
from docker_backends import a_docker
from docker_hosts import DockerDaemons
from hodei.backends.docker.settings import Allow
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError
from hodei.model.job import Checkpoint, HealthCheck
from hodei.model.node import Grant
from hodei.model.outcome import StopReason

pytestmark = pytest.mark.real
MI = 1 << 20


def an_order(job: int, *command: str, node: str = "h1", **fields: Any) -> Start:
    order = a_plain_order(job, *command, **fields)
    return structs.replace(order, run=structs.replace(order.run, node=node, backend="docker"))


def sh(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


@contextlib.asynccontextmanager
async def at_a_desk(home: Path, farm: DockerDaemons, **fields: Any) -> AsyncIterator[ReconnectingRecorder]:
    daemon = farm()
    backend = a_docker(home, daemon, **fields)
    await backend.open()
    try:
        yield ReconnectingRecorder(backend, 25)
    finally:
        await backend.close()
        daemon.clear()


@pytest.fixture
def tell(dockerd: DockerDaemons, tmp_path: Path) -> Callable[..., None]:
    def whole(story: Callable[[ReconnectingRecorder], Awaitable[None]], **fields: Any) -> None:
        async def run() -> None:
            async with at_a_desk(tmp_path / "home", dockerd, **fields) as desk:
                await story(desk)

        asyncio.run(run())

    return whole


def test_a_run_over_its_memory_limit_fails_with_oom_and_not_killed(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        eat = sh("x=a; while :; do x=$x$x; done")
        oom, killed = await desk.run(
            an_order(1, *eat, limits={"memory": 16 * MI}), an_order(2, *sh("kill -KILL $$"), limits={"memory": 64 * MI})
        )
        assert (oom.state, oom.reason_code) == ("failed", "oom")
        assert str(16 * MI) in oom.reason
        assert (killed.state, killed.exit_code, killed.reason_code) == ("failed", 137, "killed")

    tell(story)


def test_limits_hold_inside_the_container(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        look = sh("cd /sys/fs/cgroup; cat memory/memory.limit_in_bytes memory/memory.memsw.limit_in_bytes "
                  "cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us pids/pids.max cpuset/cpuset.cpus 2>/dev/null || "
                  "cat memory.max memory.swap.max cpu.max pids.max cpuset.cpus")  # fmt: skip
        order = an_order(1, *look, limits={"cpu": 500, "memory": 32 * MI})
        await desk.run(structs.replace(order, run=structs.replace(order.run, grant=Grant(cpus=(0,)))))
        said = (await desk.log("1.0.1")).split()
        version_1 = [b"33554432", b"33554432", b"50000", b"100000", b"77", b"0"]
        version_2 = [b"33554432", b"0", b"50000", b"100000", b"77", b"0"]
        assert said in (version_1, version_2)

    tell(story, pids_limit=77)


def test_cpu_shares_and_oom_score_follow_the_quality_of_service(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        look = sh("cat /proc/self/oom_score_adj; cd /sys/fs/cgroup; cat cpu/cpu.shares 2>/dev/null || cat cpu.weight")
        full = {"cpu": 1000, "memory": 64 * MI}
        ends = await desk.run(
            an_order(1, *look, cpu=1, memory=64 * MI, limits=full),
            an_order(2, *look, cpu=2, memory=64 * MI),
            an_order(3, *look, cpu=0, memory=0),
        )
        assert [end.state for end in ends] == ["succeeded"] * 3, ends[0].reason
        said = [[int(word) for word in (await desk.log(f"{job}.0.1")).split()] for job in (1, 2, 3)]
        # A daemon without CAP_SYS_RESOURCE can not protect a run; it runs all the same.
        assert said[0][0] in (-997, 0)
        assert said[2][0] == 1000
        assert 900 < said[1][0] < 1000
        weights = [weight for _, weight in said]
        assert weights[2] < weights[0] < weights[1]

    tell(story)


def test_a_run_cannot_exceed_its_process_limit(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        bomb = sh("n=0; while [ $n -lt 50 ]; do sleep 30 & n=$((n+1)); done; echo all there")
        (end,) = await desk.run(an_order(1, *bomb))
        assert end.state == "failed"
        assert b"all there" not in await desk.log("1.0.1")

    tell(story, pids_limit=20)


def test_a_host_never_exceeds_max_containers(tell, dockerd):
    async def story(desk: ReconnectingRecorder) -> None:
        orders = [an_order(job, "/bin/sleep", "0.5") for job in range(1, 6)]
        assert await desk.backend.start(orders) == {}
        most = 0
        while not all(
            any(seen.run == order.run.id and seen.state == "succeeded" for seen in desk.observed) for order in orders
        ):
            there = await asyncio.to_thread(dockerd().request, "GET", "/containers/json")
            most = max(most, len(there))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await desk.poll()
        assert 1 <= most <= 2
        (node,) = await desk.backend.nodes()
        assert node.capacity["containers"] == 2

    tell(story, hosts={"h1": {"max_containers": 2}})


def test_a_run_that_waits_for_a_slot_can_be_stopped(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        assert await desk.backend.start([an_order(1, "/bin/sleep", "60"), an_order(2)]) == {}
        await desk.running("1.0.1")
        await desk.stop("2.0.1", reason=StopReason("cancelled", "by ann"))
        end = await desk.end_of("2.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", None, "cancelled by ann")

    tell(story, hosts={"h1": {"max_containers": 1}})


def test_a_missing_or_unrunnable_command_has_the_exit_code_of_a_shell(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        ends = await desk.run(an_order(1, "no-such-command-anywhere"), an_order(2, "/etc/passwd"))
        assert [(end.state, end.exit_code) for end in ends] == [("failed", 127), ("failed", 126)]

    tell(story)


def test_without_init_the_exit_codes_are_the_same(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        ends = await desk.run(an_order(1, "no-such-command-anywhere"), an_order(2, "/etc/passwd"))
        assert [(end.state, end.exit_code) for end in ends] == [("failed", 127), ("failed", 126)]
        assert "no-such-command-anywhere" in ends[0].reason
        await desk.backend.forget([Forget(end.run, "docker") for end in ends])

    tell(story, init=False)


def test_a_missing_image_that_may_not_be_pulled_is_reported(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        never = {"docker.hodei.io/pull": "never"}
        assert await desk.backend.start([an_order(1, image="not-here:never", annotations=never)]) == {}
        end = await desk.end_of("1.0.1")
        assert (end.state, end.reason_code, end.permanent) == ("failed", "start_failed", False)
        assert "not-here:never" in end.reason
        assert "never" in end.reason

    tell(story)


def test_labels_identify_the_run(tell, dockerd):
    async def story(desk: ReconnectingRecorder) -> None:
        await desk.run(an_order(1, labels={"team": "ml", "hodei.io/run": "77.0.1"}, project="vision"))
        (container,) = await asyncio.to_thread(dockerd().containers)
        labels = container["Labels"]
        assert (labels["hodei.io/run"], labels["hodei.io/job"], labels["hodei.io/project"]) == ("1.0.1", "1", "vision")
        assert (labels["job.hodei.io/team"], labels["job.hodei.io/hodei.io/run"]) == ("ml", "77.0.1")
        assert labels["hodei.io/installation"] in container["Names"][0]

    tell(story)


def test_the_configured_user_runs_the_command(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        as_nobody = {"docker.hodei.io/user": "65534:65534"}
        await desk.run(an_order(1, "/bin/id", "-u"), an_order(2, "/bin/id", "-u", annotations=as_nobody))
        assert (await desk.log("1.0.1"), await desk.log("2.0.1")) == (b"1000\n", b"65534\n")

    tell(story, user="1000:1000", allow=Allow(users=("65534:65534",)))


def test_an_allowed_directory_is_mounted_and_only_written_to_if_that_is_allowed(tell, tmp_path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "in").write_text("hello")
    data.chmod(0o777)

    async def story(desk: ReconnectingRecorder) -> None:
        read = {"docker.hodei.io/mounts": f"{data}:/data"}
        write = {"docker.hodei.io/mounts": f"{data}:/data:rw"}
        script = sh("cat /data/in; echo mine > /data/$HODEI_JOB_ID")
        refused, allowed = await desk.run(
            an_order(1, *script, annotations=read), an_order(2, *script, annotations=write)
        )
        assert (refused.state, allowed.state) == ("failed", "succeeded")
        assert await desk.log("1.0.1") == b"hello"
        assert not (data / "1").exists()
        assert (data / "2").read_text() == "mine\n"

    tell(story, allow=Allow(mounts=(f"{data}:rw",)))


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"signal": "USR1"}, id="by a signal"),
        pytest.param({"command": sh('echo saved; touch "$HODEI_CHECKPOINT_FILE"')}, id="by a command"),
    ],
)
def test_a_stop_waits_for_the_checkpoint_and_reports_its_time(tell, how):
    async def story(desk: ReconnectingRecorder) -> None:
        hook = Checkpoint(timeout_ms=3_600_000, **how)
        script = """
            trap 'touch "$HODEI_CHECKPOINT_FILE"' USR1; trap 'echo told to go; exit 9' TERM
            echo ready; while :; do sleep 0.02; done
        """
        await desk.backend.start([an_order(1, *sh(script), checkpoint=hook)])
        await desk.log_has("1.0.1", b"ready")
        stop = Stop("1.0.1", desk.backend.name, 600_000, StopReason("preempted", "by 7"), hook)
        await desk.backend.stop([stop])
        await desk.backend.stop([stop])
        end = await desk.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 9, "preempted by 7")
        assert b"told to go" in await desk.log("1.0.1")
        assert desk.observed[0].at_ms <= end.checkpoint_ms <= end.at_ms

    tell(story)


def test_a_checkpoint_without_a_stop_is_reported(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        hook = Checkpoint(signal="USR1", timeout_ms=3_600_000)
        script = "trap 'touch \"$HODEI_CHECKPOINT_FILE\"' USR1; echo ready; while :; do sleep 0.02; done"
        await desk.backend.start([an_order(1, *sh(script), checkpoint=hook)])
        await desk.log_has("1.0.1", b"ready")
        order = TakeCheckpoint("1.0.1", desk.backend.name, hook)
        await desk.backend.checkpoint([order, order])
        async with asyncio.timeout(30):
            while not any(seen.checkpoint_ms for seen in desk.observed):
                await desk.poll()
        assert {seen.state for seen in desk.observed} == {"running"}

    tell(story)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(HealthCheck(command=("/bin/false",), every_ms=100, failures=2), id="a command"),
        pytest.param(HealthCheck(file="/tmp/heartbeat", every_ms=100, failures=2), id="a heartbeat"),
        pytest.param(HealthCheck(http="http://127.0.0.1:9/", every_ms=100, failures=2), id="an address"),
    ],
)
def test_an_unhealthy_run_is_stopped(tell, check):
    async def story(desk: ReconnectingRecorder) -> None:
        (end,) = await desk.run(an_order(1, "/bin/sleep", "300", health=check))
        assert (end.state, end.reason_code) == ("failed", "unhealthy")

    tell(story)


def test_a_timeout_stops_the_run_also_after_a_restart(tell, tmp_path, dockerd):
    async def story(desk: ReconnectingRecorder) -> None:
        (end,) = await desk.run(an_order(1, "/bin/sleep", "300", timeout_ms=500))
        assert (end.state, end.reason_code) == ("failed", "timeout")

    tell(story)

    async def second() -> None:
        name = unique_installation()
        first = a_docker(tmp_path / "again", dockerd(), installation=name)
        await first.open()
        desk = ReconnectingRecorder(first, 60)
        await first.start([an_order(2, "/bin/sleep", "300", timeout_ms=3000)])
        await desk.running("2.0.1")
        await first.close()
        after = a_docker(tmp_path / "again", dockerd(), installation=name)
        await after.open()
        desk = ReconnectingRecorder(after, 60)
        end = await desk.end_of("2.0.1")
        assert (end.state, end.reason_code) == ("failed", "timeout")
        await after.close()
        dockerd().clear()

    asyncio.run(second())


def test_the_log_survives_the_container(tell, dockerd):
    async def story(desk: ReconnectingRecorder) -> None:
        await desk.run(an_order(1, *sh("echo out; echo error >&2")))
        await desk.backend.forget([Forget("1.0.1", "docker")])
        assert await desk.log("1.0.1") == b"out\n"
        await until(lambda: dockerd().containers() == [])
        assert await desk.log("1.0.1") == b"out\n"
        assert await desk.log("1.0.1", "stderr") == b"error\n"

    tell(story)


def test_a_growing_log_is_read_in_chunks(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        script = sh("n=0; while [ $n -lt 3000 ]; do n=$((n+1)); echo line $n; echo other $n >&2; done; sleep 300")
        await desk.backend.start([an_order(1, *script)])
        out, offset = b"", 0
        async with asyncio.timeout(60):
            while b"line 3000\n" not in out:
                data, offset = await desk.backend.logs("1.0.1", "stdout", offset, 1000)
                out += data
                await asyncio.sleep(0 if data else 0.05)
        assert out == b"".join(b"line %d\n" % n for n in range(1, 3001))
        assert await desk.backend.logs("1.0.1", "stdout", 5, 6) == (b"1\nline", 11)
        await desk.stop("1.0.1", grace_ms=0)

    tell(story)


def test_usage_is_measured(tell):
    async def story(desk: ReconnectingRecorder) -> None:
        await desk.backend.start([an_order(1, *sh("while :; do :; done"), limits={"cpu": 300})])
        await desk.running("1.0.1")
        used = (await desk.backend.usage())["h1"].used
        assert 0 < used["cpu"] < 2000
        assert used["memory"] > 0

    tell(story)


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        pytest.param({"privileged": "true"}, "privileged", id="privileged"),
        pytest.param({"host-namespaces": "pid"}, "pid namespace", id="the host's processes"),
        pytest.param({"network": "host"}, "host's network", id="the host's network"),
        pytest.param({"network": "container:abc"}, "network", id="another container's network"),
        pytest.param({"devices": "/dev/kmsg"}, "/dev/kmsg", id="a device"),
        pytest.param({"mounts": "/etc:/etc"}, "/etc", id="a directory"),
        pytest.param({"mounts": "/var/run/docker.sock:/d.sock"}, "docker.sock", id="the daemon's own socket"),
        pytest.param({"user": "root"}, "root", id="a user"),
    ],
)
def test_a_forbidden_option_is_refused_before_a_container_is_created(tell, dockerd, annotations, words):
    async def story(desk: ReconnectingRecorder) -> None:
        asked = {f"docker.hodei.io/{key}": value for key, value in annotations.items()}
        answer = await desk.backend.start([an_order(1, annotations=asked)])
        assert words in answer["1.0.1"].message
        assert not isinstance(answer["1.0.1"], BackendError)
        assert "not allowed" in answer["1.0.1"].message
        assert await asyncio.to_thread(dockerd().containers) == []

    tell(story)
