"""The Kubernetes backend against a real API server and its controllers; kwok simulates the kubelets.

It covers the contract of all backends (tests/conformance) as far as no container has to run: kwok runs none, it ends a pod as
the annotations of the pod say. Not proved: what a command does inside its container, and pulls of images.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from agent_host import ReconnectingRecorder, an_order
from hodei.backends.base import BackendContext
from hodei.backends.kubernetes import KubernetesBackend, Settings, backend
from hodei.backends.kubernetes.manifest import FINALIZER, pod_name
from hodei.model.effects import Forget, Start
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, NotFound
from hodei.model.node import Node, Taint
from hodei.model.outcome import StopReason
from real.kubernetes.cluster import Cluster
from real.kubernetes.fake_kubelet import FakeKubelet
from real.kubernetes.plane import HERE, Plane

pytestmark = pytest.mark.real
PERMISSIONS = HERE.parents[2] / "deploy" / "backend-rbac.yaml"
KWOK = "hodei.test/"
Scenario = Callable[["KubernetesRecorder"], Coroutine[Any, Any, None]]


class SystemClock:
    def now_ms(self) -> int:
        return int(time.time() * 1000)


class KubernetesRecorder(ReconnectingRecorder):
    """A backend on the cluster of the test, and the observations that it has reported."""

    def __init__(self, cluster: Cluster, home: Path, name: str = "prod", installation: str = "", **fields: Any) -> None:
        self.cluster, self._home, self._name = cluster, home, name
        self.installation = installation or cluster.namespace
        settings = {"image": "busybox", "namespace": cluster.namespace, "allow_annotations": (KWOK,), **fields}
        settings.setdefault("kubeconfig", str(cluster.plane.kubeconfig("admin")))
        self._settings = Settings(**settings)
        super().__init__(self._new_backend(), 30)

    def _new_backend(self) -> KubernetesBackend:
        return KubernetesBackend(
            self._name, self._settings, BackendContext(self.installation, 1, self._home, SystemClock())
        )

    def order(self, job: int, *command: str, node: str = "", **fields: Any) -> Start:
        """`exit_code`, `runs_for`, `starts_after` and `stops_after` become annotations for kwok."""
        kwok = {
            f"{KWOK}{key.replace('_', '-')}": str(fields.pop(key))
            for key in ("exit_code", "runs_for", "starts_after", "stops_after")
            if key in fields
        }
        fields = {"cpu": "10m", "memory": "1Mi", "annotations": kwok, **fields}
        order = an_order(job, *command, **fields)
        name = node or f"{self._settings.node_prefix}{self.cluster.namespace}-0"
        now_ms = SystemClock().now_ms()
        return structs.replace(order, run=structs.replace(order.run, node=name, backend=self._name, placed_ms=now_ms))

    def pod(self, run: str) -> dict[str, Any]:
        return self.cluster.pod(pod_name(self.installation, run))

    def pod_is_deleted(self, run: str) -> bool:
        return not self.cluster.api.exists(f"{self.cluster.pods_path}/{pod_name(self.installation, run)}")

    async def until(self, condition: Callable[[], object], what: str) -> None:
        await asyncio.to_thread(self.cluster.wait, condition, what)

    async def restart(self, while_down: Callable[[], object] = lambda: None) -> None:
        """Replace the backend by a new one without memory, as a restart of the server does."""
        await self.backend.close()
        await asyncio.to_thread(while_down)
        self.observed.clear()
        self.backend = self._new_backend()
        await self.backend.open()

    async def node(self, name: str) -> Node | None:
        return next((node for node in await self.backend.nodes() if node.name == name), None)


@pytest.fixture
def with_backend(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """`with_backend(scenario)` runs the scenario with an open backend, on a cluster with one node."""
    name = cluster.make_node(f"{cluster.namespace}-0", "4", "16Gi")
    # Its kubelet does not exist; with an address, the API server does not try to resolve its name.
    addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
    cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"addresses": addresses}})

    def run(scenario: Scenario, **fields: Any) -> None:
        async def run_open() -> None:
            async with opened(cluster, tmp_path, **fields) as recorder:
                await scenario(recorder)

        asyncio.run(run_open())

    try:
        yield run
    finally:
        remove_finalizers(cluster)


@contextlib.asynccontextmanager
async def opened(cluster: Cluster, home: Path, **fields: Any) -> AsyncIterator[KubernetesRecorder]:
    recorder = KubernetesRecorder(cluster, home, **fields)
    await recorder.backend.open()
    try:
        yield recorder
    finally:
        await recorder.backend.close()


def remove_finalizers(cluster: Cluster) -> None:
    """Let pods be deleted whose ends no server will store."""
    cluster.plane.revive_apiserver()
    for pod in cluster.pods():
        if FINALIZER in pod["metadata"].get("finalizers", []):
            cluster.patch(f"{cluster.pods_path}/{pod['metadata']['name']}", {"metadata": {"finalizers": None}})


def test_a_run_is_reported_as_running_and_then_ended(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        (end,) = await recorder.run(recorder.order(1, runs_for="1s"))
        assert (end.state, end.exit_code, end.reason_code) == ("succeeded", 0, "")
        seen = [seen.state for seen in recorder.observed if seen.state != "placed"]
        assert seen == ["running", "succeeded"]
        assert await recorder.backend.known() == {"1.0.1": end}

    with_backend(scenario)


@pytest.mark.parametrize(
    ("code", "state", "reason_code"),
    [("0", "succeeded", ""), ("7", "failed", ""), ("137", "failed", "killed")],
    ids=["0", "7", "137"],
)
def test_exit_codes_are_reported_unchanged(with_backend, code, state, reason_code):
    async def scenario(recorder: KubernetesRecorder) -> None:
        (end,) = await recorder.run(recorder.order(1, runs_for="1ms", exit_code=code))
        assert (end.state, end.exit_code, end.reason_code) == (state, int(code), reason_code)

    with_backend(scenario)


def test_a_start_ordered_twice_happens_once(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        order = recorder.order(1, runs_for="1ms")
        assert await recorder.backend.start([order, order]) == {}
        uid = recorder.pod("1.0.1")["metadata"]["uid"]
        end = await recorder.end_of("1.0.1")
        assert await recorder.backend.start([order]) == {}
        assert await recorder.backend.known() == {"1.0.1": end}
        assert recorder.pod("1.0.1")["metadata"]["uid"] == uid

    with_backend(scenario)


def test_many_starts_in_one_call_all_end(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        ends = await recorder.run(*[recorder.order(job, runs_for="1ms") for job in range(1, 51)])
        assert {end.state for end in ends} == {"succeeded"}

    with_backend(scenario)


def test_a_pod_has_the_resources_of_its_job(with_backend):
    hostile = ("a b", "$(id)", "`id`", "${HOME}", "a\nb", "%s", "é", "$$")

    async def scenario(recorder: KubernetesRecorder) -> None:
        order = recorder.order(
            1, "echo", *hostile, env={"TEXT": "$(HOME)"}, labels={"team": "ml"}, limits={"memory": 2**21},
            workdir="/tmp",
        )  # fmt: skip
        await recorder.backend.start([order])
        pod = recorder.pod("1.0.1")
        (container,) = pod["spec"]["containers"]
        assert [word.replace("$$", "$") for word in container["command"]] == ["echo", *hostile]
        assert {"name": "TEXT", "value": "$$(HOME)"} in container["env"]
        assert container["resources"] == {
            "requests": {"cpu": "10m", "memory": str(2**20)},
            "limits": {"memory": str(2**21)},
        }
        assert pod["metadata"]["labels"]["job.hodei.io/team"] == "ml"
        assert pod["spec"]["nodeName"] == recorder.order(1).run.node

    with_backend(scenario)


def test_the_timeout_counts_from_the_start_of_the_command(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1, timeout_ms=90_000)])
        await recorder.running("1.0.1")
        await recorder.until(lambda: "activeDeadlineSeconds" in recorder.pod("1.0.1")["spec"], "a deadline")
        assert 90 <= recorder.pod("1.0.1")["spec"]["activeDeadlineSeconds"] <= 92

    with_backend(scenario)


def test_a_pod_that_the_cluster_always_refuses_fails_and_delays_no_other(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        too_much = {"cpu": 1, "memory": 1}  # less than its requests: 422
        answer = await recorder.backend.start(
            [
                recorder.order(1, limits=too_much),
                recorder.order(2, "/bin/echo", "a\0b"),
                recorder.order(3, runs_for="1ms"),
            ]
        )
        assert {run: type(error) for run, error in answer.items()} == {"1.0.1": BackendRefused, "2.0.1": BackendRefused}
        assert "must be less than or equal to" in answer["1.0.1"].message
        assert (await recorder.end_of("3.0.1")).state == "succeeded"

    with_backend(scenario)


def test_a_full_quota_is_retried_later(with_backend, cluster):
    cluster.apply([{
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}},
    }])  # fmt: skip

    async def scenario(recorder: KubernetesRecorder) -> None:
        quota = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas/small"
        await recorder.until(lambda: cluster.get(quota)["status"].get("hard"), "the quota is known")
        assert await recorder.backend.start([recorder.order(1)]) == {}
        answer = await recorder.backend.start([recorder.order(2)])
        assert type(answer["2.0.1"]) is BackendError
        assert "exceeded quota" in answer["2.0.1"].message

    with_backend(scenario)


def test_a_stop_ends_the_run_with_its_reason(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1)])
        await recorder.running("1.0.1")
        await recorder.stop("1.0.1", reason=StopReason("preempted", "by 7"))
        await recorder.stop("1.0.1", reason=StopReason("cancelled", "a second time"))
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 143, "preempted by 7")
        assert FINALIZER in recorder.pod("1.0.1")["metadata"]["finalizers"]

    with_backend(scenario)


def test_a_second_stop_may_only_shorten_the_grace_period(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1, stops_after="1h")])
        await recorder.running("1.0.1")

        def grace() -> int:
            return int(recorder.pod("1.0.1")["metadata"].get("deletionGracePeriodSeconds", 0))

        await recorder.stop("1.0.1", grace_ms=600_000)
        await recorder.until(lambda: grace() == 600, "the first grace period")
        await recorder.stop("1.0.1", grace_ms=900_000)
        assert grace() == 600
        await recorder.stop("1.0.1", grace_ms=60_000)
        assert 60 <= grace() <= 70

    with_backend(scenario)


def test_a_stop_right_after_the_start_is_not_lost(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        orders = [recorder.order(job, starts_after="1h") for job in range(1, 6)]
        assert await recorder.backend.start(orders) == {}
        for order in orders:
            await recorder.stop(order.run.id, grace_ms=0)
        assert {(await recorder.end_of(order.run.id)).state for order in orders} == {"stopped"}

    with_backend(scenario)


def test_stopping_and_forgetting_unknown_and_ended_runs_is_no_error(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        (end,) = await recorder.run(recorder.order(1, runs_for="1ms"))
        await recorder.stop("1.0.1")
        await recorder.stop("77.0.1")
        assert await recorder.backend.known() == {"1.0.1": end}
        await recorder.backend.forget([Forget("77.0.1", "prod")])

    with_backend(scenario)


def test_an_ended_pod_is_kept_until_it_is_forgotten(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.run(recorder.order(1, runs_for="1ms"), recorder.order(2, runs_for="1ms"))
        for _ in range(2):
            await recorder.backend.forget([Forget("1.0.1", "prod")])
        assert list(await recorder.backend.known()) == ["2.0.1"]
        assert recorder.pod_is_deleted("1.0.1")
        recorder.observed.clear()
        await recorder.run(recorder.order(3, runs_for="1ms"))
        assert {seen.run for seen in recorder.observed} == {"3.0.1"}  # forgotten runs are not reported again

    with_backend(scenario)


def test_other_finalizers_are_kept(with_backend, cluster):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.run(recorder.order(1, runs_for="1ms"))
        path = f"{cluster.pods_path}/{pod_name(recorder.installation, '1.0.1')}"
        cluster.patch(path, {"metadata": {"finalizers": [FINALIZER, "example.com/other"]}})
        await recorder.backend.forget([Forget("1.0.1", "prod")])
        assert recorder.pod("1.0.1")["metadata"]["finalizers"] == ["example.com/other"]
        assert await recorder.backend.known() == {}
        cluster.patch(path, {"metadata": {"finalizers": None}})

    with_backend(scenario)


def test_a_pod_deleted_by_others_is_lost_with_its_exit_code(with_backend, cluster):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1)])
        await recorder.running("1.0.1")
        await asyncio.to_thread(cluster.delete_pod, pod_name(recorder.installation, "1.0.1"))
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason_code) == ("lost", 143, "lost")
        assert "deleted by another user or controller" in end.reason

    with_backend(scenario)


def test_a_pod_deleted_by_others_while_the_server_is_down_keeps_its_exit_code(with_backend, cluster):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1)])
        await recorder.running("1.0.1")
        name = pod_name(recorder.installation, "1.0.1")

        def deleted() -> None:
            cluster.delete_pod(name)
            cluster.until_phase(name, "Failed")

        await recorder.restart(while_down=deleted)
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.exit_code) == ("lost", 143)

    with_backend(scenario)


def test_a_pod_deleted_without_its_finalizer_is_lost(with_backend, cluster):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1, starts_after="1h")])
        await recorder.first("1.0.1", frozenset({"placed"}))
        name = pod_name(recorder.installation, "1.0.1")
        cluster.patch(f"{cluster.pods_path}/{name}", {"metadata": {"finalizers": None}})
        await asyncio.to_thread(cluster.delete_pod, name, 0)
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.reason_code) == ("lost", "lost")

    with_backend(scenario)


def test_a_run_whose_image_cannot_be_pulled_fails(with_backend, cluster, monkeypatch):
    monkeypatch.setattr(backend, "SUPERVISE_EVERY_S", 0.1)

    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1, starts_after="1h")])
        await recorder.first("1.0.1", frozenset({"placed"}))
        waiting = {"reason": "ErrImagePull", "message": "no-such-image: not found"}
        status = [{"name": "main", "image": "x", "imageID": "", "ready": False, "restartCount": 0,
                   "state": {"waiting": waiting}}]  # fmt: skip
        path = f"{cluster.pods_path}/{pod_name(recorder.installation, '1.0.1')}/status"
        cluster.patch(path, {"status": {"containerStatuses": status}}, "strategic")
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.reason_code) == ("failed", "start_failed")
        assert "no-such-image" in end.reason

    with_backend(scenario, pull_timeout="1s")


def test_a_scheduler_of_the_cluster_binds_the_pod_to_the_chosen_node(with_backend, cluster, kube_scheduler):
    name = cluster.make_node(f"{cluster.namespace}-z", "4", "16Gi")

    async def scenario(recorder: KubernetesRecorder) -> None:
        (end,) = await recorder.run(recorder.order(1, runs_for="1ms", node=name))
        assert end.state == "succeeded"
        pod = recorder.pod("1.0.1")
        assert (pod["spec"]["schedulerName"], pod["spec"]["nodeName"]) == (kube_scheduler, name)

    with_backend(scenario, scheduler=kube_scheduler)


def test_a_run_without_a_scheduler_can_be_stopped_and_fails_at_last(with_backend, monkeypatch):
    monkeypatch.setattr(backend, "SUPERVISE_EVERY_S", 0.1)

    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1), recorder.order(2)])
        await recorder.stop("1.0.1", reason=StopReason("cancelled", "by ann"))
        stopped, failed = await recorder.end_of("1.0.1"), await recorder.end_of("2.0.1")
        assert (stopped.state, stopped.exit_code, stopped.reason) == ("stopped", None, "cancelled by ann")
        assert (failed.state, failed.reason_code) == ("failed", "start_failed")
        assert "no scheduler" in failed.reason

    with_backend(scenario, scheduler="none", pull_timeout="3s")


def test_a_run_that_ends_while_the_server_is_down_has_its_exit_code(with_backend, cluster):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1, runs_for="500ms", exit_code=7), recorder.order(2)])
        await recorder.running("2.0.1")
        name = pod_name(recorder.installation, "1.0.1")
        await recorder.restart(while_down=lambda: cluster.until_phase(name, "Failed"))
        known = await recorder.backend.known()
        assert (known["1.0.1"].state, known["1.0.1"].exit_code, known["2.0.1"].state) == ("failed", 7, "running")
        assert await recorder.end_of("1.0.1") == known["1.0.1"]

    with_backend(scenario)


def test_the_reason_of_a_stop_is_known_after_a_restart(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        await recorder.backend.start([recorder.order(1, stops_after="1s")])
        await recorder.running("1.0.1")
        await recorder.stop("1.0.1", reason=StopReason("preempted", "by 7"))
        await recorder.restart()
        end = await recorder.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 143, "preempted by 7")

    with_backend(scenario)


@pytest.mark.parametrize("late_s", [0.0, 0.002, 0.01, 0.05], ids=lambda late_s: f"after {late_s * 1000:g} ms")
def test_a_start_with_a_lost_response_is_adopted_and_not_repeated(with_backend, late_s):
    async def scenario(recorder: KubernetesRecorder) -> None:
        order = recorder.order(1, runs_for="1ms")
        lost = asyncio.create_task(recorder.backend.start([order]))
        await asyncio.wait({lost}, timeout=late_s)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        await recorder.restart()
        assert await recorder.backend.start([order]) == {}
        assert (await recorder.end_of("1.0.1")).state == "succeeded"
        assert list(await recorder.backend.known()) == ["1.0.1"]
        assert len(recorder.cluster.pods()) == 1

    with_backend(scenario)


def test_an_unreachable_api_is_an_outage_and_no_end_is_lost(with_backend, plane: Plane, monkeypatch):
    monkeypatch.setattr(backend, "OUTAGE_S", 0.5)
    monkeypatch.setattr(backend, "SUPERVISE_EVERY_S", 0.2)

    async def scenario(recorder: KubernetesRecorder) -> None:
        (end,) = await recorder.run(recorder.order(1, runs_for="1ms"))
        await recorder.backend.start([recorder.order(2, runs_for="2s", exit_code=7)])
        await recorder.running("2.0.1")
        await asyncio.to_thread(plane.stop_apiserver)
        with pytest.raises(BackendError, match="out of reach"):
            await recorder.first("99.0.1", frozenset({"running"}))
        assert not (await recorder.backend.health()).ok
        with pytest.raises(BackendError) as not_reached:
            await recorder.backend.start([recorder.order(3)])
        assert not_reached.value.code == NOT_REACHED
        with pytest.raises(BackendError):
            await recorder.backend.open()
        plane.start_apiserver()  # not in a thread, because the process would end with it
        recorder.observed.clear()
        await recorder.backend.open()
        assert (await recorder.backend.known())["1.0.1"] == end
        assert await recorder.end_of("1.0.1") == end  # reported again, because it was not stored
        assert (await recorder.end_of("2.0.1")).exit_code == 7

    with_backend(scenario)


def test_a_backend_that_was_never_opened_is_unhealthy(cluster, tmp_path):
    async def scenario() -> None:
        other = KubernetesRecorder(cluster, tmp_path).backend
        assert not (await other.health()).ok
        with pytest.raises(BackendError):
            await other.start([])

    asyncio.run(scenario())


def test_unsupported_operations_are_refused_with_a_hint(with_backend):
    async def scenario(recorder: KubernetesRecorder) -> None:
        assert not recorder.backend.capabilities.two_streams
        for operation in (lambda: recorder.backend.suspend(["1.0.1"]), recorder.backend.expected):
            with pytest.raises(BackendRefused) as refusal:
                await operation()
            assert refusal.value.code == "BACKEND_CANNOT"
            assert refusal.value.hint

    with_backend(scenario)


def test_backends_and_installations_on_one_cluster_do_not_see_runs_of_each_other(cluster, tmp_path):
    cluster.make_node(f"{cluster.namespace}-0", "4", "16Gi")

    async def scenario() -> None:
        async with (
            opened(cluster, tmp_path / "a", name="east") as east,
            opened(cluster, tmp_path / "b", name="west", node_prefix="west-") as west,
            opened(cluster, tmp_path / "c", name="east", installation="another") as other,
        ):
            await east.run(east.order(1, runs_for="1ms"))
            await west.run(west.order(2, runs_for="1ms", exit_code=7))
            await other.run(other.order(1, runs_for="1ms", exit_code=3))
            assert (await east.backend.known())["1.0.1"].exit_code == 0
            assert (await west.backend.known()).keys() == {"2.0.1"}
            assert (await other.backend.known())["1.0.1"].exit_code == 3
            names = {node.name for one in (east, west) for node in await one.backend.nodes()}
            assert names >= {f"{cluster.namespace}-0", f"west-{cluster.namespace}-0"}

    try:
        asyncio.run(scenario())
    finally:
        remove_finalizers(cluster)


def test_nodes_offer_the_capacity_that_other_pods_leave(with_backend, cluster):
    node = f"{cluster.namespace}-0"

    async def scenario(recorder: KubernetesRecorder) -> None:
        before = await recorder.node(node)
        assert before is not None
        assert (before.backend, before.capacity["cpu"], before.capacity["memory"]) == ("prod", 4000, 16 * 2**30)
        assert await recorder.backend.nodes() == await recorder.backend.nodes()
        cluster.make_pod("other", "1", "1Gi", nodeName=node)
        await recorder.backend.start([recorder.order(1, cpu="2")])  # the server counts its own runs itself
        await recorder.running("1.0.1")
        async with asyncio.timeout(30):
            while (after := await recorder.node(node)) is None or after.capacity == before.capacity:
                await recorder.backend.nodes_changed()
        assert (after.capacity["cpu"], after.capacity["memory"]) == (3000, 15 * 2**30)
        await asyncio.to_thread(cluster.delete_pod, "other")
        async with asyncio.timeout(30):
            while (found := await recorder.node(node)) is None or found.capacity != before.capacity:
                await recorder.backend.nodes_changed()

    with_backend(scenario)


def test_a_node_has_its_properties_and_conditions(with_backend, cluster):
    name = cluster.make_node(
        f"{cluster.namespace}-gpu", "8", "32Gi", more={"nvidia.com/gpu": "2", "example.com/fpga": "3"}, zone="z1",
        labels={"pool": "gpu"}, taints=["gpu=yes:NoSchedule"],
    )  # fmt: skip

    async def scenario(recorder: KubernetesRecorder) -> None:
        node = await recorder.node(name)
        assert node is not None
        assert (node.capacity["gpu"], node.capacity["example.com/fpga"]) == (2000, 3)
        assert (node.location.zone, node.arch, node.taints) == ("z1", "amd64", (Taint("gpu", "yes"),))
        assert (node.ready, node.cordoned) == (True, False)
        cluster.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
        cluster.set_ready(name, False)
        async with asyncio.timeout(30):
            while (found := await recorder.node(name)) is None or found.ready or not found.cordoned:
                await recorder.backend.nodes_changed()
        assert found.not_ready_reason
        cluster.delete(f"/api/v1/nodes/{name}")
        async with asyncio.timeout(30):
            while await recorder.node(name) is not None:
                await recorder.backend.nodes_changed()

    with_backend(scenario)


def test_a_node_that_runs_its_maximum_of_pods_is_tainted(with_backend, cluster):
    name = cluster.make_node(f"{cluster.namespace}-small", "8", "32Gi", 2)

    async def scenario(recorder: KubernetesRecorder) -> None:
        cluster.make_pod("other", nodeName=name)
        await recorder.backend.start([recorder.order(1, node=name)])
        async with asyncio.timeout(30):
            while not (node := await recorder.node(name)) or not node.taints:
                await recorder.backend.nodes_changed()
        assert node.taints == (Taint("hodei.io/no-place-for-pods"),)

    with_backend(scenario)


def test_only_nodes_with_the_wanted_labels_are_offered(with_backend, cluster):
    cluster.make_node(f"{cluster.namespace}-in", labels={"pool": cluster.namespace})

    async def scenario(recorder: KubernetesRecorder) -> None:
        assert [node.name for node in await recorder.backend.nodes()] == [f"{cluster.namespace}-in"]

    with_backend(scenario, node_selector={"pool": cluster.namespace})


def test_logs_come_from_the_api_while_running_and_from_the_file_afterwards(with_backend, cluster, plane: Plane):
    kubelet = FakeKubelet(plane)
    kubelet.serve(cluster, f"{cluster.namespace}-0")

    async def scenario(recorder: KubernetesRecorder) -> None:
        logs = recorder.backend.logs
        with pytest.raises(NotFound):
            await logs("99.0.1", "stdout", 0, 4)
        await recorder.backend.start([recorder.order(1)])
        await recorder.running("1.0.1")
        kubelet.logs[pod_name(recorder.installation, "1.0.1")] = b"0123456789"
        assert await logs("1.0.1", "stdout", 0, 4) == (b"0123", 4)
        assert await logs("1.0.1", "stdout", 4, 100) == (b"456789", 10)
        assert await logs("1.0.1", "stdout", 10, 100) == (b"", 10)
        assert await logs("1.0.1", "stderr", 0, 100) == (b"", 0)
        kubelet.logs[pod_name(recorder.installation, "1.0.1")] = b"0123456789 and the end"
        await recorder.stop("1.0.1")
        await recorder.end_of("1.0.1")
        await recorder.backend.forget([Forget("1.0.1", "prod")])
        assert recorder.pod_is_deleted("1.0.1")
        assert await recorder.log("1.0.1") == b"0123456789 and the end"
        await recorder.restart()
        assert await recorder.log("1.0.1") == b"0123456789 and the end"
        for stream in ("stdout", "stderr"):
            with pytest.raises(NotFound):
                await recorder.backend.logs("99.0.1", stream, 0, 4)

    try:
        with_backend(scenario)
    finally:
        kubelet.close()


def bind_shipped_roles(cluster: Cluster, user: str, without: str = "") -> None:
    """Bind the shipped roles to a user without other permissions, in the namespace of the test."""
    shipped = list(yaml.safe_load_all(PERMISSIONS.read_text().replace("hodei-jobs", cluster.namespace)))
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    for document in shipped:
        if document["kind"].endswith("Binding"):
            document["subjects"] = [subject]
    cluster.apply([one for one in shipped if one["kind"] not in ("Namespace", "ServiceAccount", without)])


def test_the_shipped_permissions_suffice(with_backend, cluster, plane: Plane):
    bind_shipped_roles(cluster, "unprivileged")
    kubelet = FakeKubelet(plane)
    kubelet.serve(cluster, f"{cluster.namespace}-0")

    async def scenario(recorder: KubernetesRecorder) -> None:
        health = await recorder.backend.health()
        assert health.ok, health.text
        assert health.text.startswith("Kubernetes v1.")
        kubelet.logs[pod_name(recorder.installation, "1.0.1")] = b"hello"
        await recorder.backend.start([recorder.order(1, timeout_ms=60_000)])
        await recorder.running("1.0.1")
        assert await recorder.log("1.0.1") == b"hello"
        await recorder.until(lambda: "activeDeadlineSeconds" in recorder.pod("1.0.1")["spec"], "a deadline")
        await recorder.stop("1.0.1")
        assert (await recorder.end_of("1.0.1")).state == "stopped"
        await recorder.backend.forget([Forget("1.0.1", "prod")])
        assert recorder.pod_is_deleted("1.0.1")

    try:
        with_backend(scenario, kubeconfig=str(plane.kubeconfig("unprivileged")))
    finally:
        kubelet.close()


def test_a_missing_permission_is_reported_when_the_backend_is_opened(cluster, tmp_path, plane: Plane):
    bind_shipped_roles(cluster, "unprivileged", without="ClusterRoleBinding")

    async def scenario() -> None:
        recorder = KubernetesRecorder(cluster, tmp_path, kubeconfig=str(plane.kubeconfig("unprivileged")))
        with pytest.raises(BackendError, match="cannot list resource") as refusal:
            await recorder.backend.open()
        assert "kubernetes-backend.md" in refusal.value.hint

    asyncio.run(scenario())
