"""What changed of a pod or a node, as far as scheduling reads it."""

from __future__ import annotations

from msgspec import structs

from hodei.kube.api.objects import Meta, Node, Pod
from hodei.model.job import JobSpec


def same_spec(a: Pod, b: Pod) -> bool:
    """Whether a binding is all that happened to it."""
    if a.metadata.labels != b.metadata.labels or resizes(a) or resizes(b):
        return False
    return a.spec == b.spec or structs.replace(a.spec, node_name=b.spec.node_name) == b.spec


def same_hold(a: JobSpec, b: JobSpec) -> bool:
    return a is b or a == b


def differs(a: Pod, b: Pod) -> bool:
    """Whether anything changed that scheduling reads."""
    old, new = a.metadata, b.metadata
    return (
        a.spec != b.spec
        or old.labels != new.labels
        or (old.annotations != new.annotations and said(old) != said(new))
        or (old.deletion_timestamp is None) != (new.deletion_timestamp is None)
        or resizes(a)
        or resizes(b)
    )


def said(meta: Meta) -> dict[str, str]:
    """Without what we write on pods ourselves."""
    return {name: value for name, value in meta.annotations.items() if not name.startswith("hodei.io/expected-start")}


def has_claims(pod: Pod) -> bool:
    return any(one.persistent_volume_claim is not None or one.ephemeral is not None for one in pod.spec.volumes)


def resizes(pod: Pod) -> bool:
    return any(one.type.startswith("PodResize") for one in pod.status.conditions)


def node_differs(a: Node, b: Node) -> bool:
    return (
        a.spec != b.spec
        or a.metadata.labels != b.metadata.labels
        or a.status.allocatable != b.status.allocatable
        or a.status.images != b.status.images
        or a.status.conditions != b.status.conditions
    )
