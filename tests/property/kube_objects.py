"""Malformed Kubernetes objects: every field that the scheduler reads, with any value in it.

The generator walks the structs that the watches decode to, so it covers new fields without a change. Each object comes from
its own seed: a failing list of seeds shrinks to the objects that cause the failure.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from hodei.kube.api import objects
from hodei.kube.api.objects import (
    Claim,
    CsiDriver,
    CsiNode,
    GroupedWorkload,
    MemberGroup,
    Namespace,
    Node,
    Pod,
    PodDisruptionBudget,
    PodGroup,
    Service,
    StorageCapacity,
    StorageClass,
    Volume,
    Workload,
)
from hodei.kube.scheduler import gangs, translate

# The path of each watched collection, and the struct of its objects. Most objects are pods.
KINDS: dict[str, type[Any]] = {
    "/api/v1/pods": Pod,
    "/api/v1/nodes": Node,
    "/api/v1/namespaces": Namespace,
    "/api/v1/persistentvolumeclaims": Claim,
    "/api/v1/persistentvolumes": Volume,
    "/apis/storage.k8s.io/v1/storageclasses": StorageClass,
    "/apis/storage.k8s.io/v1/csinodes": CsiNode,
    "/apis/storage.k8s.io/v1/csidrivers": CsiDriver,
    "/apis/storage.k8s.io/v1/csistoragecapacities": StorageCapacity,
    "/apis/policy/v1/poddisruptionbudgets": PodDisruptionBudget,
    "/api/v1/services": Service,
    "/api/v1/replicationcontrollers": Service,
    "/apis/apps/v1/replicasets": Workload,
    "/apis/apps/v1/statefulsets": Workload,
    "/apis/scheduling.x-k8s.io/v1alpha1/podgroups": MemberGroup,
    "/apis/scheduling.volcano.sh/v1beta1/podgroups": MemberGroup,
    "/apis/scheduling.k8s.io/v1alpha2/podgroups": PodGroup,
    "/apis/scheduling.k8s.io/v1alpha2/workloads": GroupedWorkload,
}
_WEIGHTS = [30 if kind in (Pod,) else 6 if kind is Node else 2 for kind in KINDS.values()]

PRIORITY = "example.com/priority"
KEYS = (
    translate.ESTIMATE, translate.MAX_EXEC_TIME, PRIORITY, gangs.PLUGINS_LABEL, *gangs.VOLCANO_GROUP, gangs.VOLCANO_MIN,
    gangs.VOLCANO_QUEUE, gangs.VOLCANO_TASK, gangs.VOLCANO_SLA, gangs.KUEUE_GROUP, gangs.KUEUE_TOTAL,
    gangs.KUEUE_QUEUE, *gangs.YUNIKORN_APPS, "yunikorn.apache.org/task-group-name", "yunikorn.apache.org/task-groups",
    "yunikorn.apache.org/schedulingPolicyParameters", "yunikorn.apache.org/queue", gangs.ANNOTATION, gangs.ANNOTATION_SIZE,
    gangs.ANNOTATION_TIMEOUT, objects.BIND_COMPLETED, objects.SELECTED_NODE, objects.BETA_CLASS,
    "hodei.io/expected-start", "hodei.io/expected-start-latest", "topology.kubernetes.io/zone",
    "kubernetes.io/hostname", "kubernetes.io/arch", "app", "a",
)  # fmt: skip
_DEEP = '{"a":' * 3000 + "1" + "}" * 3000
_TASKS = (
    '[{"name":"a","minMember":2}]', '[{"name":"a","minMember":-1}]', '[{"name":"a","minMember":99999999999999999999}]',
    '[{"name":1}]', '{"a":1}', "[", "null", "[null]", _DEEP, '[{"name":"a","minMember":1e400}]',
)  # fmt: skip
NUMBERS = (
    "0", "1", "2", "3", "10", "-1", "+3", "²", "١٢", "５", "1.5", "1e3", "1e400", "9" * 25, "9" * 400, "NaN", "inf",
    "-inf", "", " ", "0x10", "1_000", "1 0", "999999999", "9223372036854775807", "9223372036854775808", "-" * 20,
)  # fmt: skip
DURATIONS = ("10s", "1h", "1h30m", "²s", "9" * 30 + "h", "-5m", "1e9d", "00:00:01", "٣s", "nan", "1w", *NUMBERS)
QUANTITIES = (
    "1", "100m", "64Mi", "1Gi", "0", "1e3", "9E", "99999999999E", "9e99999999", "1e-99999999", "-1", "²", "１Gi", "1 Gi",
    "NaN", "infinity", "", "0.0000000001", "9" * 99, "9" * 101, "+5", ".5", "5.", "1Zi", 1, 0, -1, 1.5, 2**63, 10**19, 1e300,
)  # fmt: skip
_PLAIN_QUANTITIES = ("1", "100m", "64Mi", "2", "0")
_PLAIN = ("a", "b", "c")
RESOURCES = ("cpu", "memory", "pods", "ephemeral-storage", "storage", "nvidia.com/gpu", "hugepages-2Mi", "", "²", "cpu~unsaid", translate.SLOT, "gpu", "attachable-volumes-x")  # fmt: skip
INTS = (0, 1, 2, 3, 30, 100, -1, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63), 10**25)
TEXTS = (
    "a", "b", "c", "ns", "n-0", "n-1", "x" * 300, "", " ", "²", "\u0000", "\ud83d\ude00", "a/b/c", "../..", "%s {0}", "In",
    "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Equal", "NoSchedule", "NoExecute", "PreferNoSchedule", "DoNotSchedule",
    "ScheduleAnyway", "Honor", "Ignore", "Always", "Never", "TCP", "UDP", "Ready", "True", "False", "Unknown",
    "PodScheduled", "PodResizePending", "Deferred", "Infeasible", "Running", "Pending", "Succeeded", "Failed", "Available",
    "WaitForFirstConsumer", "Immediate", "kubernetes.io/no-provisioner", "ReadWriteOncePod", "metadata.name", "All",
    "kubernetes.io/hostname", "topology.kubernetes.io/zone", "2026-01-01T00:00:00Z", "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "99999-01-01", "2026-13-45T99:99:99Z", *NUMBERS,
)  # fmt: skip
# Common values of a field, so that objects refer to each other and some are processed to the end.
_USUAL: dict[str, tuple[Any, ...]] = {
    "schedulerName": ("hodei", "hodei", "hodei", "default-scheduler"),
    "name": ("a", "b", "c", "n-0", "n-1"),
    "namespace": ("ns", "ns", "other"),
    "podGroupName": ("a", "b"),
    "phase": ("Pending", "Running"),
    "operator": ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Equal"),
    "effect": ("NoSchedule", "NoExecute", "PreferNoSchedule"),
    "whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    "topologyKey": ("kubernetes.io/hostname", "topology.kubernetes.io/zone"),
    "key": ("a", "app", "kubernetes.io/hostname", "metadata.name"),
    "claimName": ("a", "b"),
    "volumeName": ("a", "b"),
    "storageClassName": ("a", "b"),
    "volumeBindingMode": ("WaitForFirstConsumer", "Immediate"),
    "preemptionPolicy": ("", "Never", "PreemptLowerPriority"),
    "protocol": ("TCP", "UDP"),
    "nodeName": ("", "", "", "n-0", "n-1", "nowhere"),
}
# Mostly left out: with them a pod is not processed further.
_RARE = ("deletionTimestamp", "schedulingGates", "resourceClaims")


class _Generator:
    """`nasty`: the probability of a malformed value. Objects with a single fault are processed furthest."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.nasty = self.random.choice((0.0, 0.01, 0.03, 0.1, 0.4))

    def _is_nasty(self) -> bool:
        return self.random.random() < self.nasty

    def value_of(self, info: inspect.Type, field: str, depth: int) -> Any:
        random = self.random
        if random.random() < self.nasty / 10:
            return self.wrong()
        match info:
            case inspect.StructType(fields=fields):
                chance = 0.5 if depth < 2 else 0.6
                return {
                    one.encode_name: self.value_of(one.type, one.encode_name, depth + 1)
                    for one in fields
                    if random.random() < (0.04 if one.encode_name in _RARE else chance)
                }
            case inspect.UnionType(types=types):
                if any(isinstance(one, inspect.FloatType) for one in types):
                    return random.choice(QUANTITIES) if self._is_nasty() else random.choice(_PLAIN_QUANTITIES)
                some = (
                    [one for one in types if not isinstance(one, inspect.NoneType)] if not self._is_nasty() else types
                )
                return self.value_of(random.choice(some), field, depth)
            case inspect.DictType(value_type=value):
                if isinstance(value, inspect.UnionType):
                    names = RESOURCES if self._is_nasty() else RESOURCES[:3]
                    return {random.choice(names): self.value_of(value, "", depth) for _ in range(random.randrange(4))}
                if field in ("labels", "annotations", "matchLabels", "nodeSelector", "selector"):
                    return dict(self.label() for _ in range(random.choice((0, 0, 1, 2, 6))))
                return {random.choice(TEXTS): self.value_of(value, "", depth + 1) for _ in range(random.randrange(3))}
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                return [self.value_of(item, field, depth + 1) for _ in range(random.choice((0, 0, 1, 2)))]
            case inspect.IntType():
                return random.choice(INTS) if self._is_nasty() else random.choice(INTS[:6])
            case inspect.BoolType():
                return random.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.AnyType():
                return json.loads(_DEEP[: 5 * 900] + "1" + "}" * 900) if self._is_nasty() else self.wrong()
            case _:
                usual = _USUAL.get(field, _PLAIN)
                return random.choice(TEXTS) if self._is_nasty() else random.choice(usual)

    def label(self) -> tuple[str, str]:
        random = self.random
        key = random.choice(KEYS)
        plain: tuple[str, ...] = ("a", "b")
        values = TEXTS
        if key.endswith("task-groups"):
            plain, values = _TASKS[:1], _TASKS
        elif "estimate" in key or "timeout" in key or "waiting-time" in key or "expected" in key:
            plain, values = DURATIONS[:3], DURATIONS
        elif any(part in key for part in ("seconds", "size", "min", "count", "priority")):
            plain, values = NUMBERS[:4], NUMBERS
        elif "Parameters" in key:
            plain, values = ("",), tuple(f"placeholderTimeoutInSeconds={number}" for number in NUMBERS)
        return key, random.choice(values if self._is_nasty() or random.random() < 0.2 else plain)

    def wrong(self) -> Any:
        deep: Any = 1
        for _ in range(200):
            deep = [deep]
        return self.random.choice(
            (None, True, -1, 10**30, 1.5, 1e300, "text", [], {}, [1], {"a": 1}, [None], {"a": None}, deep)
        )


