"""The node requirements of a pod's volumes, from the claims, volumes, storage classes and drivers of the cluster.

A bound volume is reachable from certain nodes. An unbound claim that waits for its first consumer can use a free volume of its
class, or one that its class provisions. The volumes plugin counts attach limits and exclusive volumes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from hodei.kube.api import objects as k8s
from hodei.kube.api.quantities import MAX_INT32, amount, bounded
from hodei.kube.scheduler.selectors import NEVER, InvalidSelector, UnknownOperator, matches_node, node_term, selector
from hodei.model.affinity import NodeTerm, Requirement, all_match
from hodei.model.errors import InvalidInput
from hodei.model.job import Reason
from hodei.model.node import Volume as VolumeNeed
from hodei.model.node import VolumeCandidate, VolumeReach

READ_WRITE_ONCE_POD = "ReadWriteOncePod"
_STABLE_LABEL = {
    "failure-domain.beta.kubernetes.io/zone": "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region": "topology.kubernetes.io/region",
}
_ZONES = (*_STABLE_LABEL, *_STABLE_LABEL.values())
_NODES_WITHOUT_ZONE = NodeTerm(tuple(Requirement(label, "DoesNotExist") for label in _ZONES))


class Storage(Struct, frozen=True):
    """Claims and capacities by (namespace, name), everything else by name."""

    claims: Mapping[tuple[str, str], k8s.Claim] = {}
    volumes: Mapping[str, k8s.Volume] = {}
    classes: Mapping[str, k8s.StorageClass] = {}
    drivers: Mapping[str, k8s.CsiDriver] = {}
    capacities: Mapping[tuple[str, str], k8s.StorageCapacity] = {}


NO_STORAGE = Storage()


class PodRefused(Exception):
    """The pod cannot be scheduled on any node now."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.reason = Reason("volumes", code, text, kind="volume")


def check_readable(given: object) -> None:
    """Raise if a volume or a storage capacity cannot be read. Such an object is never used, but must not block pods either."""
    if isinstance(given, k8s.Volume):
        amount(given.spec.capacity.get("storage", 0))
        _node_terms(given)
    elif isinstance(given, k8s.StorageCapacity):
        amount(given.largest or 0)
        selector(given.node_topology)


def volumes_of(pod: k8s.Pod, storage: Storage) -> tuple[VolumeNeed, ...]:
    """The requirements of all volumes. Raises PodRefused if no node can provide one of them now."""
    out: list[VolumeNeed] = []
    unbound = False
    for volume in pod.spec.volumes:
        name = claim_name(pod, volume)
        if name:
            claim = _find_claim(pod, volume, name, storage)
            if claim.bound:
                out.append(_bound_volume(claim, storage))
            else:
                cls = storage.classes.get(claim.class_name)
                unbound = unbound or cls is None or not cls.waits_for_consumer
                if cls is not None and cls.waits_for_consumer:
                    out.append(_unbound_volume(claim, cls, storage))
        else:
            out += _inline_disks(volume)
    if unbound and not pod.spec.node_name:
        raise PodRefused("VOLUME_UNBOUND", "pod has unbound immediate PersistentVolumeClaims")
    return tuple(out)


def claim_name(pod: k8s.Pod, volume: k8s.PodVolume) -> str:
    """The name of the volume's claim; that of an ephemeral volume is derived from the pod."""
    if volume.persistent_volume_claim is not None:
        return volume.persistent_volume_claim.claim_name
    return f"{pod.metadata.name}-{volume.name}" if volume.ephemeral is not None else ""


def volume_limits(node: k8s.CsiNode | None) -> dict[str, int]:
    """The attach limit of each driver that has one."""
    drivers = node.spec.drivers if node is not None else ()
    return {
        driver.name: bounded(driver.allocatable.count, 0, MAX_INT32)
        for driver in drivers
        if driver.allocatable is not None and driver.allocatable.count is not None
    }


def claims_to_bind(pod: k8s.Pod, storage: Storage) -> tuple[k8s.Claim, ...]:
    """The unbound claims that wait for their first consumer (`volume.kubernetes.io/selected-node`)."""
    found = []
    for volume in pod.spec.volumes:
        claim = storage.claims.get((pod.metadata.namespace, claim_name(pod, volume)))
        cls = storage.classes.get(claim.class_name) if claim is not None else None
        if claim is not None and not claim.bound and cls is not None and cls.waits_for_consumer:
            found.append(claim)
    return tuple(found)


