"""Commands in a running pod, checkpoints, health checks and measured usage. The API server is real; kwok simulates the pods, and
the commands are real processes of this machine (`log_kubelet` says what that does not prove). kwok runs no probes: the tests
write the kubelet's result into the pod's status.
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
from real.kubernetes.log_kubelet import LogKubelet
from real.kubernetes.plane import Plane
from real.kubernetes.test_backend import Bench, bind_shipped_rights
from real.kubernetes.test_backend import tell as tell  # the fixture

pytestmark = pytest.mark.real
RUN = "1.0.1"
# A stand-in for a job's first process: saves its work when it is told to.
SAVER = """
import pathlib, signal, sys
def save(*_): pathlib.Path(sys.argv[1]).write_text("saved")
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
while True: signal.pause()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(backend, "SUPERVISE_EVERY_S", 0.1)
    monkeypatch.setattr(supervision, "FILE_POLL_MS", 300)


@pytest.fixture
def kubelet(plane: Plane, cluster: Cluster, tell: Callable[..., None]) -> Iterator[LogKubelet]:
    made = LogKubelet(plane)
    made.serve(cluster, f"{cluster.namespace}-0")
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def a_saver(file: Path) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", SAVER, str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


async def running(bench: Bench, **fields: Any) -> str:
    """Its pod's name."""
    await bench.backend.start([bench.order(1, **fields)])
    await bench.running(RUN)
    return pod_name(bench.installation, RUN)


async def heard(bench: Bench, true: Callable[[Any], object]) -> Any:
    async with asyncio.timeout(30):
        while not (found := [seen for seen in bench.observed if true(seen)]):
            await bench.poll()
    return found[0]


def test_a_command_runs_in_the_container_with_arguments_output_and_exit_code(tell, kubelet):
    hostile = ["a b", "$(id)", "`id`", "${HOME}", "a\nb", "%s&x=1", "é", "+", ""]

    async def story(bench: Bench) -> None:
        name = await running(bench)
        done = await bench.backend.execute(RUN, ["printf", "%s|", *hostile], 10_000)
        assert (done.exit_code, done.stdout.decode().split("|")[:-1], done.stderr) == (0, hostile, b"")
        assert kubelet.commands(name) == [["printf", "%s|", *hostile]]
        done = await bench.backend.execute(RUN, ["sh", "-c", "echo out; echo err >&2; exit 7"], 10_000)
        assert (done.exit_code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
        done = await bench.backend.execute(RUN, ["sh", "-c", "kill -9 $$"], 10_000)
        assert done.exit_code == 137
        done = await bench.backend.execute(RUN, ["no-such-program"], 10_000)
        assert (done.exit_code, b"not found" in done.stderr) == (127, True)

    tell(story)


def test_more_output_than_is_kept_is_cut_and_a_command_that_takes_too_long_is_not_waited_for(tell, kubelet):
    async def story(bench: Bench) -> None:
        await running(bench)
        done = await bench.backend.execute(RUN, ["head", "-c", "3000000", "/dev/zero"], 20_000)
        assert (done.exit_code, len(done.stdout), done.cut) == (0, 1 << 20, True)
        done = await bench.backend.execute(RUN, ["sh", "-c", "echo early; exec sleep 3"], 500)
        assert (done.exit_code, done.stdout) == (None, b"early\n")

    tell(story)


def test_a_run_that_does_not_run_has_no_commands(tell, kubelet, cluster):
    async def story(bench: Bench) -> None:
        for run in (RUN, "99.0.1"):
            with pytest.raises(NotFound):
                await bench.backend.execute(run, ["true"], 1000)
        await bench.run(bench.order(1, runs_for="1ms"))
        with pytest.raises(NotFound):
            await bench.backend.execute(RUN, ["true"], 1000)
        assert kubelet.executed == []

    tell(story)


def test_the_shipped_rights_suffice_for_commands_and_a_missing_one_is_named(tell, kubelet, cluster, plane: Plane):
    bind_shipped_rights(cluster, "nobody")

    async def story(bench: Bench) -> None:
        await running(bench)
        assert (await bench.backend.execute(RUN, ["true"], 10_000)).exit_code == 0
        role = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}/rolebindings/hodei-backend-exec"
        cluster.delete(role)

        async def again_and_again() -> None:
            async with asyncio.timeout(30):
                while True:  # the API server learns of it a moment later
                    await bench.backend.execute(RUN, ["true"], 10_000)

        with pytest.raises(BackendRefused, match="pods/exec"):
            await again_and_again()

    tell(story, kubeconfig=str(plane.kubeconfig("nobody")))


