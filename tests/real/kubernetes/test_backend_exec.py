"""Commands in a running pod, checkpoints, health checks and measured usage. The API server is real; kwok simulates the pods, and
the commands are real processes of this machine (`fake_kubelet` describes the limits of that). kwok runs no probes: the tests write
their results into the status of the pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hodei.backends.kubernetes import backend, supervision
from hodei.backends.kubernetes.manifest import pod_name
from hodei.model.effects import Stop, TakeCheckpoint
from hodei.model.errors import BackendRefused, NotFound, Unsupported
from hodei.model.job import RUN_ENDED, Checkpoint, HealthCheck
from hodei.model.outcome import StopReason
from real.kubernetes.api import ApiFailed
from real.kubernetes.cluster import Cluster
from real.kubernetes.fake_kubelet import FakeKubelet
from real.kubernetes.plane import Plane
from real.kubernetes.test_backend import KubernetesRecorder, bind_shipped_roles
from real.kubernetes.test_backend import with_backend as with_backend

pytestmark = pytest.mark.real
RUN = "1.0.1"
# The first process of a job, which writes a checkpoint on SIGUSR1.
CHECKPOINTER = """
import pathlib, signal, sys
def save(*_): pathlib.Path(sys.argv[1]).write_text("saved")
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
while True: signal.pause()
"""


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(backend, "SUPERVISE_EVERY_S", 0.1)
    monkeypatch.setattr(supervision, "FILE_POLL_MS", 300)


@pytest.fixture
def kubelet(plane: Plane, cluster: Cluster, with_backend: Callable[..., None]) -> Iterator[FakeKubelet]:
    made = FakeKubelet(plane)
    made.serve(cluster, f"{cluster.namespace}-0")
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def checkpointer(file: Path) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", CHECKPOINTER, str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


async def running(recorder: KubernetesRecorder, **fields: Any) -> str:
    """Start run 1.0.1 and wait until it runs; returns the name of its pod."""
    await recorder.backend.start([recorder.order(1, **fields)])
    await recorder.running(RUN)
    return pod_name(recorder.installation, RUN)


async def until_observed(recorder: KubernetesRecorder, condition: Callable[[Any], object]) -> Any:
    """The first observation that meets the condition."""
    async with asyncio.timeout(30):
        while not (found := [seen for seen in recorder.observed if condition(seen)]):
            await recorder.poll()
    return found[0]


def test_a_command_runs_in_the_container_with_arguments_output_and_exit_code(with_backend, kubelet):
    hostile = ["a b", "$(id)", "`id`", "${HOME}", "a\nb", "%s&x=1", "é", "+", ""]

    async def scenario(recorder: KubernetesRecorder) -> None:
        name = await running(recorder)
        done = await recorder.backend.execute(RUN, ["printf", "%s|", *hostile], 10_000)
        assert (done.exit_code, done.stdout.decode().split("|")[:-1], done.stderr) == (0, hostile, b"")
        assert kubelet.commands(name) == [["printf", "%s|", *hostile]]
        done = await recorder.backend.execute(RUN, ["sh", "-c", "echo out; echo err >&2; exit 7"], 10_000)
        assert (done.exit_code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
        done = await recorder.backend.execute(RUN, ["sh", "-c", "kill -9 $$"], 10_000)
        assert done.exit_code == 137
        done = await recorder.backend.execute(RUN, ["no-such-program"], 10_000)
        assert (done.exit_code, b"not found" in done.stderr) == (127, True)

    with_backend(scenario)


def test_long_output_is_cut_and_a_command_that_exceeds_its_timeout_is_not_waited_for(with_backend, kubelet):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await running(recorder)
        done = await recorder.backend.execute(RUN, ["head", "-c", "3000000", "/dev/zero"], 20_000)
        assert (done.exit_code, len(done.stdout), done.cut) == (0, 1 << 20, True)
        done = await recorder.backend.execute(RUN, ["sh", "-c", "echo early; exec sleep 3"], 500)
        assert (done.exit_code, done.stdout) == (None, b"early\n")

    with_backend(scenario)


def test_commands_are_refused_unless_the_run_is_running(with_backend, kubelet, cluster):
    async def scenario(recorder: KubernetesRecorder) -> None:
        for run in (RUN, "99.0.1"):
            with pytest.raises(NotFound):
                await recorder.backend.execute(run, ["true"], 1000)
        await recorder.run(recorder.order(1, runs_for="1ms"))
        with pytest.raises(NotFound):
            await recorder.backend.execute(RUN, ["true"], 1000)
        assert kubelet.executed == []

    with_backend(scenario)


def test_the_shipped_permissions_suffice_for_commands_and_a_missing_one_is_reported(
    with_backend, kubelet, cluster, plane: Plane
):
    bind_shipped_roles(cluster, "unprivileged")

    async def scenario(recorder: KubernetesRecorder) -> None:
        await running(recorder)
        assert (await recorder.backend.execute(RUN, ["true"], 10_000)).exit_code == 0
        role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}/rolebindings/hodei-backend-exec"
        cluster.delete(role)

        async def execute_until_refused() -> None:
            async with asyncio.timeout(30):
                while True:  # the API server applies the change a moment later
                    await recorder.backend.execute(RUN, ["true"], 10_000)

        with pytest.raises(BackendRefused, match="pods/exec"):
            await execute_until_refused()

    with_backend(scenario, kubeconfig=str(plane.kubeconfig("unprivileged")))


def test_a_checkpoint_is_taken_by_a_command_and_a_failure_is_reported(with_backend, kubelet, tmp_path):
    async def scenario(recorder: KubernetesRecorder) -> None:
        saved = tmp_path / "work"
        name = await running(recorder, checkpoint=Checkpoint(command=("touch", str(saved))))
        before_ms = int(time.time() * 1000)
        await recorder.backend.checkpoint([TakeCheckpoint(RUN, "prod", Checkpoint(command=("touch", str(saved))))])
        observation = await until_observed(recorder, lambda seen: seen.checkpoint_ms)
        assert saved.exists()
        assert observation.checkpoint_ms >= before_ms
        assert ["touch", str(saved)] in kubelet.commands(name)
        await recorder.backend.checkpoint([TakeCheckpoint(RUN, "prod", Checkpoint(command=("false",)))])
        observation = await until_observed(recorder, lambda seen: seen.checkpoint_error)
        assert (observation.checkpoint_error, observation.state) == (
            "its checkpoint command failed: exit code 1",
            "running",
        )

    with_backend(scenario)


def test_a_checkpoint_is_taken_by_a_signal_and_detected_by_its_file(with_backend, kubelet, tmp_path):
    file = tmp_path / "checkpoint"

    async def scenario(recorder: KubernetesRecorder) -> None:
        hook = Checkpoint(signal="USR1", file=str(file), timeout_ms=20_000)
        name = await running(recorder, checkpoint=hook)
        env = {one["name"]: one["value"] for one in recorder.pod(RUN)["spec"]["containers"][0]["env"]}
        assert env["HODEI_CHECKPOINT_FILE"] == str(file)
        with checkpointer(file) as pid:
            kubelet.main[name] = pid
            await recorder.backend.checkpoint([TakeCheckpoint(RUN, "prod", hook)])
            await until_observed(recorder, lambda seen: seen.checkpoint_ms)
        assert file.read_text() == "saved"

    with_backend(scenario)


def test_a_checkpoint_that_the_job_takes_by_itself_is_reported(with_backend, kubelet, tmp_path):
    file = tmp_path / "checkpoint"

    async def scenario(recorder: KubernetesRecorder) -> None:
        await running(recorder, checkpoint=Checkpoint(file=str(file)))
        file.write_text("x")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        assert (await until_observed(recorder, lambda seen: seen.checkpoint_ms)).checkpoint_ms == 1_700_000_000_000
        assert (await recorder.backend.known())[RUN].checkpoint_ms == 1_700_000_000_000

    with_backend(scenario)


def test_a_stop_waits_for_the_checkpoint(with_backend, kubelet, tmp_path):
    file = tmp_path / "checkpoint"

    async def scenario(recorder: KubernetesRecorder) -> None:
        hook = Checkpoint(signal="USR1", file=str(file), timeout_ms=20_000)
        name = await running(recorder, checkpoint=hook)
        with checkpointer(file) as pid:
            kubelet.main[name] = pid
            order = Stop(RUN, "prod", 5000, StopReason("preempted", "by 7"), hook)
            await recorder.backend.stop([order])
            await recorder.backend.stop([order])
            end = await recorder.end_of(RUN)
        assert file.read_text() == "saved"
        assert (end.state, end.reason) == ("stopped", "preempted by 7")
        assert end.checkpoint_ms
        assert len([command for command in kubelet.commands(name) if "USR1" in command]) == 1

    with_backend(scenario)


def test_a_stop_continues_after_a_failed_checkpoint_and_reports_it(with_backend, kubelet):
    async def scenario(recorder: KubernetesRecorder) -> None:
        hook = Checkpoint(command=("sh", "-c", "exit 3"))
        await running(recorder, checkpoint=hook)
        await recorder.backend.stop([Stop(RUN, "prod", 5000, StopReason("preempted", "by 7"), hook)])
        end = await recorder.end_of(RUN)
        assert (end.state, end.reason) == (
            "stopped", "preempted by 7; its checkpoint command failed: exit code 3",
        )  # fmt: skip
        assert not end.checkpoint_ms

    with_backend(scenario)


def test_a_second_stop_without_a_hook_does_not_wait_for_the_first(with_backend, kubelet):
    async def scenario(recorder: KubernetesRecorder) -> None:
        hook = Checkpoint(command=("sleep", "20"), timeout_ms=600_000)
        name = await running(recorder, checkpoint=hook)
        await recorder.backend.stop([Stop(RUN, "prod", 60_000, StopReason("drained"), hook)])
        await recorder.until(lambda: kubelet.commands(name), "the checkpoint command has started")
        assert RUN not in [seen.run for seen in recorder.observed if seen.state in RUN_ENDED]
        await recorder.stop(RUN, grace_ms=1000, reason=StopReason("cancelled"))
        end = await recorder.end_of(RUN)
        assert (end.state, end.reason) == ("stopped", "drained; its checkpoint was cut short")

    with_backend(scenario)


def test_a_stop_interrupted_by_a_crash_is_repeated_after_the_restart(with_backend, kubelet, tmp_path):
    async def scenario(recorder: KubernetesRecorder) -> None:
        hook = Checkpoint(
            command=("sh", "-c", f"echo x >>{tmp_path}/saves; [ $(wc -l <{tmp_path}/saves) = 2 ] || sleep 15")
        )
        name = await running(recorder, checkpoint=hook)
        order = Stop(RUN, "prod", 1000, StopReason("drained"), hook)
        await recorder.backend.stop([order])
        await recorder.until(
            lambda: (tmp_path / "saves").exists() and kubelet.commands(name), "the checkpoint command has started"
        )
        await recorder.restart()
        assert (await recorder.backend.known())[RUN].state == "running"
        await recorder.backend.stop([order])
        end = await recorder.end_of(RUN)
        assert (end.state, end.reason, bool(end.checkpoint_ms)) == ("stopped", "drained", True)

    with_backend(scenario)


def set_ready(cluster: Cluster, pod: str, ready: bool) -> None:
    """Set the status that a kubelet writes after its probe has succeeded, or failed often enough."""
    path = f"{cluster.pods_path}/{pod}"
    (status,) = cluster.get(path)["status"]["containerStatuses"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    conditions = [{"type": "ContainersReady", "status": str(ready), "lastTransitionTime": now}]
    cluster.patch(
        f"{path}/status",
        {"status": {"containerStatuses": [{**status, "ready": ready}], "conditions": conditions}},
        "strategic",
    )


def test_a_run_whose_probe_fails_too_often_is_stopped_as_unhealthy(with_backend, kubelet, cluster):
    check = HealthCheck(command=("test", "-e", "$(HOME)"), every_ms=1000, timeout_ms=1000, failures=2)

    async def scenario(recorder: KubernetesRecorder) -> None:
        name = await running(recorder, health=check)
        assert recorder.pod(RUN)["spec"]["containers"][0]["readinessProbe"] == {
            "exec": {"command": ["test", "-e", "$$(HOME)"]}, "initialDelaySeconds": 1, "periodSeconds": 1,
            "timeoutSeconds": 1, "failureThreshold": 2, "successThreshold": 1,
        }  # fmt: skip
        await until_observed(recorder, lambda seen: seen.health == "ok")
        await asyncio.to_thread(set_ready, cluster, name, False)
        end = await recorder.end_of(RUN)
        assert [seen.health for seen in recorder.observed if seen.health][-1] == "failing"
        assert (end.state, end.reason_code) == ("failed", "unhealthy")
        assert end.reason == "its health check failed 2 times in a row"

    with_backend(scenario)


def test_a_run_that_recovers_in_time_continues(with_backend, kubelet, cluster):
    check = HealthCheck(http="http://localhost:8080/live?x=1", every_ms=60_000, timeout_ms=1000, failures=3)

    async def scenario(recorder: KubernetesRecorder) -> None:
        name = await running(recorder, health=check)
        probe = recorder.pod(RUN)["spec"]["containers"][0]["readinessProbe"]
        assert probe["httpGet"] == {"path": "/live?x=1", "port": 8080, "scheme": "HTTP"}
        await asyncio.to_thread(set_ready, cluster, name, False)
        await recorder.until(lambda: not recorder.pod(RUN)["status"]["containerStatuses"][0]["ready"], "not ready")
        await asyncio.to_thread(set_ready, cluster, name, True)
        await until_observed(recorder, lambda seen: seen.health == "ok")
        assert (await recorder.backend.known())[RUN].state == "running"

    with_backend(scenario)


def test_a_stale_heartbeat_file_stops_the_run(with_backend, kubelet, tmp_path):
    file = tmp_path / "beat"
    check = HealthCheck(file=str(file), every_ms=300, timeout_ms=5000, failures=2)

    async def scenario(recorder: KubernetesRecorder) -> None:
        stopped = asyncio.Event()

        async def beat() -> None:
            while not stopped.is_set():
                file.write_text(str(time.monotonic_ns()))
                await asyncio.sleep(0.02)

        heartbeat = asyncio.create_task(beat())
        await running(recorder, health=check)
        await until_observed(recorder, lambda seen: seen.health == "ok")
        stopped.set()
        await heartbeat
        end = await recorder.end_of(RUN)
        assert (end.state, end.reason_code) == ("failed", "unhealthy")
        assert "has not changed for 0.3s" in end.reason

    with_backend(scenario)


def test_a_cluster_without_metrics_is_reported(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        with pytest.raises(Unsupported, match="does not measure") as refusal:
            await recorder.backend.usage()
        assert "metrics-server" in refusal.value.hint

    with_backend(scenario)


METRICS = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "nodes.metrics.k8s.io", "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
    "spec": {
        "group": "metrics.k8s.io", "scope": "Cluster",
        "names": {"plural": "nodes", "singular": "node", "kind": "NodeMetrics", "listKind": "NodeMetricsList"},
        "versions": [{
            "name": "v1beta1", "served": True, "storage": True,
            "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        }],
    },
}  # fmt: skip


def test_usage_is_that_of_the_metrics_api(with_backend, cluster, plane: Plane):
    """The test stores the objects of a metrics-server in the API server, so no measurement is tested."""
    bind_shipped_roles(cluster, "unprivileged")
    cluster.apply([METRICS])
    try:
        name = f"{cluster.namespace}-0"
        path = "/apis/metrics.k8s.io/v1beta1/nodes"

        def served() -> bool:
            try:
                return bool(cluster.get(path))
            except ApiFailed:  # not served yet
                return False

        cluster.wait(served, "the metrics API is served")
        measured = {"cpu": "1234567890n", "memory": "2Gi", "example.com/other": "3"}
        cluster.apply([
            {"apiVersion": "metrics.k8s.io/v1beta1", "kind": "NodeMetrics", "metadata": {"name": one}, "usage": measured}
            for one in (name, f"{name}-not-ours")
        ])  # fmt: skip

        async def scenario(recorder: KubernetesRecorder) -> None:
            used = await recorder.backend.usage()
            assert {node: dict(one.used) for node, one in used.items()} == {
                f"lab-{name}": {"cpu": 1235, "memory": 2 << 30}
            }

        with_backend(scenario, kubeconfig=str(plane.kubeconfig("unprivileged")), node_prefix="lab-")
    finally:
        cluster.delete("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodes.metrics.k8s.io")