def random_object(seed: int) -> tuple[str, bytes]:
    """The collection that an object belongs to, and the object as the API would write it."""
    generator = _Generator(seed)
    random = generator.random
    path = random.choices(list(KINDS), _WEIGHTS)[0]
    generated = generator.value_of(inspect.type_info(KINDS[path]), "", 0)
    if not isinstance(generated, dict):
        return path, _encode(generated)
    if random.random() < 0.97:  # else even the name and the uid may be missing
        meta = generated.get("metadata")
        meta = meta if isinstance(meta, dict) else {}
        name = random.choice((f"o{seed % 100_000}", "a", "b", "c", "n-0", "n-1"))
        cluster_wide = KINDS[path] in (Node, Namespace, Volume, StorageClass, CsiNode, CsiDriver)
        generated["metadata"] = {
            **meta, "name": name, "namespace": "" if cluster_wide else random.choice(("ns", "ns", "other")),
            "uid": f"u{seed}", "resourceVersion": str(seed % 10_000 + 1),
        }  # fmt: skip
    if KINDS[path] is Node and random.random() < 0.5:  # some nodes accept pods
        generated["status"] = {
            **_a_dict(generated.get("status")),
            "allocatable": {"cpu": "8", "memory": "64Gi", "pods": "20"},
        }
        generated["spec"] = {**_a_dict(generated.get("spec")), "taints": [], "unschedulable": False}
    if KINDS[path] is Pod and random.random() < 0.7:  # some pods are processed to the end
        generated["spec"] = {**_a_dict(generated.get("spec")), "schedulerName": "hodei"}
        generated["status"] = {**_a_dict(generated.get("status")), "phase": random.choice(("Pending", "Running"))}
        for rare in ("resourceClaims", "nodeSelector", "volumes", "affinity", "nodeName"):
            if random.random() < 0.6:
                generated["spec"].pop(rare, None)
    return path, _encode(generated)


def _a_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False).encode()


def checked(path: str, body: bytes) -> bool:
    """Whether an object decodes as its kind, so that an API server could serve it."""
    try:
        msgspec.json.decode(body, type=KINDS[path])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
