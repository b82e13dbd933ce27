"""What a pod's volumes demand of a node, from the claims, volumes, classes and drivers that the cluster has.

A bound volume says where it is. One that waits for its first consumer may go where a free volume of its class is, or
where its class can make one. Attach limits and volumes that only one pod may use are the plugin's to count.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from hodei.kube.api.objects import (
    NO_PROVISIONER,
    Claim,
    CsiDriver,
    CsiNode,
    Disk,
    Node,
    Pod,
    PodVolume,
    StorageCapacity,
    StorageClass,
    Volume,
)
from hodei.kube.api.quantities import MAX_INT32, amount, bounded
from hodei.kube.scheduler.selectors import NEVER, BadSelector, UnknownOperator, node_term, selector
from hodei.model.affinity import NodeTerm, Requirement, all_match
from hodei.model.errors import InvalidInput
from hodei.model.job import Reason
from hodei.model.node import Volume as Needed
from hodei.model.node import VolumeCandidate, VolumeReach

ONE_POD = "ReadWriteOncePod"
_GA = {
    "failure-domain.beta.kubernetes.io/zone": "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region": "topology.kubernetes.io/region",
}
_ZONES = (*_GA, *_GA.values())
_ANYWHERE_WITHOUT_ZONES = NodeTerm(tuple(Requirement(label, "DoesNotExist") for label in _ZONES))


class Storage(Struct, frozen=True):
    """What is known of storage: claims by (namespace, name), all else by name."""

    claims: Mapping[tuple[str, str], Claim] = {}
    volumes: Mapping[str, Volume] = {}
    classes: Mapping[str, StorageClass] = {}
    drivers: Mapping[str, CsiDriver] = {}
    capacities: Mapping[tuple[str, str], StorageCapacity] = {}


NO_STORAGE = Storage()


class Refused(Exception):
    """The pod can go nowhere as things stand; with the reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.reason = Reason("volumes", code, text, kind="volume")


def check(thing: object) -> None:
    """Raises if a volume, or what a driver says of its storage, cannot be read. Such a one is nobody's to be had; those who
    look for another must not be refused because of it."""
    if isinstance(thing, Volume):
        amount(thing.spec.capacity.get("storage", 0))
        _terms(thing)
    elif isinstance(thing, StorageCapacity):
        amount(thing.largest or 0)
        selector(thing.node_topology)


def volumes_of(pod: Pod, storage: Storage) -> tuple[Needed, ...]:
    """All that its volumes demand; raises Refused if one of them can not be had on any node now."""
    out: list[Needed] = []
    unbound = False
    for volume in pod.spec.volumes:
        name = claim_name(pod, volume)
        if name:
            claim = _claim(pod, volume, name, storage)
            if claim.bound:
                out.append(_bound(claim, storage))
            else:
                cls = storage.classes.get(claim.class_name)
                unbound = unbound or cls is None or not cls.waits
                if cls is not None and cls.waits:
                    out.append(_waiting(claim, cls, storage))
        else:
            out += _inline(volume)
    if unbound and not pod.spec.node_name:
        raise Refused("VOLUME_UNBOUND", "pod has unbound immediate PersistentVolumeClaims")
    return tuple(out)


def claim_name(pod: Pod, volume: PodVolume) -> str:
    """The claim behind a volume; one made for the pod itself is named after both."""
    if volume.persistent_volume_claim is not None:
        return volume.persistent_volume_claim.claim_name
    return f"{pod.metadata.name}-{volume.name}" if volume.ephemeral is not None else ""


def volume_limits(node: CsiNode | None) -> dict[str, int]:
    """How many volumes of each driver a node can take; drivers that say nothing have no limit."""
    drivers = node.spec.drivers if node is not None else ()
    return {
        driver.name: bounded(driver.allocatable.count, 0, MAX_INT32)
        for driver in drivers
        if driver.allocatable is not None and driver.allocatable.count is not None
    }


def to_bind(pod: Pod, storage: Storage) -> tuple[Claim, ...]:
    """The claims that wait for a node to be chosen (`volume.kubernetes.io/selected-node`)."""
    found = []
    for volume in pod.spec.volumes:
        claim = storage.claims.get((pod.metadata.namespace, claim_name(pod, volume)))
        cls = storage.classes.get(claim.class_name) if claim is not None else None
        if claim is not None and not claim.bound and cls is not None and cls.waits:
            found.append(claim)
    return tuple(found)