def test_a_checkpoint_is_taken_by_a_command_and_a_failure_is_reported(tell, kubelet, tmp_path):
    async def story(bench: Bench) -> None:
        saved = tmp_path / "work"
        name = await running(bench, checkpoint=Checkpoint(command=("touch", str(saved))))
        before_ms = int(time.time() * 1000)
        await bench.backend.checkpoint([TakeCheckpoint(RUN, "prod", Checkpoint(command=("touch", str(saved))))])
        told = await heard(bench, lambda seen: seen.checkpoint_ms)
        assert saved.exists()
        assert told.checkpoint_ms >= before_ms
        assert ["touch", str(saved)] in kubelet.commands(name)
        await bench.backend.checkpoint([TakeCheckpoint(RUN, "prod", Checkpoint(command=("false",)))])
        told = await heard(bench, lambda seen: seen.checkpoint_error)
        assert (told.checkpoint_error, told.state) == ("its checkpoint command failed: exit code 1", "running")

    tell(story)


def test_work_is_saved_by_a_signal_and_seen_by_its_file(tell, kubelet, tmp_path):
    file = tmp_path / "checkpoint"

    async def story(bench: Bench) -> None:
        hook = Checkpoint(signal="USR1", file=str(file), timeout_ms=20_000)
        name = await running(bench, checkpoint=hook)
        env = {one["name"]: one["value"] for one in bench.pod(RUN)["spec"]["containers"][0]["env"]}
        assert env["HODEI_CHECKPOINT_FILE"] == str(file)
        with a_saver(file) as pid:
            kubelet.main[name] = pid
            await bench.backend.checkpoint([TakeCheckpoint(RUN, "prod", hook)])
            await heard(bench, lambda seen: seen.checkpoint_ms)
        assert file.read_text() == "saved"

    tell(story)


def test_work_that_the_job_saves_by_itself_is_noticed(tell, kubelet, tmp_path):
    file = tmp_path / "checkpoint"

    async def story(bench: Bench) -> None:
        await running(bench, checkpoint=Checkpoint(file=str(file)))
        file.write_text("x")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        assert (await heard(bench, lambda seen: seen.checkpoint_ms)).checkpoint_ms == 1_700_000_000_000
        assert (await bench.backend.known())[RUN].checkpoint_ms == 1_700_000_000_000

    tell(story)


def test_a_stop_waits_until_work_is_saved(tell, kubelet, tmp_path):
    file = tmp_path / "checkpoint"

    async def story(bench: Bench) -> None:
        hook = Checkpoint(signal="USR1", file=str(file), timeout_ms=20_000)
        name = await running(bench, checkpoint=hook)
        with a_saver(file) as pid:
            kubelet.main[name] = pid
            order = Stop(RUN, "prod", 5000, StopReason("preempted", "by 7"), hook)
            await bench.backend.stop([order])
            await bench.backend.stop([order])
            end = await bench.end_of(RUN)
        assert file.read_text() == "saved"
        assert (end.state, end.reason) == ("stopped", "preempted by 7")
        assert end.checkpoint_ms
        assert len([command for command in kubelet.commands(name) if "USR1" in command]) == 1

    tell(story)


def test_a_stop_continues_after_a_failed_checkpoint_and_reports_it(tell, kubelet):
    async def story(bench: Bench) -> None:
        hook = Checkpoint(command=("sh", "-c", "exit 3"))
        await running(bench, checkpoint=hook)
        await bench.backend.stop([Stop(RUN, "prod", 5000, StopReason("preempted", "by 7"), hook)])
        end = await bench.end_of(RUN)
        assert (end.state, end.reason) == (
            "stopped", "preempted by 7; its checkpoint command failed: exit code 3",
        )  # fmt: skip
        assert not end.checkpoint_ms

    tell(story)


def test_a_second_stop_without_a_hook_does_not_wait_for_the_first(tell, kubelet):
    async def story(bench: Bench) -> None:
        hook = Checkpoint(command=("sleep", "20"), timeout_ms=600_000)
        name = await running(bench, checkpoint=hook)
        await bench.backend.stop([Stop(RUN, "prod", 60_000, StopReason("drained"), hook)])
        await bench.until(lambda: kubelet.commands(name), "the hook has begun")
        assert RUN not in [seen.run for seen in bench.observed if seen.state in RUN_ENDED]
        await bench.stop(RUN, grace_ms=1000, reason=StopReason("cancelled"))
        end = await bench.end_of(RUN)
        assert (end.state, end.reason) == ("stopped", "drained; its checkpoint was cut short")

    tell(story)


def test_a_stop_interrupted_by_a_crash_is_repeated_after_the_restart(tell, kubelet, tmp_path):
    async def story(bench: Bench) -> None:
        hook = Checkpoint(
            command=("sh", "-c", f"echo x >>{tmp_path}/saves; [ $(wc -l <{tmp_path}/saves) = 2 ] || sleep 15")
        )
        name = await running(bench, checkpoint=hook)
        order = Stop(RUN, "prod", 1000, StopReason("drained"), hook)
        await bench.backend.stop([order])
        await bench.until(lambda: (tmp_path / "saves").exists() and kubelet.commands(name), "the hook has begun")
        await bench.restart()
        assert (await bench.backend.known())[RUN].state == "running"
        await bench.backend.stop([order])
        end = await bench.end_of(RUN)
        assert (end.state, end.reason, bool(end.checkpoint_ms)) == ("stopped", "drained", True)

    tell(story)


