"""Manifests as the pods that the cluster's controllers would make of them: all of them, not one for each workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct, structs

from hodei.kube.api.group_objects import GroupedWorkload, MemberGroup, PodGroup
from hodei.kube.api.objects import Meta, Owner, Pod, from_plain
from hodei.model.errors import InvalidInput

# Where kinds that make pods keep the template, below which field it says how many there are.
_TEMPLATES = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
_USUAL = ("spec", "template")
_GROUPS: dict[tuple[str, str], type[Any]] = {
    ("scheduling.k8s.io", "PodGroup"): PodGroup,
    ("scheduling.k8s.io", "Workload"): GroupedWorkload,
    ("scheduling.x-k8s.io", "PodGroup"): MemberGroup,
    ("scheduling.volcano.sh", "PodGroup"): MemberGroup,
}
# Nobody waits for an answer about more pods than this.
MOST_PODS = 20_000


class Workload(Struct):
    """`pod`: what each of its pods is; `count`: how many there would be at once (of a DaemonSet one for each node that it
    may be on). `note`: what else is to be said of it."""

    kind: str
    pod: Pod
    count: int = 1
    note: str = ""

    def pods(self) -> list[Pod]:
        """With names and owners as their controller would give them."""
        meta = self.pod.metadata
        if self.kind == "Pod":
            return [structs.replace(self.pod, metadata=structs.replace(meta, uid=f"{meta.namespace}/{meta.name}"))]
        owner = (Owner(self.kind, meta.name, "", True),)
        return [
            structs.replace(
                self.pod,
                metadata=structs.replace(
                    meta,
                    name=f"{meta.name}-{at}",
                    uid=f"{self.kind}/{meta.namespace}/{meta.name}-{at}",
                    owner_references=owner,
                ),
            )
            for at in range(self.count)
        ]


class Manifests(Struct):
    """All workloads of some files, in their order, and the groups of pods among them."""

    workloads: list[Workload]
    groups: list[tuple[str, Any]]  # with the API group of each


def read_manifests(files: list[Path], namespace: str = "") -> Manifests:
    """`namespace`: that of whatever names none."""
    found = Manifests([], [])
    for file in files:
        before = len(found.workloads)
        for number, document in enumerate(_documents(file)):
            if not isinstance(document, dict) or "kind" not in document:
                raise InvalidInput(f"{file}, document {number + 1}: not a Kubernetes object", hint="it needs a kind")
            for one in document.get("items") or [] if document["kind"] == "List" else [document]:
                if isinstance(one, dict) and "kind" in one:
                    _take(one, file, namespace, found)
        if len(found.workloads) == before:
            hint = "a Pod, Deployment, Job, StatefulSet, ..."
            raise InvalidInput(f"{file} holds no pod and no workload", hint=hint)
    if sum(one.count for one in found.workloads) > MOST_PODS:
        raise InvalidInput(f"these are more than {MOST_PODS} pods", hint="plan them in parts")
    return found


def _documents(file: Path) -> list[Any]:
    try:
        return [found for found in yaml.safe_load_all(file.read_text("utf-8")) if found]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidInput(f"cannot read {file}: {error}", hint="give a manifest of a pod or of a workload") from None


def _take(document: dict[str, Any], file: Path, namespace: str, found: Manifests) -> None:
    kind, about = str(document["kind"]), document.get("metadata")
    about = about if isinstance(about, dict) else {}
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    template: Any = document
    for step in _TEMPLATES.get(kind, _USUAL):
        template = template.get(step) if isinstance(template, dict) else None
    try:
        if (group, kind) in _GROUPS:
            made = from_plain(document, _GROUPS[group, kind])
            found.groups.append((group, structs.replace(made, metadata=_named(made.metadata, namespace))))
            return
        if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
            return  # a Service or a ConfigMap beside it
        own = {"namespace": about.get("namespace"), "name": about.get("name") or about.get("generateName")}
        meta = {**(template.get("metadata") or {}), **{key: value for key, value in own.items() if value}}
        pod = from_plain({"metadata": meta, "spec": template["spec"]}, Pod)
        count, note = _count(kind, document)
    except Exception as error:
        raise InvalidInput(f"{file}: the {kind} cannot be read: {error}", hint="kubectl explain pod.spec") from None
    pod = structs.replace(pod, metadata=_named(pod.metadata, namespace))
    found.workloads.append(Workload(kind, pod, count, note))


def _named(meta: Meta, namespace: str) -> Meta:
    return structs.replace(meta, namespace=meta.namespace or namespace, name=meta.name or "?")


def _count(kind: str, document: dict[str, Any]) -> tuple[int, str]:
    """How many pods there are at once, and what to say besides."""
    spec = document.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    note = ""
    if kind == "CronJob":
        note = "each time that it is due"
        if spec.get("suspend"):
            note = "once it is resumed: it is suspended"
        spec = (spec.get("jobTemplate") or {}).get("spec") or {}
    if kind in ("Job", "CronJob"):
        parallelism, completions = _whole(spec.get("parallelism"), 1), _whole(spec.get("completions"), 0)
        if spec.get("suspend"):
            note = "once it is resumed: it is suspended"
        elif completions > parallelism:
            note = f"{parallelism} at a time, until {completions} have succeeded"
        return (min(parallelism, completions) if completions else parallelism), note
    if kind == "StatefulSet" and spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady":
        note = "one after the other, each when the one before it is ready"
    if kind in ("Pod", "PodTemplate", "DaemonSet"):
        return 1, note
    return _whole(spec.get("replicas"), 1), note


def _whole(value: Any, otherwise: int) -> int:
    if value is None:
        return otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number of pods")
    return value
