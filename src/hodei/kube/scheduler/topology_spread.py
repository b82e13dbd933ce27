"""Topology spread: the pod's own rules, or the cluster's defaults for pods that some service or workload picks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from hodei.kube.api.numbers import MAX_INT32, bounded
from hodei.kube.api.objects import LabelSelector, Pod, Service, TopologySpread, Workload
from hodei.kube.scheduler.selectors import BadSelector, UnknownOperator, of_own_labels, selector
from hodei.model.job_affinity import SpreadRule
from hodei.model.selector import Requirement, all_match

HOSTNAME, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
# What kube-scheduler does for pods without rules of their own, unless it is told otherwise.
SYSTEM_DEFAULTS = (
    TopologySpread(HOSTNAME, 3, "ScheduleAnyway"),
    TopologySpread(ZONE, 5, "ScheduleAnyway"),
)
_POLICIES = ("Honor", "Ignore")


class UnknownValue(ValueError):
    """A value of a field that is not known here; its text names the field."""


class Owners(Struct, frozen=True):
    """Whoever picks pods: services by namespace; workloads by (namespace, kind, name)."""

    services: Mapping[str, tuple[Service, ...]] = {}
    workloads: Mapping[tuple[str, str, str], Workload] = {}


NO_OWNERS = Owners()


class Defaults(Struct, frozen=True):
    """Rules for pods that have none. `keyless`: nodes that lack a key of one take part in the others (as with the system's
    own defaults)."""

    rules: tuple[TopologySpread, ...] = ()
    keyless: bool = False


NO_DEFAULTS = Defaults()
OF_THE_SYSTEM = Defaults(SYSTEM_DEFAULTS, keyless=True)


def spread_of(pod: Pod, defaults: Defaults = NO_DEFAULTS, owners: Owners = NO_OWNERS) -> tuple[SpreadRule, ...]:
    own = pod.spec.topology_spread_constraints
    if own:
        return tuple(_rule(one, selector(one.label_selector, _own(one, pod)), keyless=False) for one in own)
    if not defaults.rules:
        return ()
    picked = picked_by(pod, owners)
    return tuple(_rule(one, picked, keyless=defaults.keyless) for one in defaults.rules) if picked else ()


def picked_by(pod: Pod, owners: Owners) -> tuple[Requirement, ...]:
    """What all who pick this pod say together: its services, and the workload that made it. One whose selector cannot be
    read picks nothing: pods are not to blame for it."""
    meta = pod.metadata
    plain: dict[str, str] = {}
    for service in owners.services.get(meta.namespace, ()):
        chosen = service.spec.selector
        if chosen and all(meta.labels.get(key) == value for key, value in chosen.items()):
            plain.update(chosen)
    out = list(_readable(LabelSelector(plain)))
    for owner in meta.owner_references:
        workload = owners.workloads.get((meta.namespace, owner.kind, owner.name)) if owner.controller else None
        if workload is not None:
            more = _readable(workload.spec.selector)
            out += more if all_match(more, meta.labels) else ()
    return tuple(dict.fromkeys(out))


def _readable(given: LabelSelector | None) -> tuple[Requirement, ...]:
    try:
        return selector(given) or ()
    except (BadSelector, UnknownOperator):
        return ()


def _own(given: TopologySpread, pod: Pod) -> Iterable[Requirement]:
    return of_own_labels(given.match_label_keys, pod.metadata.labels)


def _rule(given: TopologySpread, chosen: tuple[Requirement, ...] | None, *, keyless: bool) -> SpreadRule:
    if given.when_unsatisfiable not in ("DoNotSchedule", "ScheduleAnyway"):
        raise UnknownValue(f"whenUnsatisfiable: {given.when_unsatisfiable}")
    affinity, taints = given.node_affinity_policy or "Honor", given.node_taints_policy or "Ignore"
    for field, policy in (("nodeAffinityPolicy", affinity), ("nodeTaintsPolicy", taints)):
        if policy not in _POLICIES:
            raise UnknownValue(f"{field}: {policy}")
    return SpreadRule(
        given.topology_key,
        bounded(given.max_skew, 1, MAX_INT32),
        given.when_unsatisfiable == "DoNotSchedule",
        chosen,
        bounded(given.min_domains or 1, 1, MAX_INT32),
        affinity == "Honor",
        taints == "Honor",
        keyless,
    )