def be_ready(cluster: Cluster, pod: str, ready: bool) -> None:
    """What a kubelet writes after its probe has succeeded, or failed often enough."""
    path = f"{cluster.pods_path}/{pod}"
    (status,) = cluster.get(path)["status"]["containerStatuses"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    said = [{"type": "ContainersReady", "status": str(ready), "lastTransitionTime": now}]
    cluster.patch(
        f"{path}/status",
        {"status": {"containerStatuses": [{**status, "ready": ready}], "conditions": said}},
        "strategic",
    )


def test_a_run_whose_probe_fails_too_often_is_stopped_as_unhealthy(tell, kubelet, cluster):
    check = HealthCheck(command=("test", "-e", "$(HOME)"), every_ms=1000, timeout_ms=1000, failures=2)

    async def story(bench: Bench) -> None:
        name = await running(bench, health=check)
        assert bench.pod(RUN)["spec"]["containers"][0]["readinessProbe"] == {
            "exec": {"command": ["test", "-e", "$$(HOME)"]}, "initialDelaySeconds": 1, "periodSeconds": 1,
            "timeoutSeconds": 1, "failureThreshold": 2, "successThreshold": 1,
        }  # fmt: skip
        await heard(bench, lambda seen: seen.health == "ok")
        await asyncio.to_thread(be_ready, cluster, name, False)
        end = await bench.end_of(RUN)
        assert [seen.health for seen in bench.observed if seen.health][-1] == "failing"
        assert (end.state, end.reason_code) == ("failed", "unhealthy")
        assert end.reason == "its health check failed 2 times in a row"

    tell(story)


def test_a_run_that_recovers_in_time_continues(tell, kubelet, cluster):
    check = HealthCheck(http="http://localhost:8080/live?x=1", every_ms=60_000, timeout_ms=1000, failures=3)

    async def story(bench: Bench) -> None:
        name = await running(bench, health=check)
        probe = bench.pod(RUN)["spec"]["containers"][0]["readinessProbe"]
        assert probe["httpGet"] == {"path": "/live?x=1", "port": 8080, "scheme": "HTTP"}
        await asyncio.to_thread(be_ready, cluster, name, False)
        await bench.until(lambda: not bench.pod(RUN)["status"]["containerStatuses"][0]["ready"], "not ready")
        await asyncio.to_thread(be_ready, cluster, name, True)
        await heard(bench, lambda seen: seen.health == "ok")
        assert (await bench.backend.known())[RUN].state == "running"

    tell(story)


def test_a_stale_heartbeat_file_stops_the_run(tell, kubelet, tmp_path):
    file = tmp_path / "beat"
    check = HealthCheck(file=str(file), every_ms=300, timeout_ms=5000, failures=2)

    async def story(bench: Bench) -> None:
        beating = asyncio.Event()

        async def beat() -> None:
            while not beating.is_set():
                file.write_text(str(time.monotonic_ns()))
                await asyncio.sleep(0.02)

        heart = asyncio.create_task(beat())
        await running(bench, health=check)
        await heard(bench, lambda seen: seen.health == "ok")
        beating.set()
        await heart
        end = await bench.end_of(RUN)
        assert (end.state, end.reason_code) == ("failed", "unhealthy")
        assert "has not changed for 0.3s" in end.reason

    tell(story)


def test_a_cluster_without_metrics_is_reported(tell):
    async def story(bench: Bench) -> None:
        with pytest.raises(Unsupported, match="does not measure") as refusal:
            await bench.backend.usage()
        assert "metrics-server" in refusal.value.hint

    tell(story)


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


def test_measured_use_is_that_of_the_clusters_metrics(tell, cluster, plane: Plane):
    """The objects are those of a metrics-server, kept by the API server itself: what a metrics-server measures is not shown."""
    bind_shipped_rights(cluster, "nobody")
    cluster.apply([METRICS])
    try:
        name = f"{cluster.namespace}-0"
        path = "/apis/metrics.k8s.io/v1beta1/nodes"

        def served() -> bool:
            try:
                return bool(cluster.get(path))
            except ApiFailed:  # its storage is being set up
                return False

        cluster.wait(served, "the metrics API is served")
        measured = {"cpu": "1234567890n", "memory": "2Gi", "example.com/other": "3"}
        cluster.apply([
            {"apiVersion": "metrics.k8s.io/v1beta1", "kind": "NodeMetrics", "metadata": {"name": one}, "usage": measured}
            for one in (name, f"{name}-not-ours")
        ])  # fmt: skip

        async def story(bench: Bench) -> None:
            used = await bench.backend.usage()
            assert {node: dict(one.used) for node, one in used.items()} == {
                f"lab-{name}": {"cpu": 1235, "memory": 2 << 30}
            }

        tell(story, kubeconfig=str(plane.kubeconfig("nobody")), node_prefix="lab-")
    finally:
        cluster.delete("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodes.metrics.k8s.io")
