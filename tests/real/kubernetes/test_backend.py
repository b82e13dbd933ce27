"""The Kubernetes backend against a real API server and its controllers, with kwok in the place of the kubelets.

What every backend promises (tests/conformance) is shown here as far as no container has to run: kwok runs none, it ends a
pod as the pod's annotations say. Not proved: what a command does inside its container, and images that are pulled.
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
from real.kubernetes.log_kubelet import LogKubelet
from real.kubernetes.plane import HERE, Plane

pytestmark = pytest.mark.real
RIGHTS = HERE.parents[2] / "deploy" / "backend-rbac.yaml"
KWOK = "hodei.test/"
Story = Callable[["Bench"], Coroutine[Any, Any, None]]


class Wall:
    def now_ms(self) -> int:
        return int(time.time() * 1000)


class Bench(ReconnectingRecorder):
    """A backend on the cluster of the test, all that it has said, and a way to lose it and come back."""

    def __init__(self, cluster: Cluster, home: Path, name: str = "prod", installation: str = "", **fields: Any) -> None:
        self.cluster, self._home, self._name = cluster, home, name
        self.installation = installation or cluster.namespace
        given = {"image": "busybox", "namespace": cluster.namespace, "allow_annotations": (KWOK,), **fields}
        given.setdefault("kubeconfig", str(cluster.plane.kubeconfig("admin")))
        self._settings = Settings(**given)
        super().__init__(self._made(), 30)

    def _made(self) -> KubernetesBackend:
        return KubernetesBackend(self._name, self._settings, BackendContext(self.installation, 1, self._home, Wall()))

    def order(self, job: int, *command: str, node: str = "", **fields: Any) -> Start:
        """`exit_code`, `runs_for`, `starts_after`, `stops_after` are for kwok."""
        kwok = {
            f"{KWOK}{key.replace('_', '-')}": str(fields.pop(key))
            for key in ("exit_code", "runs_for", "starts_after", "stops_after")
            if key in fields
        }
        fields = {"cpu": "10m", "memory": "1Mi", "annotations": kwok, **fields}
        order = an_order(job, *command, **fields)
        where = node or f"{self._settings.node_prefix}{self.cluster.namespace}-0"
        now_ms = Wall().now_ms()
        return structs.replace(order, run=structs.replace(order.run, node=where, backend=self._name, placed_ms=now_ms))

    def pod(self, run: str) -> dict[str, Any]:
        return self.cluster.pod(pod_name(self.installation, run))

    def gone(self, run: str) -> bool:
        return not self.cluster.api.exists(f"{self.cluster.pods_path}/{pod_name(self.installation, run)}")

    async def until(self, true: Callable[[], object], what: str) -> None:
        await asyncio.to_thread(self.cluster.wait, true, what)

    async def restart(self, while_away: Callable[[], object] = lambda: None) -> None:
        """The server goes, something happens, and another one comes that remembers nothing."""
        await self.backend.close()
        await asyncio.to_thread(while_away)
        self.observed.clear()
        self.backend = self._made()
        await self.backend.open()

    async def the_node(self, name: str) -> Node | None:
        return next((node for node in await self.backend.nodes() if node.name == name), None)


@pytest.fixture
def tell(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """`tell(story)`: of a backend that is open, on a cluster with one node."""
    name = cluster.make_node(f"{cluster.namespace}-0", "4", "16Gi")
    # Nobody answers for its kubelet, and nobody is to look for it by a name that there is not.
    here = [{"type": "InternalIP", "address": "127.0.0.1"}]
    cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"addresses": here}})

    def told(story: Story, **fields: Any) -> None:
        async def whole() -> None:
            async with opened(cluster, tmp_path, **fields) as bench:
                await story(bench)

        asyncio.run(whole())

    try:
        yield told
    finally:
        let_go_of_all(cluster)


@contextlib.asynccontextmanager
async def opened(cluster: Cluster, home: Path, **fields: Any) -> AsyncIterator[Bench]:
    bench = Bench(cluster, home, **fields)
    await bench.backend.open()
    try:
        yield bench
    finally:
        await bench.backend.close()


def let_go_of_all(cluster: Cluster) -> None:
    """Nobody is left to store their ends."""
    cluster.plane.revive_apiserver()
    for pod in cluster.pods():
        if FINALIZER in pod["metadata"].get("finalizers", []):
            cluster.patch(f"{cluster.pods_path}/{pod['metadata']['name']}", {"metadata": {"finalizers": None}})


def test_a_run_is_seen_running_and_then_ended(tell):
    async def story(bench: Bench) -> None:
        (end,) = await bench.run(bench.order(1, runs_for="1s"))
        assert (end.state, end.exit_code, end.reason_code) == ("succeeded", 0, "")
        seen = [seen.state for seen in bench.observed if seen.state != "placed"]
        assert seen == ["running", "succeeded"]
        assert await bench.backend.known() == {"1.0.1": end}

    tell(story)


@pytest.mark.parametrize(
    ("code", "state", "why"),
    [("0", "succeeded", ""), ("7", "failed", ""), ("137", "failed", "killed")],
    ids=["0", "7", "137"],
)
def test_exit_codes_arrive_as_they_were(tell, code, state, why):
    async def story(bench: Bench) -> None:
        (end,) = await bench.run(bench.order(1, runs_for="1ms", exit_code=code))
        assert (end.state, end.exit_code, end.reason_code) == (state, int(code), why)

    tell(story)


def test_a_start_ordered_twice_happens_once(tell):
    async def story(bench: Bench) -> None:
        order = bench.order(1, runs_for="1ms")
        assert await bench.backend.start([order, order]) == {}
        uid = bench.pod("1.0.1")["metadata"]["uid"]
        end = await bench.end_of("1.0.1")
        assert await bench.backend.start([order]) == {}
        assert await bench.backend.known() == {"1.0.1": end}
        assert bench.pod("1.0.1")["metadata"]["uid"] == uid

    tell(story)


def test_many_starts_in_one_call_all_end(tell):
    async def story(bench: Bench) -> None:
        ends = await bench.run(*[bench.order(job, runs_for="1ms") for job in range(1, 51)])
        assert {end.state for end in ends} == {"succeeded"}

    tell(story)


def test_a_pod_has_the_resources_of_its_job(tell):
    hostile = ("a b", "$(id)", "`id`", "${HOME}", "a\nb", "%s", "é", "$$")

    async def story(bench: Bench) -> None:
        order = bench.order(
            1, "echo", *hostile, env={"TEXT": "$(HOME)"}, labels={"team": "ml"}, limits={"memory": 2**21},
            workdir="/tmp",
        )  # fmt: skip
        await bench.backend.start([order])
        pod = bench.pod("1.0.1")
        (container,) = pod["spec"]["containers"]
        assert [word.replace("$$", "$") for word in container["command"]] == ["echo", *hostile]
        assert {"name": "TEXT", "value": "$$(HOME)"} in container["env"]
        assert container["resources"] == {
            "requests": {"cpu": "10m", "memory": str(2**20)},
            "limits": {"memory": str(2**21)},
        }
        assert pod["metadata"]["labels"]["job.hodei.io/team"] == "ml"
        assert pod["spec"]["nodeName"] == bench.order(1).run.node

    tell(story)


def test_its_time_is_counted_from_where_its_command_began(tell):
    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1, timeout_ms=90_000)])
        await bench.running("1.0.1")
        await bench.until(lambda: "activeDeadlineSeconds" in bench.pod("1.0.1")["spec"], "a deadline")
        assert 90 <= bench.pod("1.0.1")["spec"]["activeDeadlineSeconds"] <= 92

    tell(story)


def test_a_pod_that_the_cluster_always_refuses_fails_and_delays_no_other(tell):
    async def story(bench: Bench) -> None:
        too_much = {"cpu": 1, "memory": 1}  # less than it asks for: 422
        answer = await bench.backend.start(
            [bench.order(1, limits=too_much), bench.order(2, "/bin/echo", "a\0b"), bench.order(3, runs_for="1ms")]
        )
        assert {run: type(error) for run, error in answer.items()} == {"1.0.1": BackendRefused, "2.0.1": BackendRefused}
        assert "must be less than or equal to" in answer["1.0.1"].message
        assert (await bench.end_of("3.0.1")).state == "succeeded"

    tell(story)


def test_a_full_quota_is_retried_later(tell, cluster):
    cluster.apply([{
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}},
    }])  # fmt: skip

    async def story(bench: Bench) -> None:
        quota = f"/api/v1/namespaces/{cluster.namespace}/resourcequotas/small"
        await bench.until(lambda: cluster.get(quota)["status"].get("hard"), "the quota is known")
        assert await bench.backend.start([bench.order(1)]) == {}
        answer = await bench.backend.start([bench.order(2)])
        assert type(answer["2.0.1"]) is BackendError
        assert "exceeded quota" in answer["2.0.1"].message

    tell(story)


def test_a_stop_ends_the_run_and_carries_its_reason_back(tell):
    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1)])
        await bench.running("1.0.1")
        await bench.stop("1.0.1", reason=StopReason("preempted", "by 7"))
        await bench.stop("1.0.1", reason=StopReason("cancelled", "a second time"))
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 143, "preempted by 7")
        assert FINALIZER in bench.pod("1.0.1")["metadata"]["finalizers"]

    tell(story)


def test_a_second_stop_may_only_come_to_an_earlier_end(tell):
    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1, stops_after="1h")])
        await bench.running("1.0.1")

        def grace() -> int:
            return int(bench.pod("1.0.1")["metadata"].get("deletionGracePeriodSeconds", 0))

        await bench.stop("1.0.1", grace_ms=600_000)
        await bench.until(lambda: grace() == 600, "the first grace")
        await bench.stop("1.0.1", grace_ms=900_000)
        assert grace() == 600
        await bench.stop("1.0.1", grace_ms=60_000)
        assert 60 <= grace() <= 70

    tell(story)


def test_a_stop_right_behind_the_start_is_not_lost(tell):
    async def story(bench: Bench) -> None:
        orders = [bench.order(job, starts_after="1h") for job in range(1, 6)]
        assert await bench.backend.start(orders) == {}
        for order in orders:
            await bench.stop(order.run.id, grace_ms=0)
        assert {(await bench.end_of(order.run.id)).state for order in orders} == {"stopped"}

    tell(story)


def test_stopping_and_forgetting_unknown_and_ended_runs_is_no_error(tell):
    async def story(bench: Bench) -> None:
        (end,) = await bench.run(bench.order(1, runs_for="1ms"))
        await bench.stop("1.0.1")
        await bench.stop("77.0.1")
        assert await bench.backend.known() == {"1.0.1": end}
        await bench.backend.forget([Forget("77.0.1", "prod")])

    tell(story)


def test_an_ended_pod_is_kept_until_it_is_forgotten(tell):
    async def story(bench: Bench) -> None:
        await bench.run(bench.order(1, runs_for="1ms"), bench.order(2, runs_for="1ms"))
        for _ in range(2):
            await bench.backend.forget([Forget("1.0.1", "prod")])
        assert list(await bench.backend.known()) == ["2.0.1"]
        assert bench.gone("1.0.1")
        bench.observed.clear()
        await bench.run(bench.order(3, runs_for="1ms"))
        assert {seen.run for seen in bench.observed} == {"3.0.1"}  # nothing more is heard of what was forgotten

    tell(story)


def test_finalizers_of_others_are_kept(tell, cluster):
    async def story(bench: Bench) -> None:
        await bench.run(bench.order(1, runs_for="1ms"))
        path = f"{cluster.pods_path}/{pod_name(bench.installation, '1.0.1')}"
        cluster.patch(path, {"metadata": {"finalizers": [FINALIZER, "example.com/mine"]}})
        await bench.backend.forget([Forget("1.0.1", "prod")])
        assert bench.pod("1.0.1")["metadata"]["finalizers"] == ["example.com/mine"]
        assert await bench.backend.known() == {}
        cluster.patch(path, {"metadata": {"finalizers": None}})

    tell(story)


def test_a_pod_deleted_by_others_is_lost_with_its_exit_code(tell, cluster):
    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1)])
        await bench.running("1.0.1")
        await asyncio.to_thread(cluster.delete_pod, pod_name(bench.installation, "1.0.1"))
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason_code) == ("lost", 143, "lost")
        assert "deleted by another user or controller" in end.reason

    tell(story)


def test_a_pod_deleted_by_others_while_the_server_is_down_keeps_its_exit_code(tell, cluster):
    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1)])
        await bench.running("1.0.1")
        name = pod_name(bench.installation, "1.0.1")

        def deleted() -> None:
            cluster.delete_pod(name)
            cluster.until_phase(name, "Failed")

        await bench.restart(while_away=deleted)
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code) == ("lost", 143)

    tell(story)


def test_a_pod_that_was_torn_out_with_its_finalizer_is_lost(tell, cluster):
    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1, starts_after="1h")])
        await bench.first("1.0.1", frozenset({"placed"}))
        name = pod_name(bench.installation, "1.0.1")
        cluster.patch(f"{cluster.pods_path}/{name}", {"metadata": {"finalizers": None}})
        await asyncio.to_thread(cluster.delete_pod, name, 0)
        end = await bench.end_of("1.0.1")
        assert (end.state, end.reason_code) == ("lost", "lost")

    tell(story)


def test_an_image_that_never_comes_is_given_up(tell, cluster, monkeypatch):
    monkeypatch.setattr(backend, "SUPERVISE_EVERY_S", 0.1)

    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1, starts_after="1h")])
        await bench.first("1.0.1", frozenset({"placed"}))
        waiting = {"reason": "ErrImagePull", "message": "no-such-image: not found"}
        status = [{"name": "main", "image": "x", "imageID": "", "ready": False, "restartCount": 0,
                   "state": {"waiting": waiting}}]  # fmt: skip
        path = f"{cluster.pods_path}/{pod_name(bench.installation, '1.0.1')}/status"
        cluster.patch(path, {"status": {"containerStatuses": status}}, "strategic")
        end = await bench.end_of("1.0.1")
        assert (end.state, end.reason_code) == ("failed", "start_failed")
        assert "no-such-image" in end.reason

    tell(story, pull_patience="1s")


def test_a_scheduler_of_the_cluster_puts_it_where_we_say(tell, cluster, kube_scheduler):
    name = cluster.make_node(f"{cluster.namespace}-z", "4", "16Gi")

    async def story(bench: Bench) -> None:
        (end,) = await bench.run(bench.order(1, runs_for="1ms", node=name))
        assert end.state == "succeeded"
        pod = bench.pod("1.0.1")
        assert (pod["spec"]["schedulerName"], pod["spec"]["nodeName"]) == (kube_scheduler, name)

    tell(story, scheduler=kube_scheduler)


def test_a_run_that_no_scheduler_takes_can_be_stopped_and_is_given_up(tell, monkeypatch):
    monkeypatch.setattr(backend, "SUPERVISE_EVERY_S", 0.1)

    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1), bench.order(2)])
        await bench.stop("1.0.1", reason=StopReason("cancelled", "by ann"))
        stopped, given_up = await bench.end_of("1.0.1"), await bench.end_of("2.0.1")
        assert (stopped.state, stopped.exit_code, stopped.reason) == ("stopped", None, "cancelled by ann")
        assert (given_up.state, given_up.reason_code) == ("failed", "start_failed")
        assert "no scheduler" in given_up.reason

    tell(story, scheduler="nobody", pull_patience="3s")


def test_a_run_that_ends_while_we_are_away_is_found_with_its_exit_code(tell, cluster):
    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1, runs_for="500ms", exit_code=7), bench.order(2)])
        await bench.running("2.0.1")
        name = pod_name(bench.installation, "1.0.1")
        await bench.restart(while_away=lambda: cluster.until_phase(name, "Failed"))
        known = await bench.backend.known()
        assert (known["1.0.1"].state, known["1.0.1"].exit_code, known["2.0.1"].state) == ("failed", 7, "running")
        assert await bench.end_of("1.0.1") == known["1.0.1"]

    tell(story)


def test_a_stop_is_known_after_a_restart(tell):
    async def story(bench: Bench) -> None:
        await bench.backend.start([bench.order(1, stops_after="1s")])
        await bench.running("1.0.1")
        await bench.stop("1.0.1", reason=StopReason("preempted", "by 7"))
        await bench.restart()
        end = await bench.end_of("1.0.1")
        assert (end.state, end.exit_code, end.reason) == ("stopped", 143, "preempted by 7")

    tell(story)


@pytest.mark.parametrize("late_s", [0.0, 0.002, 0.01, 0.05], ids=lambda late_s: f"after {late_s * 1000:g} ms")
def test_a_start_with_a_lost_response_is_adopted_and_not_repeated(tell, late_s):
    async def story(bench: Bench) -> None:
        order = bench.order(1, runs_for="1ms")
        lost = asyncio.create_task(bench.backend.start([order]))
        await asyncio.wait({lost}, timeout=late_s)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        await bench.restart()
        assert await bench.backend.start([order]) == {}
        assert (await bench.end_of("1.0.1")).state == "succeeded"
        assert list(await bench.backend.known()) == ["1.0.1"]
        assert len(bench.cluster.pods()) == 1

    tell(story)


def test_an_api_that_is_away_is_an_outage_and_nothing_is_forgotten_by_it(tell, plane: Plane, monkeypatch):
    monkeypatch.setattr(backend, "OUTAGE_S", 0.5)
    monkeypatch.setattr(backend, "SUPERVISE_EVERY_S", 0.2)

    async def story(bench: Bench) -> None:
        (end,) = await bench.run(bench.order(1, runs_for="1ms"))
        await bench.backend.start([bench.order(2, runs_for="2s", exit_code=7)])
        await bench.running("2.0.1")
        await asyncio.to_thread(plane.stop_apiserver)
        with pytest.raises(BackendError, match="out of reach"):
            await bench.first("99.0.1", frozenset({"running"}))
        assert not (await bench.backend.health()).ok
        with pytest.raises(BackendError) as unreached:
            await bench.backend.start([bench.order(3)])
        assert unreached.value.code == NOT_REACHED
        with pytest.raises(BackendError):
            await bench.backend.open()
        plane.start_apiserver()  # not in a thread of the loop: it would end with that
        bench.observed.clear()
        await bench.backend.open()
        assert (await bench.backend.known())["1.0.1"] == end
        assert await bench.end_of("1.0.1") == end  # told again, since nobody has stored it
        assert (await bench.end_of("2.0.1")).exit_code == 7

    tell(story)


def test_a_backend_that_was_never_opened_is_unhealthy(cluster, tmp_path):
    async def story() -> None:
        other = Bench(cluster, tmp_path).backend
        assert not (await other.health()).ok
        with pytest.raises(BackendError):
            await other.start([])

    asyncio.run(story())


def test_what_it_can_not_do_it_refuses_with_what_to_do_instead(tell):
    async def story(bench: Bench) -> None:
        assert not bench.backend.capabilities.two_streams
        for asked in (lambda: bench.backend.suspend(["1.0.1"]), bench.backend.expected):
            with pytest.raises(BackendRefused) as refusal:
                await asked()
            assert refusal.value.code == "BACKEND_CANNOT"
            assert refusal.value.hint

    tell(story)


def test_two_clusters_by_name_and_two_installations_never_see_each_others_runs(cluster, tmp_path):
    cluster.make_node(f"{cluster.namespace}-0", "4", "16Gi")

    async def story() -> None:
        async with (
            opened(cluster, tmp_path / "a", name="east") as east,
            opened(cluster, tmp_path / "b", name="west", node_prefix="west-") as west,
            opened(cluster, tmp_path / "c", name="east", installation="another") as stranger,
        ):
            await east.run(east.order(1, runs_for="1ms"))
            await west.run(west.order(2, runs_for="1ms", exit_code=7))
            await stranger.run(stranger.order(1, runs_for="1ms", exit_code=3))
            assert (await east.backend.known())["1.0.1"].exit_code == 0
            assert (await west.backend.known()).keys() == {"2.0.1"}
            assert (await stranger.backend.known())["1.0.1"].exit_code == 3
            names = {node.name for one in (east, west) for node in await one.backend.nodes()}
            assert names >= {f"{cluster.namespace}-0", f"west-{cluster.namespace}-0"}

    try:
        asyncio.run(story())
    finally:
        let_go_of_all(cluster)


def test_nodes_offer_what_the_pods_of_others_leave(tell, cluster):
    node = f"{cluster.namespace}-0"

    async def story(bench: Bench) -> None:
        before = await bench.the_node(node)
        assert before is not None
        assert (before.backend, before.capacity["cpu"], before.capacity["memory"]) == ("prod", 4000, 16 * 2**30)
        assert await bench.backend.nodes() == await bench.backend.nodes()
        cluster.make_pod("other", "1", "1Gi", nodeName=node)
        await bench.backend.start([bench.order(1, cpu="2")])  # ours: the house counts it itself
        await bench.running("1.0.1")
        async with asyncio.timeout(30):
            while (after := await bench.the_node(node)) is None or after.capacity == before.capacity:
                await bench.backend.nodes_changed()
        assert (after.capacity["cpu"], after.capacity["memory"]) == (3000, 15 * 2**30)
        await asyncio.to_thread(cluster.delete_pod, "other")
        async with asyncio.timeout(30):
            while (found := await bench.the_node(node)) is None or found.capacity != before.capacity:
                await bench.backend.nodes_changed()

    tell(story)


def test_a_node_has_its_properties_and_problems(tell, cluster):
    name = cluster.make_node(
        f"{cluster.namespace}-gpu", "8", "32Gi", more={"nvidia.com/gpu": "2", "example.com/fpga": "3"}, zone="z1",
        labels={"pool": "gpu"}, taints=["gpu=yes:NoSchedule"],
    )  # fmt: skip

    async def story(bench: Bench) -> None:
        node = await bench.the_node(name)
        assert node is not None
        assert (node.capacity["gpu"], node.capacity["example.com/fpga"]) == (2000, 3)
        assert (node.location.zone, node.arch, node.taints) == ("z1", "amd64", (Taint("gpu", "yes"),))
        assert (node.ready, node.cordoned) == (True, False)
        cluster.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
        cluster.set_ready(name, False)
        async with asyncio.timeout(30):
            while (found := await bench.the_node(name)) is None or found.ready or not found.cordoned:
                await bench.backend.nodes_changed()
        assert found.not_ready_reason
        cluster.delete(f"/api/v1/nodes/{name}")
        async with asyncio.timeout(30):
            while await bench.the_node(name) is not None:
                await bench.backend.nodes_changed()

    tell(story)


def test_a_node_without_a_place_for_one_more_pod_is_tainted_for_us(tell, cluster):
    name = cluster.make_node(f"{cluster.namespace}-small", "8", "32Gi", 2)

    async def story(bench: Bench) -> None:
        cluster.make_pod("other", nodeName=name)
        await bench.backend.start([bench.order(1, node=name)])
        async with asyncio.timeout(30):
            while not (node := await bench.the_node(name)) or not node.taints:
                await bench.backend.nodes_changed()
        assert node.taints == (Taint("hodei.io/no-place-for-pods"),)

    tell(story)


def test_only_nodes_with_the_wanted_labels_are_offered(tell, cluster):
    cluster.make_node(f"{cluster.namespace}-in", labels={"pool": cluster.namespace})

    async def story(bench: Bench) -> None:
        assert [node.name for node in await bench.backend.nodes()] == [f"{cluster.namespace}-in"]

    tell(story, node_selector={"pool": cluster.namespace})


def test_logs_come_from_the_api_while_running_and_from_the_file_afterwards(tell, cluster, plane: Plane):
    kubelet = LogKubelet(plane)
    kubelet.serve(cluster, f"{cluster.namespace}-0")

    async def story(bench: Bench) -> None:
        logs = bench.backend.logs
        with pytest.raises(NotFound):
            await logs("99.0.1", "stdout", 0, 4)
        await bench.backend.start([bench.order(1)])
        await bench.running("1.0.1")
        kubelet.said[pod_name(bench.installation, "1.0.1")] = b"0123456789"
        assert await logs("1.0.1", "stdout", 0, 4) == (b"0123", 4)
        assert await logs("1.0.1", "stdout", 4, 100) == (b"456789", 10)
        assert await logs("1.0.1", "stdout", 10, 100) == (b"", 10)
        assert await logs("1.0.1", "stderr", 0, 100) == (b"", 0)
        kubelet.said[pod_name(bench.installation, "1.0.1")] = b"0123456789 and the end"
        await bench.stop("1.0.1")
        await bench.end_of("1.0.1")
        await bench.backend.forget([Forget("1.0.1", "prod")])
        assert bench.gone("1.0.1")
        assert await bench.log("1.0.1") == b"0123456789 and the end"
        await bench.restart()
        assert await bench.log("1.0.1") == b"0123456789 and the end"
        for stream in ("stdout", "stderr"):
            with pytest.raises(NotFound):
                await bench.backend.logs("99.0.1", stream, 0, 4)

    try:
        tell(story)
    finally:
        kubelet.close()


def bind_shipped_rights(cluster: Cluster, user: str, without: str = "") -> None:
    """What is shipped, for a user who may nothing else, in the namespace of the test."""
    shipped = list(yaml.safe_load_all(RIGHTS.read_text().replace("hodei-jobs", cluster.namespace)))
    who = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    for document in shipped:
        if document["kind"].endswith("Binding"):
            document["subjects"] = [who]
    cluster.apply([one for one in shipped if one["kind"] not in ("Namespace", "ServiceAccount", without)])


def test_the_shipped_rights_suffice(tell, cluster, plane: Plane):
    bind_shipped_rights(cluster, "nobody")
    kubelet = LogKubelet(plane)
    kubelet.serve(cluster, f"{cluster.namespace}-0")

    async def story(bench: Bench) -> None:
        health = await bench.backend.health()
        assert health.ok, health.text
        assert health.text.startswith("Kubernetes v1.")
        kubelet.said[pod_name(bench.installation, "1.0.1")] = b"hello"
        await bench.backend.start([bench.order(1, timeout_ms=60_000)])
        await bench.running("1.0.1")
        assert await bench.log("1.0.1") == b"hello"
        await bench.until(lambda: "activeDeadlineSeconds" in bench.pod("1.0.1")["spec"], "a deadline")
        await bench.stop("1.0.1")
        assert (await bench.end_of("1.0.1")).state == "stopped"
        await bench.backend.forget([Forget("1.0.1", "prod")])
        assert bench.gone("1.0.1")

    try:
        tell(story, kubeconfig=str(plane.kubeconfig("nobody")))
    finally:
        kubelet.close()


def test_a_missing_right_is_named_when_the_backend_is_opened(cluster, tmp_path, plane: Plane):
    bind_shipped_rights(cluster, "nobody", without="ClusterRoleBinding")

    async def story() -> None:
        bench = Bench(cluster, tmp_path, kubeconfig=str(plane.kubeconfig("nobody")))
        with pytest.raises(BackendError, match="cannot list resource") as refusal:
            await bench.backend.open()
        assert "kubernetes-backend.md" in refusal.value.hint

    asyncio.run(story())
