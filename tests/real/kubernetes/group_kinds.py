"""The PodGroups of scheduler-plugins and Volcano with the fields, types and subresources that their projects define, so that the
API server drops the same unknown fields. Volcano's PodGroup has no status subresource."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from real.kubernetes.api import wait
from real.kubernetes.plane import Plane

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
TIME: Schema = {"type": "string", "format": "date-time"}
NUMBER: Schema = {"type": "integer", "format": "int32"}
AMOUNTS: Schema = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
    },
}


def object_schema(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


PLUGINS = object_schema(
    spec=object_schema(minMember={**NUMBER, "minimum": 1}, minResources=AMOUNTS, scheduleTimeoutSeconds=NUMBER),
    status=object_schema(
        failed=NUMBER, occupiedBy=TEXT, phase=TEXT, running=NUMBER, scheduleStartTime=TIME, succeeded=NUMBER
    ),
)  # fmt: skip
CONDITION = object_schema(lastTransitionTime=TIME, message=TEXT, reason=TEXT, status=TEXT, transitionID=TEXT, type=TEXT)
VOLCANO = object_schema(
    spec=object_schema(
        minMember=NUMBER, minResources=AMOUNTS, minTaskMember={"type": "object", "additionalProperties": NUMBER},
        priorityClassName=TEXT, queue={**TEXT, "default": "default"},
    ),
    status=object_schema(
        conditions={"type": "array", "items": CONDITION}, failed=NUMBER, phase=TEXT, running=NUMBER, succeeded=NUMBER
    ),
)  # fmt: skip
VOLCANO_JOB = object_schema(
    spec=object_schema(schedulerName=TEXT, minAvailable=NUMBER), status={"type": "object", "x-kubernetes-preserve-unknown-fields": True}
)  # fmt: skip


def kind(group: str, version: str, name: str, schema: Schema, *, status: bool) -> dict[str, Any]:
    plural = f"{name.lower()}s"
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    if status:
        served["subresources"] = {"status": {}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {
                "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"
            },
        },
        "spec": {
            "group": group,
            "names": {"plural": plural, "singular": name.lower(), "kind": name, "listKind": f"{name}List"},
            "scope": "Namespaced",
            "versions": [served],
        },
    }


KINDS = (
    ("scheduling.x-k8s.io", "v1alpha1", "PodGroup", PLUGINS, True),
    ("scheduling.volcano.sh", "v1beta1", "PodGroup", VOLCANO, False),
    ("batch.volcano.sh", "v1alpha1", "Job", VOLCANO_JOB, True),
)


def defined(plane: Plane) -> Iterator[None]:
    """Serve the kinds while the generator is suspended."""
    yield from served(plane, [kind(*one[:4], status=one[4]) for one in KINDS])


def served(plane: Plane, definitions: list[dict[str, Any]]) -> Iterator[None]:
    """Waits until the definitions are deleted: one created while its predecessor is being deleted is deleted with it."""
    paths = plane.api.apply(definitions)
    for one in definitions:
        group, version, name = one["spec"]["group"], one["spec"]["versions"][0]["name"], one["spec"]["names"]["kind"]
        plane.api.path_of({"apiVersion": f"{group}/{version}", "kind": name, "metadata": {"name": "any"}})
    yield
    for path in paths:
        plane.api.delete(path)
    for path in paths:
        wait(lambda path=path: not plane.api.exists(path), f"{path} is deleted", 60)
    plane.api.forget_kinds()
