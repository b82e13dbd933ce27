"""Kubernetes' selectors into the model's requirements. What upstream cannot parse, it refuses with a text: so do we."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast

from msgspec import Struct

from hodei.kube.api.objects import Expression, LabelSelector, NodeSelectorTerm, Pod, Service, TopologySpread, Workload
from hodei.kube.api.quantities import MAX_INT32, bounded
from hodei.model.affinity import NodeTerm, Operator, Requirement, SpreadRule, all_match

_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_IN_LABELS = ("In", "NotIn", "Exists", "DoesNotExist")
_IN_NODES = (*_IN_LABELS, "Gt", "Lt")
_CHARACTERS = "alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
NEVER = NodeTerm()  # a term without conditions is met by no node


class BadSelector(ValueError):
    """Not a selector, in upstream's words."""


class UnknownOperator(ValueError):
    """An operator that is not known here: a newer Kubernetes may have given it a meaning."""


def requirement(given: Expression, operators: tuple[str, ...] = _IN_LABELS) -> Requirement:
    operator, values = given.operator, given.values
    if operator not in operators:
        raise UnknownOperator(operator)
    _check_key(given.key)
    if operator in ("In", "NotIn") and not values:
        raise BadSelector("values: Invalid value: []: for 'in', 'notin' operators, values set can't be empty")
    if operator in ("Exists", "DoesNotExist") and values:
        raise BadSelector(
            f"values: Invalid value: {_go(values)}: values set must be empty for exists and does not exist"
        )
    if operator in ("Gt", "Lt"):
        if len(values) != 1:
            raise BadSelector(
                f"values: Invalid value: {_go(values)}: for 'Gt', 'Lt' operators, exactly one value is required"
            )
        if not _WHOLE.fullmatch(values[0]):
            raise BadSelector(
                f"values[0]: Invalid value: \"{values[0]}\": for 'Gt', 'Lt' operators, the value must be an integer"
            )
    for place, value in enumerate(values):
        _check_value(given.key, place, value)
    return Requirement(given.key, cast("Operator", operator), tuple(values))


def selector(given: LabelSelector | None, more: Iterable[Requirement] = ()) -> tuple[Requirement, ...] | None:
    """A label selector and what else must hold; None where there is none (it picks nothing), () for an empty one."""
    if given is None:
        return None
    plain = (Expression(key, "In", (value,)) for key, value in sorted(given.match_labels.items()))
    return (*(requirement(one) for one in (*plain, *given.match_expressions)), *more)


def of_own_labels(keys: Iterable[str], labels: Mapping[str, str], *, differ: bool = False) -> tuple[Requirement, ...]:
    """`matchLabelKeys`: the same value as the pod itself has (or, for `mismatchLabelKeys`, another); keys that it lacks
    say nothing."""
    return tuple(Requirement(key, "NotIn" if differ else "In", (labels[key],)) for key in keys if key in labels)


def node_term(given: NodeSelectorTerm) -> NodeTerm:
    """A term about nodes; one that cannot be parsed is met by none."""
    try:
        labels = tuple(requirement(one, _IN_NODES) for one in given.match_expressions)
    except BadSelector:
        return NEVER
    fields = []
    for one in given.match_fields:
        if one.operator not in ("In", "NotIn"):
            raise UnknownOperator(one.operator)
        if one.key != "metadata.name" or len(one.values) != 1:
            return NEVER
        fields.append(Requirement(one.key, cast("Operator", one.operator), tuple(one.values)))
    return NodeTerm(labels, tuple(fields))


def _check_key(key: str) -> None:
    prefix, slash, name = key.rpartition("/")
    if len(name) > 63 or not _NAME.fullmatch(name) or (slash and not prefix):
        raise BadSelector(
            f'key: Invalid value: "{key}": name part must consist of {_CHARACTERS}'
            " (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is"
            " '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        )


def _check_value(key: str, place: int, value: str) -> None:
    where = f'values[{place}][{key}]: Invalid value: "{value}": '
    if len(value) > 63:
        raise BadSelector(f"{where}must be no more than 63 bytes")
    if not _VALUE.fullmatch(value):
        raise BadSelector(
            f"{where}a valid label must be an empty string or consist of {_CHARACTERS}"
            " (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is"
            " '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
        )


def _go(values: Iterable[str]) -> str:
    """A list of strings as Go prints it in such errors."""
    return "[" + ",".join(f'"{value}"' for value in values) + "]"


# ------------------------------------------------------------------------------------- topology spread
# Topology spread: the pod's own rules, or the cluster's defaults for pods that some service or workload picks.


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
