"""For tests: a namespace in the control plane, with short calls to create and inspect nodes and pods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from real.kubernetes.api import DEADLINE_S, T, wait
from real.kubernetes.plane import Plane

_HEARTBEAT = "2026-01-01T00:00:00Z"
ZONE = "topology.kubernetes.io/zone"


def node(
    name: str,
    cpu: str = "4",
    memory: str = "16Gi",
    pods: int = 110,
    *,
    labels: Mapping[str, str] | None = None,
    taints: Iterable[Mapping[str, str] | str] = (),
    zone: str = "",
    more: Mapping[str, str] | None = None,
    ready: bool = True,
) -> dict[str, Any]:
    """A Node as its kubelet would register it. `taints`: objects or "key=value:Effect"; `more`: other resources."""
    amounts = {"cpu": cpu, "memory": memory, "pods": str(pods), "ephemeral-storage": "100Gi", **(more or {})}
    standard = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    if zone:
        standard[ZONE] = zone
    conditions = [("Ready", "True" if ready else "False")]
    conditions += [(f"{kind}Pressure", "False") for kind in ("Memory", "Disk", "PID")]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**standard, **(labels or {})}},
        "spec": {"taints": [_taint(taint) for taint in taints]},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [
                {
                    "type": type,
                    "status": status,
                    "reason": "Test",
                    "lastHeartbeatTime": _HEARTBEAT,
                    "lastTransitionTime": _HEARTBEAT,
                }
                for type, status in conditions
            ],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
        },
    }


def pod(
    name: str,
    cpu: str = "100m",
    memory: str = "64Mi",
    *,
    scheduler: str = "hodei",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    requests: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A Pod with one container. `requests`: other resources; all other fields go into `spec` under their Kubernetes names
    (nodeSelector, affinity, tolerations, priorityClassName, containers ...)."""
    extended = {key: value for key, value in (requests or {}).items() if key not in ("cpu", "memory")}
    amounts = {"cpu": cpu, "memory": memory, **(requests or {})}
    resources: dict[str, Any] = {"requests": {key: value for key, value in amounts.items() if value}}
    if extended:
        resources["limits"] = extended  # Kubernetes requires them to be equal
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {}), "annotations": dict(annotations or {})},
        "spec": {
            "schedulerName": scheduler,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [{"name": "main", "image": "registry.k8s.io/pause:3.10", "resources": resources}],
            **spec,
        },
    }