def volume_on(
    node: k8s.Node, claim: k8s.Claim, storage: Storage, taken: Container[str] = (), first: str = ""
) -> k8s.Volume | None:
    """The smallest free volume for the claim that the node can reach, `first` if it is one; None if none exists."""

    def reachable(volume: k8s.Volume) -> bool:
        terms = _node_terms(volume)
        return terms is None or any(matches_node(term, node.metadata.name, node.metadata.labels) for term in terms)

    found = [one for one in _matching_volumes(claim, storage) if one.metadata.name not in taken and reachable(one)]
    return min(found, key=lambda one: (one.metadata.name != first, *_by_size(one)), default=None)


def _find_claim(pod: k8s.Pod, volume: k8s.PodVolume, name: str, storage: Storage) -> k8s.Claim:
    claim = storage.claims.get((pod.metadata.namespace, name))
    if claim is None:
        if pod.spec.node_name:
            return k8s.Claim()
        if volume.ephemeral is not None:
            raise PodRefused(
                "VOLUME_MISSING",
                f'waiting for ephemeral volume controller to create the persistentvolumeclaim "{name}"',
            )
        raise PodRefused("VOLUME_MISSING", f'persistentvolumeclaim "{name}" not found')
    if claim.metadata.deletion_timestamp is not None and not pod.spec.node_name:
        raise PodRefused("VOLUME_MISSING", f'persistentvolumeclaim "{name}" is being deleted')
    if volume.ephemeral is not None and not any(
        owner.uid == pod.metadata.uid for owner in claim.metadata.owner_references
    ):
        raise PodRefused(
            "VOLUME_MISSING",
            f'PVC "{pod.metadata.namespace}/{name}" was not created for pod "{pod.metadata.namespace}/{pod.metadata.name}" (pod is not owner)',
        )
    return claim


def _bound_volume(claim: k8s.Claim, storage: Storage) -> VolumeNeed:
    known = storage.volumes.get(claim.spec.volume_name)
    if known is None:
        raise PodRefused("VOLUME_MISSING", "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)")
    terms = _node_terms(known)
    reach = [] if terms is None else [VolumeReach("exists", terms)]
    reach += _zone_reach(known)
    csi = known.spec.csi
    limit, handle = (csi.driver, csi.volume_handle) if csi is not None else ("", known.metadata.name)
    return VolumeNeed(f"{limit}/{handle}" if csi else f"pv/{handle}", tuple(reach), limit, _exclusive_use(claim))


def _zone_reach(volume: k8s.Volume) -> Iterator[VolumeReach]:
    """By zone and region labels: nodes of that zone, and nodes without any zone."""
    for label in _ZONES:
        value = volume.metadata.labels.get(label)
        if value is None:
            continue
        values = tuple(part.strip() for part in value.split("__"))
        terms = [NodeTerm((Requirement(label, "In", values),))]
        if label in _STABLE_LABEL:
            terms.append(
                NodeTerm((Requirement(label, "DoesNotExist"), Requirement(_STABLE_LABEL[label], "In", values)))
            )
        yield VolumeReach("zone", (*terms, _NODES_WITHOUT_ZONE))


def _unbound_volume(claim: k8s.Claim, cls: k8s.StorageClass, storage: Storage) -> VolumeNeed:
    """Where a claim can be bound: near a matching free volume, or where its class can provision one with enough space."""
    candidates: list[VolumeCandidate] = []
    for volume in sorted(_matching_volumes(claim, storage), key=_by_size):
        terms = _node_terms(volume)
        candidates.append(VolumeCandidate(volume.metadata.name, () if terms is None else terms or (NEVER,)))
    provisionable = _provisionable(claim, cls, storage)
    reach: tuple[VolumeReach, ...] = ()
    if all(choice.terms for choice in candidates):  # else it can be bound anywhere
        reachable = tuple(term for choice in candidates for term in choice.terms)
        if provisionable is None:
            reach = (VolumeReach("creatable", reachable or (NEVER,)),)
        else:
            reach = tuple(VolumeReach(one.kind, (*reachable, *one.terms)) for one in provisionable)
    return VolumeNeed(
        claim_handle(claim),
        reach,
        _provisioner(cls),
        _exclusive_use(claim),
        candidates=tuple(candidates),
        creatable=provisionable if candidates else None,
    )


