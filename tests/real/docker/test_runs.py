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
async def open_backend(home: Path, dockerd: DockerDaemons, **fields: Any) -> AsyncIterator[ReconnectingRecorder]:
    daemon = dockerd()
    backend = a_docker(home, daemon, **fields)
    await backend.open()
    try:
        yield ReconnectingRecorder(backend, 25)
    finally:
        await backend.close()
        daemon.clear()


@pytest.fixture
def run_scenario(dockerd: DockerDaemons, tmp_path: Path) -> Callable[..., None]:
    def run_with_backend(scenario: Callable[[ReconnectingRecorder], Awaitable[None]], **fields: Any) -> None:
        async def run() -> None:
            async with open_backend(tmp_path / "home", dockerd, **fields) as recorder:
                await scenario(recorder)

        asyncio.run(run())

    return run_with_backend


def test_a_run_over_its_memory_limit_fails_with_oom_and_not_killed(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        use_memory = sh("x=a; while :; do x=$x$x; done")
        oom, killed = await recorder.run(
            an_order(1, *use_memory, limits={"memory": 16 * MI}),
            an_order(2, *sh("kill -KILL $$"), limits={"memory": 64 * MI}),
        )
        assert (oom.state, oom.reason_code) == ("failed", "oom")
        assert str(16 * MI) in oom.reason
        assert (killed.state, killed.exit_code, killed.reason_code) == ("failed", 137, "killed")

    run_scenario(scenario)


def test_limits_hold_inside_the_container(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        read_limits = sh("cd /sys/fs/cgroup; cat memory/memory.limit_in_bytes memory/memory.memsw.limit_in_bytes "
                  "cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us pids/pids.max cpuset/cpuset.cpus 2>/dev/null || "
                  "cat memory.max memory.swap.max cpu.max pids.max cpuset.cpus")  # fmt: skip
        order = an_order(1, *read_limits, limits={"cpu": 500, "memory": 32 * MI})
        await recorder.run(structs.replace(order, run=structs.replace(order.run, grant=Grant(cpus=(0,)))))
        output = (await recorder.log("1.0.1")).split()
        version_1 = [b"33554432", b"33554432", b"50000", b"100000", b"77", b"0"]
        version_2 = [b"33554432", b"0", b"50000", b"100000", b"77", b"0"]
        assert output in (version_1, version_2)

    run_scenario(scenario, pids_limit=77)


def test_cpu_shares_and_oom_score_follow_the_quality_of_service(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        read_limits = sh(
            "cat /proc/self/oom_score_adj; cd /sys/fs/cgroup; cat cpu/cpu.shares 2>/dev/null || cat cpu.weight"
        )
        full = {"cpu": 1000, "memory": 64 * MI}
        ends = await recorder.run(
            an_order(1, *read_limits, cpu=1, memory=64 * MI, limits=full),
            an_order(2, *read_limits, cpu=2, memory=64 * MI),
            an_order(3, *read_limits, cpu=0, memory=0),
        )
        assert [end.state for end in ends] == ["succeeded"] * 3, ends[0].reason
        output = [[int(number) for number in (await recorder.log(f"{job}.0.1")).split()] for job in (1, 2, 3)]
        # A daemon without CAP_SYS_RESOURCE cannot lower the score.
        assert output[0][0] in (-997, 0)
        assert output[2][0] == 1000
        assert 900 < output[1][0] < 1000
        weights = [weight for _, weight in output]
        assert weights[2] < weights[0] < weights[1]

    run_scenario(scenario)


def test_a_run_cannot_exceed_its_process_limit(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        bomb = sh("n=0; while [ $n -lt 50 ]; do sleep 30 & n=$((n+1)); done; echo all started")
        (end,) = await recorder.run(an_order(1, *bomb))
        assert end.state == "failed"
        assert b"all started" not in await recorder.log("1.0.1")

    run_scenario(scenario, pids_limit=20)


def test_a_host_never_exceeds_max_containers(run_scenario, dockerd):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        orders = [an_order(job, "/bin/sleep", "0.5") for job in range(1, 6)]
        assert await recorder.backend.start(orders) == {}
        max_running = 0
        while not all(
            any(observed.run == order.run.id and observed.state == "succeeded" for observed in recorder.observed)
            for order in orders
        ):
            containers = await asyncio.to_thread(dockerd().request, "GET", "/containers/json")
            max_running = max(max_running, len(containers))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await recorder.poll()
        assert 1 <= max_running <= 2
        (node,) = await recorder.backend.nodes()
        assert node.capacity["containers"] == 2

    run_scenario(scenario, hosts={"h1": {"max_containers": 2}})


def test_a_run_that_waits_for_a_slot_can_be_stopped(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        assert await recorder.backend.start([an_order(1, "/bin/sleep", "60"), an_order(2)]) == {}
        await recorder.running("1.0.1")
        await recorder.stop("2.0.1", reason=StopReason("cancelled", "by ann"))
        end = await recorder.end_of("2.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", None, "cancelled by ann")

    run_scenario(scenario, hosts={"h1": {"max_containers": 1}})


def test_a_missing_or_unrunnable_command_has_the_exit_code_of_a_shell(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        ends = await recorder.run(an_order(1, "no-such-command-anywhere"), an_order(2, "/etc/passwd"))
        assert [(end.state, end.exit_code) for end in ends] == [("failed", 127), ("failed", 126)]

    run_scenario(scenario)


def test_without_init_the_exit_codes_are_the_same(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        ends = await recorder.run(an_order(1, "no-such-command-anywhere"), an_order(2, "/etc/passwd"))
        assert [(end.state, end.exit_code) for end in ends] == [("failed", 127), ("failed", 126)]
        assert "no-such-command-anywhere" in ends[0].reason
        await recorder.backend.forget([Forget(end.run, "docker") for end in ends])

    run_scenario(scenario, init=False)


def test_a_missing_image_that_may_not_be_pulled_is_reported(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        never = {"docker.hodei.io/pull": "never"}
        assert await recorder.backend.start([an_order(1, image="not-here:never", annotations=never)]) == {}
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.reason_code, end.permanent) == ("failed", "start_failed", False)
        assert "not-here:never" in end.reason
        assert "never" in end.reason

    run_scenario(scenario)


def test_labels_identify_the_run(run_scenario, dockerd):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        await recorder.run(an_order(1, labels={"team": "ml", "hodei.io/run": "77.0.1"}, project="vision"))
        (container,) = await asyncio.to_thread(dockerd().containers)
        labels = container["Labels"]
        assert (labels["hodei.io/run"], labels["hodei.io/job"], labels["hodei.io/project"]) == ("1.0.1", "1", "vision")
        assert (labels["job.hodei.io/team"], labels["job.hodei.io/hodei.io/run"]) == ("ml", "77.0.1")
        assert labels["hodei.io/installation"] in container["Names"][0]

    run_scenario(scenario)


def test_the_configured_user_runs_the_command(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        other_user = {"docker.hodei.io/user": "65534:65534"}
        await recorder.run(an_order(1, "/bin/id", "-u"), an_order(2, "/bin/id", "-u", annotations=other_user))
        assert (await recorder.log("1.0.1"), await recorder.log("2.0.1")) == (b"1000\n", b"65534\n")

    run_scenario(scenario, user="1000:1000", allow=Allow(users=("65534:65534",)))


def test_an_allowed_directory_is_mounted_and_writable_only_if_allowed(run_scenario, tmp_path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "in").write_text("hello")
    data.chmod(0o777)

    async def scenario(recorder: ReconnectingRecorder) -> None:
        read = {"docker.hodei.io/mounts": f"{data}:/data"}
        write = {"docker.hodei.io/mounts": f"{data}:/data:rw"}
        script = sh("cat /data/in; echo written > /data/$HODEI_JOB_ID")
        refused, allowed = await recorder.run(
            an_order(1, *script, annotations=read), an_order(2, *script, annotations=write)
        )
        assert (refused.state, allowed.state) == ("failed", "succeeded")
        assert await recorder.log("1.0.1") == b"hello"
        assert not (data / "1").exists()
        assert (data / "2").read_text() == "written\n"

    run_scenario(scenario, allow=Allow(mounts=(f"{data}:rw",)))


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param({"signal": "USR1"}, id="by a signal"),
        pytest.param({"command": sh('echo saved; touch "$HODEI_CHECKPOINT_FILE"')}, id="by a command"),
    ],
)
def test_a_stop_waits_for_the_checkpoint_and_reports_its_time(run_scenario, checkpoint):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        hook = Checkpoint(timeout_ms=3_600_000, **checkpoint)
        script = """
            trap 'touch "$HODEI_CHECKPOINT_FILE"' USR1; trap 'echo terminated; exit 9' TERM
            echo ready; while :; do sleep 0.02; done
        """
        await recorder.backend.start([an_order(1, *sh(script), checkpoint=hook)])
        await recorder.log_has("1.0.1", b"ready")
        stop = Stop("1.0.1", recorder.backend.name, 600_000, StopReason("preempted", "by 7"), hook)
        await recorder.backend.stop([stop])
        await recorder.backend.stop([stop])
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 9, "preempted by 7")
        assert b"terminated" in await recorder.log("1.0.1")
        assert recorder.observed[0].at_ms <= end.checkpoint_ms <= end.at_ms

    run_scenario(scenario)


def test_a_checkpoint_without_a_stop_is_reported(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        hook = Checkpoint(signal="USR1", timeout_ms=3_600_000)
        script = "trap 'touch \"$HODEI_CHECKPOINT_FILE\"' USR1; echo ready; while :; do sleep 0.02; done"
        await recorder.backend.start([an_order(1, *sh(script), checkpoint=hook)])
        await recorder.log_has("1.0.1", b"ready")
        order = TakeCheckpoint("1.0.1", recorder.backend.name, hook)
        await recorder.backend.checkpoint([order, order])
        async with asyncio.timeout(30):
            while not any(observed.checkpoint_ms for observed in recorder.observed):
                await recorder.poll()
        assert {observed.state for observed in recorder.observed} == {"running"}

    run_scenario(scenario)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(HealthCheck(command=("/bin/false",), every_ms=100, failures=2), id="a command"),
        pytest.param(HealthCheck(file="/tmp/heartbeat", every_ms=100, failures=2), id="a heartbeat"),
        pytest.param(HealthCheck(http="http://127.0.0.1:9/", every_ms=100, failures=2), id="an address"),
    ],
)
def test_an_unhealthy_run_is_stopped(run_scenario, check):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        (end,) = await recorder.run(an_order(1, "/bin/sleep", "300", health=check))
        assert (end.state, end.reason_code) == ("failed", "unhealthy")

    run_scenario(scenario)


def test_a_timeout_stops_the_run_even_after_a_restart(run_scenario, tmp_path, dockerd):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        (end,) = await recorder.run(an_order(1, "/bin/sleep", "300", timeout_ms=500))
        assert (end.state, end.reason_code) == ("failed", "timeout")

    run_scenario(scenario)

    async def restart() -> None:
        name = unique_installation()
        before = a_docker(tmp_path / "restart", dockerd(), installation=name)
        await before.open()
        recorder = ReconnectingRecorder(before, 60)
        await before.start([an_order(2, "/bin/sleep", "300", timeout_ms=3000)])
        await recorder.running("2.0.1")
        await before.close()
        restarted = a_docker(tmp_path / "restart", dockerd(), installation=name)
        await restarted.open()
        recorder = ReconnectingRecorder(restarted, 60)
        end = await recorder.end_of("2.0.1")
        assert (end.state, end.reason_code) == ("failed", "timeout")
        await restarted.close()
        dockerd().clear()

    asyncio.run(restart())


def test_the_log_survives_the_container(run_scenario, dockerd):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        await recorder.run(an_order(1, *sh("echo out; echo error >&2")))
        await recorder.backend.forget([Forget("1.0.1", "docker")])
        assert await recorder.log("1.0.1") == b"out\n"
        await until(lambda: dockerd().containers() == [])
        assert await recorder.log("1.0.1") == b"out\n"
        assert await recorder.log("1.0.1", "stderr") == b"error\n"

    run_scenario(scenario)


def test_a_growing_log_is_read_in_chunks(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        script = sh("n=0; while [ $n -lt 3000 ]; do n=$((n+1)); echo line $n; echo other $n >&2; done; sleep 300")
        await recorder.backend.start([an_order(1, *script)])
        out, offset = b"", 0
        async with asyncio.timeout(60):
            while b"line 3000\n" not in out:
                data, offset = await recorder.backend.logs("1.0.1", "stdout", offset, 1000)
                out += data
                await asyncio.sleep(0 if data else 0.05)
        assert out == b"".join(b"line %d\n" % n for n in range(1, 3001))
        assert await recorder.backend.logs("1.0.1", "stdout", 5, 6) == (b"1\nline", 11)
        await recorder.stop("1.0.1", grace_ms=0)

    run_scenario(scenario)


def test_usage_is_measured(run_scenario):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        await recorder.backend.start([an_order(1, *sh("while :; do :; done"), limits={"cpu": 300})])
        await recorder.running("1.0.1")
        used = (await recorder.backend.usage())["h1"].used
        assert 0 < used["cpu"] < 2000
        assert used["memory"] > 0

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("annotations", "message"),
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
def test_a_forbidden_option_is_refused_before_a_container_is_created(run_scenario, dockerd, annotations, message):
    async def scenario(recorder: ReconnectingRecorder) -> None:
        options = {f"docker.hodei.io/{key}": value for key, value in annotations.items()}
        answer = await recorder.backend.start([an_order(1, annotations=options)])
        assert message in answer["1.0.1"].message
        assert not isinstance(answer["1.0.1"], BackendError)
        assert "not allowed" in answer["1.0.1"].message
        assert await asyncio.to_thread(dockerd().containers) == []

    run_scenario(scenario)