def volume_on(node: Node, claim: Claim, storage: Storage, taken: Container[str] = (), first: str = "") -> Volume | None:
    """The smallest free volume that suits the claim and can be reached from the node, or the one that is wanted `first` if
    it does; None if one has to be made."""

    def near(volume: Volume) -> bool:
        terms = _terms(volume)
        return terms is None or any(_holds(term, node) for term in terms)

    found = [one for one in _candidates(claim, storage) if one.metadata.name not in taken and near(one)]
    return min(found, key=lambda one: (one.metadata.name != first, *_smallest(one)), default=None)


def _holds(term: NodeTerm, node: Node) -> bool:
    if not term.labels and not term.fields:
        return False  # as everywhere in Kubernetes: an empty term means no node
    fields = {"metadata.name": node.metadata.name}
    return all_match(term.labels, node.metadata.labels) and all_match(term.fields, fields)


# ------------------------------------------------------------------------------------------------ claims


def _claim(pod: Pod, volume: PodVolume, name: str, storage: Storage) -> Claim:
    claim = storage.claims.get((pod.metadata.namespace, name))
    if claim is None:
        if pod.spec.node_name:
            return Claim()
        if volume.ephemeral is not None:
            raise Refused(
                "VOLUME_MISSING",
                f'waiting for ephemeral volume controller to create the persistentvolumeclaim "{name}"',
            )
        raise Refused("VOLUME_MISSING", f'persistentvolumeclaim "{name}" not found')
    if claim.metadata.deletion_timestamp is not None and not pod.spec.node_name:
        raise Refused("VOLUME_MISSING", f'persistentvolumeclaim "{name}" is being deleted')
    if volume.ephemeral is not None and not any(
        owner.uid == pod.metadata.uid for owner in claim.metadata.owner_references
    ):
        raise Refused(
            "VOLUME_MISSING",
            f'PVC "{pod.metadata.namespace}/{name}" was not created for pod "{pod.metadata.namespace}/{pod.metadata.name}" (pod is not owner)',
        )
    return claim


def _bound(claim: Claim, storage: Storage) -> Needed:
    known = storage.volumes.get(claim.spec.volume_name)
    if known is None:
        raise Refused("VOLUME_MISSING", "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)")
    terms = _terms(known)
    reach = [] if terms is None else [VolumeReach("there", terms)]
    reach += _zones(known)
    csi = known.spec.csi
    limit, handle = (csi.driver, csi.volume_handle) if csi is not None else ("", known.metadata.name)
    return Needed(f"{limit}/{handle}" if csi else f"pv/{handle}", tuple(reach), limit, _alone(claim))


def _zones(volume: Volume) -> Iterator[VolumeReach]:
    """Zone and region labels of a volume: nodes of that zone, and nodes that know of no zones at all."""
    for label in _ZONES:
        value = volume.metadata.labels.get(label)
        if value is None:
            continue
        values = tuple(part.strip() for part in value.split("__"))
        terms = [NodeTerm((Requirement(label, "In", values),))]
        if label in _GA:
            terms.append(NodeTerm((Requirement(label, "DoesNotExist"), Requirement(_GA[label], "In", values))))
        yield VolumeReach("zone", (*terms, _ANYWHERE_WITHOUT_ZONES))


def _waiting(claim: Claim, cls: StorageClass, storage: Storage) -> Needed:
    """Where a claim could be bound: at free volumes of its class that suit it, or where its class can make one and has
    enough storage for it."""
    choices: list[VolumeCandidate] = []
    for volume in sorted(_candidates(claim, storage), key=_smallest):
        terms = _terms(volume)
        choices.append(VolumeCandidate(volume.metadata.name, () if terms is None else terms or (NEVER,)))
    made = _made(claim, cls, storage)
    reach: tuple[VolumeReach, ...] = ()
    if all(choice.terms for choice in choices):  # else it can be had everywhere
        near = tuple(term for choice in choices for term in choice.terms)
        if made is None:
            reach = (VolumeReach("could_be", near or (NEVER,)),)
        else:
            reach = tuple(VolumeReach(one.kind, (*near, *one.terms)) for one in made)
    return Needed(
        claim_handle(claim),
        reach,
        _driver(cls),
        _alone(claim),
        candidates=tuple(choices),
        creatable=made if choices else None,
    )