def claim_handle(claim: k8s.Claim) -> str:
    return f"claim/{claim.metadata.namespace}/{claim.metadata.name}"


def _provisionable(claim: k8s.Claim, cls: k8s.StorageClass, storage: Storage) -> tuple[VolumeReach, ...] | None:
    """The conditions under which its class can provision the volume, which must all hold; None for nowhere."""
    if cls.provisioner in ("", k8s.NO_PROVISIONER):
        return None
    out: list[VolumeReach] = []
    if cls.allowed_topologies:
        terms = tuple(
            NodeTerm(tuple(Requirement(one.key, "In", tuple(one.values)) for one in term.match_label_expressions))
            for term in cls.allowed_topologies
        )
        out.append(VolumeReach("creatable", terms))
    driver, requested = storage.drivers.get(cls.provisioner), claim.spec.resources.requests.get("storage")
    if driver is not None and driver.spec.storage_capacity and requested is not None:
        places = _topologies_with(amount(requested), cls.metadata.name, storage)
        if () not in places:
            out.append(VolumeReach("space", tuple(NodeTerm(one) for one in places) or (NEVER,)))
    return tuple(out)


def _topologies_with(size: int, cls: str, storage: Storage) -> list[tuple[Requirement, ...]]:
    """The topologies with capacity for a volume of that size; () means everywhere."""
    out = []
    for one in storage.capacities.values():
        if one.storage_class_name != cls or one.largest is None or not _readable(one) or amount(one.largest) < size:
            continue
        where = selector(one.node_topology)
        if where is not None:
            out.append(where)
    return sorted(out, key=repr)


def _node_terms(volume: k8s.Volume) -> tuple[NodeTerm, ...] | None:
    """The nodes that can reach a volume; None for all."""
    nodes = volume.spec.node_affinity.required if volume.spec.node_affinity is not None else None
    return None if nodes is None else tuple(node_term(term) for term in nodes.node_selector_terms)


def _readable(object: k8s.Volume | k8s.StorageCapacity) -> bool:
    try:
        check_readable(object)
    except (InvalidSelector, UnknownOperator, InvalidInput):
        return False
    return True


def _by_size(volume: k8s.Volume) -> tuple[int, str]:
    return amount(volume.spec.capacity.get("storage", 0)), volume.metadata.name


def _matching_volumes(claim: k8s.Claim, storage: Storage) -> Iterable[k8s.Volume]:
    requested = amount(claim.spec.resources.requests.get("storage", 0))
    labels = selector(claim.spec.selector) or ()
    for volume in storage.volumes.values():
        spec = volume.spec
        ref = spec.claim_ref
        reserved = ref is not None and (ref.namespace, ref.name) == (claim.metadata.namespace, claim.metadata.name)
        matches = reserved or (
            ref is None
            and volume.status.phase in ("", "Available")
            and spec.storage_class_name == claim.class_name
            and set(claim.spec.access_modes) <= set(spec.access_modes)
            and (spec.volume_mode or "Filesystem") == (claim.spec.volume_mode or "Filesystem")
            and all_match(labels, volume.metadata.labels)
        )
        if matches and _readable(volume) and (reserved or amount(spec.capacity.get("storage", 0)) >= requested):
            yield volume


def _provisioner(cls: k8s.StorageClass) -> str:
    """The driver whose attach limit the volume will count against."""
    return "" if cls.provisioner in ("", k8s.NO_PROVISIONER) else cls.provisioner


def _exclusive_use(claim: k8s.Claim) -> Literal["", "anywhere"]:
    return "anywhere" if READ_WRITE_ONCE_POD in claim.spec.access_modes else ""


def _inline_disks(volume: k8s.PodVolume) -> Iterator[VolumeNeed]:
    """Disks named in the pod that two pods of a node cannot share."""
    found: tuple[tuple[str, k8s.Disk | None, bool], ...] = (
        ("gce", volume.gce_persistent_disk, True),
        ("aws", volume.aws_elastic_block_store, False),  # not even read-only
        ("iscsi", volume.iscsi, True),
        ("rbd", volume.rbd, True),
    )
    for kind, disk, read_only_shared in found:
        if disk is not None:
            name = (
                disk.pd_name
                or disk.volume_id
                or disk.iqn
                or f"{','.join(disk.monitors)}/{disk.pool or 'rbd'}/{disk.image}"
            )
            yield VolumeNeed(f"{kind}/{name}", exclusive="node", read_only=read_only_shared and disk.read_only)
