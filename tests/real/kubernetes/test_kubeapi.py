"""Client, reflector and lease against a real kube-apiserver: credentials, broken connections and leader election."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import yaml

from hodei.kube.api.client import Access, Api, ApiError, served_path, served_resources, served_versions
from hodei.kube.api.lease import Leadership
from hodei.kube.api.objects import Namespace, Node, Pod
from hodei.kube.api.reflector import Change, Reflector, Resource
from hodei.model.errors import InvalidInput
from ports import free_port
from real.kubernetes.cluster import Cluster
from real.kubernetes.plane import Plane

pytestmark = pytest.mark.real

SELF_REVIEW = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await scenario

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def connected(access: Access) -> AsyncIterator[Api]:
    api = await Api.connect(access)
    try:
        yield api
    finally:
        await api.close()


async def username(api: Api) -> str:
    """The name of the authenticated user, from the API."""
    answer = json.loads(
        await api.request("POST", SELF_REVIEW, b'{"kind":"SelfSubjectReview","apiVersion":"authentication.k8s.io/v1"}')
    )
    return str(answer["status"]["userInfo"]["username"])


async def until(condition: Callable[[], object], what: str, seconds: float = 40.0) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - conditions depend on other processes
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {seconds:g} s") from None


async def until_watching(api: Api) -> None:
    await until(lambda: any(one._has_head for one in api._pool._busy), "the watch has started")


def kubeconfig(plane: Plane, folder: Path, user: dict[str, Any], **cluster: Any) -> Access:
    """A new kubeconfig file with these credentials."""
    document = yaml.safe_load(plane.kubeconfig("admin").read_text())
    document["users"][0]["user"] = user
    document["clusters"][0]["cluster"] |= cluster
    document["contexts"][0]["context"]["namespace"] = "here"
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return Access(kubeconfig=str(path))


def certificate_authority(plane: Plane) -> str:
    return str(yaml.safe_load(plane.kubeconfig("admin").read_text())["clusters"][0]["cluster"]["certificate-authority"])


@pytest.mark.parametrize("by", ["certificate", "token"])
def test_hodei_authenticates_with_a(plane: Plane, by: str):
    async def scenario() -> None:
        async with connected(Access(kubeconfig=str(plane.kubeconfig("hodei", by)))) as api:
            assert await username(api) == "hodei"
            assert (api.server, api.namespace) == (plane.server, "default")

    run(scenario())


def test_kubeconfig_and_context_are_found_by_the_environment(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv(
        "KUBECONFIG", f"{tmp_path}/not-there:{plane.kubeconfig('unprivileged')}:{plane.kubeconfig('hodei')}"
    )

    async def scenario() -> None:
        async with connected(Access()) as api:
            assert await username(api) == "unprivileged"
        with pytest.raises(InvalidInput, match="no-such-context"):
            await Api.connect(Access(context="no-such-context"))

    run(scenario())


def test_a_token_file_that_is_rotated_is_read_again_when_the_old_token_is_refused(plane: Plane, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text(plane.token("hodei") + "\n")

    async def scenario() -> None:
        async with connected(kubeconfig(plane, tmp_path, {"tokenFile": str(token)})) as api:
            assert await username(api) == "hodei"
            assert api.namespace == "here"
            token.write_text("refused")
            api._renew_at = 0.0  # a minute later
            with pytest.raises(ApiError) as failed:
                await username(api)
            assert (failed.value.status, failed.value.reason) == (401, "Unauthorized")
            token.write_text(plane.token("unprivileged"))
            assert await username(api) == "unprivileged"

    run(scenario())


def test_the_service_account_of_the_pod_is_used_inside_a_cluster(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from kubernetes.aio.config import incluster_config

    from hodei.kube.api import access

    (tmp_path / "token").write_text(plane.token("hodei"))
    (tmp_path / "ca.crt").write_text(Path(certificate_authority(plane)).read_text())
    (tmp_path / "namespace").write_text("mine\n")
    monkeypatch.setattr(access, "_SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", plane.server.rsplit(":", 1)[1])

    async def scenario() -> None:
        async with connected(Access()) as api:
            assert (await username(api), api.namespace) == ("hodei", "mine")
            (tmp_path / "token").write_text(plane.token("unprivileged"))
            api._renew_at = 0.0
            assert await username(api) == "unprivileged"

    run(scenario())


def plugin(folder: Path, body: str) -> dict[str, Any]:
    script = folder / "plugin"
    script.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script), "interactiveMode": "Never"}
    }


def credential(folder: Path, **status: str) -> None:
    document = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    (folder / "credential").write_text(json.dumps(document))


def test_a_plugin_provides_the_token_and_renews_it_when_expired_or_rejected(plane: Plane, tmp_path: Path):
    def runs() -> int:
        return len((tmp_path / "runs").read_text().splitlines())

    user = plugin(tmp_path, f"cat {tmp_path}/credential")
    credential(tmp_path, token=plane.token("hodei"), expirationTimestamp="2999-01-01T00:00:00Z")

    async def scenario() -> None:
        async with connected(kubeconfig(plane, tmp_path, user)) as api:
            assert await username(api) == "hodei"
            api._renew_at = 0.0
            idle = api._pool._idle[:]
            await username(api)
            assert runs() == 1, "the token is still valid"
            assert api._pool._idle == idle, "the token is the same, so connections are kept"
            credential(tmp_path, token=plane.token("unprivileged"), expirationTimestamp="2001-01-01T00:00:00Z")
            api._head = api._head.replace(b"Bearer hodei-token", b"Bearer refused")
            assert await username(api) == "unprivileged"
            assert runs() == 2
            credential(tmp_path, token=plane.token("hodei"), expirationTimestamp="2999-01-01T00:00:00Z")
            api._renew_at = 0.0  # it has expired
            assert await username(api) == "hodei"
            assert runs() == 3

    run(scenario())


def test_the_error_of_a_failing_plugin_is_reported(plane: Plane, tmp_path: Path):
    user = plugin(tmp_path, "echo please log in first >&2; exit 3")

    async def scenario() -> None:
        with pytest.raises(InvalidInput, match="please log in first"):
            await Api.connect(kubeconfig(plane, tmp_path, user))

    run(scenario())


def test_unauthorized_and_forbidden_have_a_message_and_a_hint(plane: Plane, tmp_path: Path):
    async def scenario() -> None:
        with pytest.raises(ApiError) as unknown:
            await Api.connect(kubeconfig(plane, tmp_path, {"token": "made-up"}))
        assert unknown.value.status == 401
        assert "kubectl auth whoami" in unknown.value.hint
        async with connected(Access(kubeconfig=str(plane.kubeconfig("unprivileged")))) as api:
            with pytest.raises(ApiError) as forbidden:
                await api.request("GET", "/api/v1/nodes")
            assert (forbidden.value.status, forbidden.value.reason) == (403, "Forbidden")
            assert 'User "unprivileged" cannot list resource "nodes"' in forbidden.value.message
            assert "kubectl auth can-i" in forbidden.value.hint

    run(scenario())


def test_a_wrong_or_unreachable_server_is_reported(plane: Plane, tmp_path: Path):
    async def scenario() -> None:
        with pytest.raises(ApiError, match="its certificate is not accepted") as wrong:
            await Api.connect(kubeconfig(plane, tmp_path, {"token": "x"}, **{"tls-server-name": "elsewhere.example"}))
        assert wrong.value.status == 0
        with pytest.raises(ApiError, match=r"refused|Connect call failed") as away:
            await Api.connect(kubeconfig(plane, tmp_path, {"token": "x"}, server=f"https://127.0.0.1:{free_port()}"))
        assert away.value.status == 0

    run(scenario())


class RecordingSink:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.calls: list[str] = []

    def listed(self, objects: list[Any]) -> None:
        self.names = {one.metadata.name for one in objects}
        self.calls.append(f"listed {len(objects)}")

    def changed(self, kind: Change, object: Any) -> None:
        name = object.metadata.name
        self.calls.append(f"{kind} {name}")
        if kind == "DELETED":
            assert name in self.names, f"{name} is deleted twice"
            self.names.discard(name)
        elif kind == "ADDED":
            assert name not in self.names, f"{name} is added twice"
            self.names.add(name)


@contextlib.asynccontextmanager
async def running_reflector(
    plane: Plane, resource: Resource[Any], user: str = "admin", **options: Any
) -> AsyncIterator[tuple[Reflector[Any], RecordingSink, Api]]:
    sink = RecordingSink()
    async with connected(Access(kubeconfig=str(plane.kubeconfig(user)))) as api:
        reflector = Reflector(api, resource, sink, **options)
        task = asyncio.create_task(reflector.run())
        try:
            yield reflector, sink, api
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def pods_of(cluster: Cluster) -> Resource[Pod]:
    return Resource(f"/api/v1/namespaces/{cluster.namespace}/pods", Pod)


def test_a_reflector_reports_changes(plane: Plane, cluster: Cluster):
    cluster.make_pod("one", scheduler="by-hand")

    async def scenario() -> None:
        async with running_reflector(plane, pods_of(cluster)) as (reflector, sink, _):
            await reflector.synced.wait()
            assert sink.names == {"one"}
            await asyncio.to_thread(cluster.make_pod, "two", scheduler="by-hand")
            await asyncio.to_thread(cluster.delete_pod, "one", grace=0)
            await until(lambda: sink.names == {"two"}, "the changes are reported")
            assert sink.calls[0] == "listed 1"
            assert "ADDED two" in sink.calls

    run(scenario())


def test_objects_that_stop_matching_the_selector_are_removed(plane: Plane, cluster: Cluster):
    cluster.make_nodes(1)
    cluster.make_pod("one", scheduler="by-hand")
    cluster.make_pod("two", scheduler="by-hand")

    async def scenario() -> None:
        selector = {"fieldSelector": "spec.nodeName=,spec.schedulerName=by-hand"}
        async with running_reflector(plane, pods_of(cluster), selector=selector) as (reflector, sink, _):
            await reflector.synced.wait()
            assert sink.names == {"one", "two"}
            await asyncio.to_thread(cluster.bind, "one", "node-0")
            await until(lambda: sink.names == {"two"}, "the bound pod is removed")

    run(scenario())


def test_a_watch_that_is_cut_resumes_where_it_stopped(plane: Plane, cluster: Cluster):
    async def scenario() -> None:
        async with running_reflector(plane, pods_of(cluster)) as (reflector, sink, api):
            await reflector.synced.wait()
            for name in ("one", "two", "three"):
                await until_watching(api)
                watches = reflector.watches
                for connection in list(api._pool._busy):
                    connection.abort("cut by the test")
                    connection._wake()
                await asyncio.to_thread(cluster.make_pod, name, scheduler="by-hand")
                await until(lambda name=name: name in sink.names, f"{name} is reported")  # type: ignore[misc]
                assert reflector.watches > watches
            assert reflector.lists == 1

    run(scenario())


def test_an_expired_resource_version_leads_to_a_new_list(plane: Plane, cluster: Cluster):
    cluster.make_pod("one", scheduler="by-hand")
    plane.restart_apiserver()  # a new one does not know older versions

    async def scenario() -> None:
        sink = RecordingSink()
        async with connected(Access(kubeconfig=str(plane.kubeconfig()))) as api:
            reflector = Reflector(api, pods_of(cluster), sink)
            reflector._version = "1"
            task = asyncio.create_task(reflector.run())
            await until(reflector.synced.is_set, "the objects are listed")
            task.cancel()
            assert sink.calls == ["listed 1"]
            assert reflector.lists == 1

    run(scenario())


def test_the_objects_are_right_after_a_restart_of_the_apiserver(plane: Plane, cluster: Cluster):
    cluster.make_pod("before", scheduler="by-hand")

    async def scenario() -> None:
        async with running_reflector(plane, pods_of(cluster)) as (reflector, sink, _):
            await reflector.synced.wait()
            await asyncio.to_thread(plane.stop_apiserver)
            await until(lambda: "no answer from the Kubernetes API" in reflector.problem, "the outage is reported")
            plane.start_apiserver()
            await asyncio.to_thread(cluster.delete_pod, "before", grace=0)
            await asyncio.to_thread(cluster.make_pod, "after", scheduler="by-hand")
            await until(lambda: sink.names == {"after"}, "the objects are right again", 60)
            assert reflector.problem == ""

    run(scenario())


def test_a_hanging_apiserver_is_detected_and_the_objects_are_right_afterwards(plane: Plane, cluster: Cluster):
    async def scenario() -> None:
        async with running_reflector(plane, pods_of(cluster), idle_timeout_s=1.0) as (reflector, sink, api):
            await reflector.synced.wait()
            await until_watching(api)
            pid = plane.pid("kube-apiserver")
            os.kill(pid, signal.SIGSTOP)
            try:
                await until(lambda: "no data for 1 s" in reflector.problem, "the hang is detected")
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.to_thread(cluster.make_pod, "one", scheduler="by-hand")
            await until(lambda: sink.names == {"one"}, "the objects are right again", 60)
            assert reflector.lists == 1

    run(scenario())


def test_short_watches_follow_each_other_without_a_new_list(plane: Plane, cluster: Cluster):
    async def scenario() -> None:
        async with running_reflector(plane, pods_of(cluster), watch_s=2) as (reflector, sink, _):
            await until(lambda: reflector.watches >= 3, "three watches")
            await asyncio.to_thread(cluster.make_pod, "one", scheduler="by-hand")
            await until(lambda: sink.names == {"one"}, "the pod is reported")
            assert reflector.lists == 1

    run(scenario())


def test_a_list_in_pages_is_complete(plane: Plane, cluster: Cluster):
    cluster.make_nodes(25)

    async def scenario() -> None:
        sink = RecordingSink()
        async with connected(Access(kubeconfig=str(plane.kubeconfig()))) as api:
            reflector = Reflector(api, Resource("/api/v1/nodes", Node), sink, page=10)
            reflector._listed_once = True  # a first list is not paged: it comes from the watch cache
            task = asyncio.create_task(reflector.run())
            await reflector.synced.wait()
            task.cancel()
        assert sink.names == {f"node-{at}" for at in range(25)}

    run(scenario())


def test_a_collection_that_is_not_installed_is_empty_until_it_is(plane: Plane):
    async def scenario() -> None:
        resource = Resource("/apis/scheduling.missing.example/v1/podgroups", Namespace)
        async with running_reflector(plane, resource) as (reflector, sink, _):
            await reflector.synced.wait()
            assert (sink.calls, reflector.problem) == (["listed 0"], "")

    run(scenario())


def test_a_forbidden_collection_is_reported_and_not_synced(plane: Plane):
    async def scenario() -> None:
        nodes = Resource("/api/v1/nodes", Node)
        async with running_reflector(plane, nodes, user="unprivileged") as (reflector, sink, _):
            await until(lambda: reflector.problem, "a problem is reported")
            assert 'cannot list resource "nodes"' in reflector.problem
            assert not reflector.synced.is_set()
            assert sink.calls == []

    run(scenario())


def test_the_versions_of_a_group_are_discovered(plane: Plane):
    async def scenario() -> None:
        async with connected(Access(kubeconfig=str(plane.kubeconfig("hodei")))) as api:
            versions = await served_versions(api, "scheduling.k8s.io")
            assert versions[0] == "v1"
            assert "v1alpha2" in versions
            assert await served_versions(api, "missing.example") == []
            assert (await served_resources(api, "", "v1"))["pods/binding"] == "Binding"
            assert (
                await served_path(api, "scheduling.k8s.io", "podgroups") == "/apis/scheduling.k8s.io/v1alpha2/podgroups"
            )
            assert await served_path(api, "scheduling.k8s.io", "nothings") == ""

    run(scenario())


def test_leadership_passes_to_the_other_contender(plane: Plane, cluster: Cluster):
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{cluster.namespace}/leases/hodei"

    async def scenario() -> None:
        async with (
            connected(Access(kubeconfig=str(plane.kubeconfig()))) as first,
            connected(Access(kubeconfig=str(plane.kubeconfig()))) as second,
        ):
            short = {"lease_s": 3, "renew_within_s": 2.0, "renew_every_s": 0.2}
            one = Leadership(first, cluster.namespace, "hodei", "one", **short)  # type: ignore[arg-type]
            two = Leadership(second, cluster.namespace, "hodei", "two", **short)  # type: ignore[arg-type]
            tasks = [asyncio.create_task(one.run()), asyncio.create_task(two.run())]
            await until(lambda: one.leads or two.leads, "one of them leads")
            leader, other = (one, two) if one.leads else (two, one)
            await until(lambda: other.holder, "the other has read the lease")
            assert not other.leads
            assert (await asyncio.to_thread(cluster.get, lease))["spec"]["holderIdentity"] == other.holder
            await leader.release()
            assert leader.lost.is_set()
            await until(lambda: other.leads, "the other leads at once", 2)

            # The leader dies without a release: its task is cancelled.
            third = Leadership(first, cluster.namespace, "hodei", "three", **short)  # type: ignore[arg-type]
            tasks.append(asyncio.create_task(third.run()))
            tasks[1 if other is two else 0].cancel()
            await until(lambda: third.leads, "the third leads when the lease has expired", 10)
            assert (await asyncio.to_thread(cluster.get, lease))["spec"]["leaseTransitions"] == 2
            for task in tasks:
                task.cancel()

    run(scenario())


def test_a_leader_that_is_cut_off_steps_down(plane: Plane, cluster: Cluster):
    async def scenario() -> None:
        async with connected(Access(kubeconfig=str(plane.kubeconfig()))) as api:
            one = Leadership(api, cluster.namespace, "hodei", "one", lease_s=3, renew_within_s=1.0, renew_every_s=0.2)
            task = asyncio.create_task(one.run())
            await until(lambda: one.leads, "it leads")
            await asyncio.to_thread(plane.stop_apiserver)
            await until(one.lost.is_set, "it has stepped down", 5)
            assert "no answer" in one.problem
            task.cancel()
        plane.start_apiserver()

    run(scenario())