def claim_handle(claim: Claim) -> str:
    """What a claim is known by that has no volume yet."""
    return f"claim/{claim.metadata.namespace}/{claim.metadata.name}"


def _made(claim: Claim, cls: StorageClass, storage: Storage) -> tuple[VolumeReach, ...] | None:
    """Where its class can make a volume of that size: all of these must hold. None for nowhere."""
    if cls.provisioner in ("", NO_PROVISIONER):
        return None
    out: list[VolumeReach] = []
    if cls.allowed_topologies:
        terms = tuple(
            NodeTerm(tuple(Requirement(one.key, "In", tuple(one.values)) for one in term.match_label_expressions))
            for term in cls.allowed_topologies
        )
        out.append(VolumeReach("could_be", terms))
    driver, wanted = storage.drivers.get(cls.provisioner), claim.spec.resources.requests.get("storage")
    if driver is not None and driver.spec.storage_capacity and wanted is not None:
        places = _places_with(amount(wanted), cls.metadata.name, storage)
        if () not in places:
            out.append(VolumeReach("space", tuple(NodeTerm(one) for one in places) or (NEVER,)))
    return tuple(out)


def _places_with(size: int, cls: str, storage: Storage) -> list[tuple[Requirement, ...]]:
    """Where the drivers say that a volume of that size can be made; one of () means everywhere."""
    out = []
    for one in storage.capacities.values():
        if one.storage_class_name != cls or one.largest is None or not _readable(one) or amount(one.largest) < size:
            continue
        where = selector(one.node_topology)
        if where is not None:
            out.append(where)
    return sorted(out, key=repr)


def _terms(volume: Volume) -> tuple[NodeTerm, ...] | None:
    """The nodes that a volume can be reached from; None for all."""
    nodes = volume.spec.node_affinity.required if volume.spec.node_affinity is not None else None
    return None if nodes is None else tuple(node_term(term) for term in nodes.node_selector_terms)


def _readable(thing: Volume | StorageCapacity) -> bool:
    try:
        check(thing)
    except (BadSelector, UnknownOperator, InvalidInput):
        return False
    return True


def _smallest(volume: Volume) -> tuple[int, str]:
    return amount(volume.spec.capacity.get("storage", 0)), volume.metadata.name


def _candidates(claim: Claim, storage: Storage) -> Iterable[Volume]:
    wanted = amount(claim.spec.resources.requests.get("storage", 0))
    labels = selector(claim.spec.selector) or ()
    for volume in storage.volumes.values():
        spec = volume.spec
        ref = spec.claim_ref
        meant = ref is not None and (ref.namespace, ref.name) == (claim.metadata.namespace, claim.metadata.name)
        suits = meant or (
            ref is None
            and volume.status.phase in ("", "Available")
            and spec.storage_class_name == claim.class_name
            and set(claim.spec.access_modes) <= set(spec.access_modes)
            and (spec.volume_mode or "Filesystem") == (claim.spec.volume_mode or "Filesystem")
            and all_match(labels, volume.metadata.labels)
        )
        if suits and _readable(volume) and (meant or amount(spec.capacity.get("storage", 0)) >= wanted):
            yield volume


def _driver(cls: StorageClass) -> str:
    """The driver that will make the volume, whose limit it will count against."""
    return "" if cls.provisioner in ("", NO_PROVISIONER) else cls.provisioner


def _alone(claim: Claim) -> Literal["", "anywhere"]:
    return "anywhere" if ONE_POD in claim.spec.access_modes else ""


# ------------------------------------------------------------------------------------- disks in the pod itself


def _inline(volume: PodVolume) -> Iterator[Needed]:
    """Disks that are named in the pod and that two pods of a node can not share."""
    found: tuple[tuple[str, Disk | None, bool], ...] = (
        ("gce", volume.gce_persistent_disk, True),
        ("aws", volume.aws_elastic_block_store, False),  # not even for reading
        ("iscsi", volume.iscsi, True),
        ("rbd", volume.rbd, True),
    )
    for kind, disk, may_share in found:
        if disk is not None:
            name = (
                disk.pd_name
                or disk.volume_id
                or disk.iqn
                or f"{','.join(disk.monitors)}/{disk.pool or 'rbd'}/{disk.image}"
            )
            yield Needed(f"{kind}/{name}", exclusive="node", read_only=may_share and disk.read_only)