class Cluster:
    """One namespace. Paths are absolute; pods are named without the namespace. `close` also deletes what `apply`, `make_node`
    and `make_nodes` have created outside of the namespace."""

    def __init__(self, plane: Plane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace
        self.api = plane.api
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self.get, self.post, self.put = self.api.get, self.api.post, self.api.put
        self.patch, self.delete, self.items = self.api.patch, self.api.delete, self.api.items
        self._created: list[str] = []
        self.api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})

    def apply(self, objects: str | list[dict[str, Any]]) -> list[str]:
        """Apply YAML or objects, in this namespace if they name none; returns their paths."""
        paths = self.api.apply(objects, self.namespace)
        self._created += [path for path in paths if f"/namespaces/{self.namespace}/" not in path]
        return paths

    def allow_hodei(self, roles: Path) -> None:
        """Also grant what this file grants, such as an optional role of deploy/kubernetes; for this test only."""
        self._created += self.plane.allow(roles)

    def kubectl(self, *arguments: str, user: str = "admin", input: str = "") -> str:
        return self.plane.kubectl(f"--namespace={self.namespace}", *arguments, user=user, input=input)

    def wait(self, predicate: Callable[[], T | None], what: str, timeout: float = DEADLINE_S) -> T:
        return wait(predicate, what, timeout)

    def make_nodes(
        self, count: int, cpu: str = "4", memory: str = "16Gi", pods: int = 110, *, zones: int = 0,
        prefix: str = "node", **fields: Any,
    ) -> list[str]:  # fmt: skip
        """Nodes `prefix`-0, `prefix`-1 and so on, ready and without the taint of new nodes. `zones` spreads them over zone-0 and on."""
        names = [f"{prefix}-{at}" for at in range(count)]
        for at, name in enumerate(names):
            zone = f"zone-{at % zones}" if zones else fields.get("zone", "")
            self._register(node(name, cpu, memory, pods, **{**fields, "zone": zone}))
        self._until_usable(names)
        return names

    def make_node(self, name: str, *amounts: Any, **fields: Any) -> str:
        """Create `node(name, ...)`."""
        self._register(node(name, *amounts, **fields))
        if fields.get("ready", True):
            self._until_usable([name])
        return name

    def _register(self, wanted: dict[str, Any]) -> None:
        path = f"/api/v1/nodes/{wanted['metadata']['name']}"
        self.post("/api/v1/nodes", wanted)
        self._created.append(path)
        # Admission taints each new node as not ready; without controllers the taint would stay.
        self.patch(path, {"spec": {"taints": wanted["spec"]["taints"] or None}})

    def _until_usable(self, names: list[str]) -> None:
        wanted = set(names)

        def usable() -> bool:
            found = [one for one in self.items("/api/v1/nodes") if one["metadata"]["name"] in wanted]
            tainted = [one for one in found for taint in one["spec"].get("taints", []) if "not-ready" in taint["key"]]
            return len(found) == len(wanted) and not tainted

        self.wait(usable, f"{len(names)} nodes are usable")

    def node(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/api/v1/nodes/{name}")
        return found

    def set_ready(self, name: str, ready: bool) -> None:
        """Set the condition that its kubelet would set; the controllers taint the node accordingly."""
        condition = {
            "type": "Ready",
            "status": "True" if ready else "False",
            "reason": "Test",
            "lastTransitionTime": _HEARTBEAT,
        }
        self.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}}, "strategic")

    def make_pod(self, name: str, *amounts: str, **fields: Any) -> dict[str, Any]:
        """Create `pod(name, ...)`."""
        return self.create(pod(name, *amounts, **fields))

    def make_pods(self, count: int, *amounts: str, prefix: str = "pod", **fields: Any) -> list[str]:
        names = [f"{prefix}-{at}" for at in range(count)]
        for name in names:
            self.make_pod(name, *amounts, **fields)
        return names

    def create(self, wanted: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = self.post(self.pods_path, wanted)
        return made

    def pod(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"{self.pods_path}/{name}")
        return found

    def pods(self, **selectors: str) -> list[dict[str, Any]]:
        """All pods of the namespace that match labelSelector= and fieldSelector=."""
        return self.items(self.pods_path, **selectors)

    def delete_pod(self, name: str, grace: int | None = None) -> None:
        self.delete(f"{self.pods_path}/{name}", grace)

    def bind(self, name: str, to: str) -> None:
        """Bind the pod as another scheduler would."""
        target = {"apiVersion": "v1", "kind": "Node", "name": to}
        self.post(f"{self.pods_path}/{name}/binding", {"metadata": {"name": name}, "target": target})

    def bound_to(self, name: str) -> str:
        """The node of the pod; "" if it is not bound."""
        return str(self.pod(name)["spec"].get("nodeName", ""))

    def bound(self) -> dict[str, str]:
        """The node of each bound pod of the namespace."""
        return {
            one["metadata"]["name"]: one["spec"]["nodeName"] for one in self.pods() if "nodeName" in one["spec"]
        }  # fmt: skip

    def holding(self) -> dict[str, str]:
        """The node of each pod of the namespace that holds capacity: bound, and neither Succeeded nor Failed."""
        active = self.pods(fieldSelector="status.phase!=Succeeded,status.phase!=Failed")
        return {one["metadata"]["name"]: one["spec"]["nodeName"] for one in active if "nodeName" in one["spec"]}

    def until_bound(self, *names: str, timeout: float = DEADLINE_S) -> dict[str, str]:
        """Wait until all of `names` are bound, or all pods of the namespace; returns the node of each."""

        def all_bound() -> dict[str, str] | None:
            found = {one["metadata"]["name"]: one["spec"].get("nodeName", "") for one in self.pods()}
            wanted = {name: found.get(name, "") for name in names or found}
            return wanted if wanted and all(wanted.values()) else None

        try:
            return self.wait(all_bound, f"{', '.join(names) or 'all pods'} bound", timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; {json.dumps(self.pod_states(*names), indent=1)}") from None

    def until_phase(self, name: str, phase: str, timeout: float = DEADLINE_S) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            found = self.pod(name)
            return found if found["status"].get("phase") == phase else None

        return self.wait(reached, f"{name} is {phase}", timeout)

    def until_deleted(self, *names: str, timeout: float = DEADLINE_S) -> None:
        def deleted() -> bool:
            return not {one["metadata"]["name"] for one in self.pods()} & set(names)

        self.wait(deleted, f"{', '.join(names)} deleted", timeout)

    def condition(self, name: str, type: str = "PodScheduled") -> dict[str, Any]:
        """The condition of the pod with this type; {} if it has none."""
        conditions = self.pod(name)["status"].get("conditions", [])
        return next((one for one in conditions if one["type"] == type), {})

    def until_condition(
        self, name: str, type: str, status: str, reason: str = "", timeout: float = DEADLINE_S
    ) -> dict[str, Any]:
        """Wait until the condition has this status and reason; returns it."""

        def reached() -> dict[str, Any] | None:
            found = self.condition(name, type)
            return found if found.get("status") == status and reason in ("", found.get("reason")) else None

        try:
            return self.wait(reached, f"{name} has {type}={status} {reason}".strip(), timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; {json.dumps(self.pod_states(name), indent=1)}") from None

    def events_of(self, name: str, reason: str = "") -> list[dict[str, Any]]:
        """Events of core/v1, oldest first (reason, message, type, action, reportingComponent, count, series)."""
        path = f"/api/v1/namespaces/{self.namespace}/events"
        found = self.items(path, fieldSelector=f"involvedObject.name={name}")
        found.sort(key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["resourceVersion"]))
        return [one for one in found if reason in ("", one["reason"])]

    def until_event(self, name: str, reason: str, timeout: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for an event with this reason; returns the newest."""
        return self.wait(lambda: self.events_of(name, reason), f"{name} has the event {reason}", timeout)[-1]

    def pod_states(self, *names: str) -> dict[str, Any]:
        """For messages of failed tests: the node, the condition and the events of each pod."""
        return {
            one["metadata"]["name"]: {
                "node": one["spec"].get("nodeName", ""),
                "scheduled": next((c for c in one["status"].get("conditions", []) if c["type"] == "PodScheduled"), {}),
                "events": [f"{e['reason']}: {e.get('message')}" for e in self.events_of(one["metadata"]["name"])][-5:],
            }
            for one in self.pods()
            if not names or one["metadata"]["name"] in names
        }

    def close(self) -> None:
        """Delete the namespace first, so that no owner creates its pods again; then its pods; then objects outside of it."""
        self.delete(f"/api/v1/namespaces/{self.namespace}")
        self.delete(self.pods_path, grace=0)
        for path in reversed(self._created):
            self.delete(path, grace=0, missing_ok=True)
        self.wait(lambda: not self.pods(), f"all pods of {self.namespace} are deleted")


def _taint(taint: Mapping[str, str] | str) -> dict[str, str]:
    if not isinstance(taint, str):
        return dict(taint)
    pair, effect = taint.rsplit(":", 1)
    key, _, value = pair.partition("=")
    return {"key": key, "value": value, "effect": effect}
