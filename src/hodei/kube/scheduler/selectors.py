"""Kubernetes' selectors as the model's requirements. What kube-scheduler cannot parse is refused with its text."""

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
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_LABEL_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_NODE_OPERATORS = (*_LABEL_OPERATORS, "Gt", "Lt")
_CHARACTERS = "alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
NEVER = NodeTerm()  # an empty term matches no node


class InvalidSelector(ValueError):
    """An invalid selector, with kube-scheduler's text."""


class UnknownOperator(ValueError):
    """An unknown operator; a newer Kubernetes may define it."""


def requirement(given: Expression, operators: tuple[str, ...] = _LABEL_OPERATORS) -> Requirement:
    operator, values = given.operator, given.values
    if operator not in operators:
        raise UnknownOperator(operator)
    _check_key(given.key)
    if operator in ("In", "NotIn") and not values:
        raise InvalidSelector("values: Invalid value: []: for 'in', 'notin' operators, values set can't be empty")
    if operator in ("Exists", "DoesNotExist") and values:
        raise InvalidSelector(
            f"values: Invalid value: {_format_list(values)}: values set must be empty for exists and does not exist"
        )
    if operator in ("Gt", "Lt"):
        if len(values) != 1:
            raise InvalidSelector(
                f"values: Invalid value: {_format_list(values)}: for 'Gt', 'Lt' operators, exactly one value is required"
            )
        if not _INTEGER.fullmatch(values[0]):
            raise InvalidSelector(
                f"values[0]: Invalid value: \"{values[0]}\": for 'Gt', 'Lt' operators, the value must be an integer"
            )
    for place, value in enumerate(values):
        _check_value(given.key, place, value)
    return Requirement(given.key, cast("Operator", operator), tuple(values))


def selector(given: LabelSelector | None, own: Iterable[Requirement] = ()) -> tuple[Requirement, ...] | None:
    """A label selector and further requirements; None (matches nothing) for no selector, () for an empty one."""
    if given is None:
        return None
    labels = (Expression(key, "In", (value,)) for key, value in sorted(given.match_labels.items()))
    return (*(requirement(one) for one in (*labels, *given.match_expressions)), *own)


def own_label_requirements(
    keys: Iterable[str], labels: Mapping[str, str], *, differ: bool = False
) -> tuple[Requirement, ...]:
    """`matchLabelKeys`: the same value as the pod's own label (`mismatchLabelKeys`: another). Missing labels are ignored."""
    return tuple(Requirement(key, "NotIn" if differ else "In", (labels[key],)) for key in keys if key in labels)


def node_term(given: NodeSelectorTerm) -> NodeTerm:
    """A node term; an invalid one matches no node."""
    try:
        labels = tuple(requirement(one, _NODE_OPERATORS) for one in given.match_expressions)
    except InvalidSelector:
        return NEVER
    fields = []
    for one in given.match_fields:
        if one.operator not in ("In", "NotIn"):
            raise UnknownOperator(one.operator)
        if one.key != "metadata.name" or len(one.values) != 1:
            return NEVER
        fields.append(Requirement(one.key, cast("Operator", one.operator), tuple(one.values)))
    return NodeTerm(labels, tuple(fields))


def matches_node(term: NodeTerm, name: str, labels: Mapping[str, str]) -> bool:
    """As everywhere in Kubernetes, an empty term matches no node."""
    if not term.labels and not term.fields:
        return False
    return all_match(term.labels, labels) and all_match(term.fields, {"metadata.name": name})


def _check_key(key: str) -> None:
    prefix, slash, name = key.rpartition("/")
    if len(name) > 63 or not _NAME.fullmatch(name) or (slash and not prefix):
        raise InvalidSelector(
            f'key: Invalid value: "{key}": name part must consist of {_CHARACTERS}'
            " (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is"
            " '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        )


def _check_value(key: str, place: int, value: str) -> None:
    where = f'values[{place}][{key}]: Invalid value: "{value}": '
    if len(value) > 63:
        raise InvalidSelector(f"{where}must be no more than 63 bytes")
    if not _VALUE.fullmatch(value):
        raise InvalidSelector(
            f"{where}a valid label must be an empty string or consist of {_CHARACTERS}"
            " (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is"
            " '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
        )


def _format_list(values: Iterable[str]) -> str:
    """A list as Go prints it in its errors."""
    return "[" + ",".join(f'"{value}"' for value in values) + "]"


# The pod's own rules, or the cluster's defaults for pods that a service or workload selects.


HOSTNAME, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
# kube-scheduler's rules for pods that have none.
SYSTEM_DEFAULTS = (
    TopologySpread(HOSTNAME, 3, "ScheduleAnyway"),
    TopologySpread(ZONE, 5, "ScheduleAnyway"),
)
_POLICIES = ("Honor", "Ignore")


class UnknownValue(ValueError):
    """An unknown value of a field; the text names the field."""


class SelectorSources(Struct, frozen=True):
    """Objects that select pods: services by namespace, workloads by (namespace, kind, name)."""

    services: Mapping[str, tuple[Service, ...]] = {}
    workloads: Mapping[tuple[str, str, str], Workload] = {}


NO_SELECTOR_SOURCES = SelectorSources()


class SpreadDefaults(Struct, frozen=True):
    """Rules for pods that have none. `keyless`: a node without the key of one rule takes part in the others."""

    rules: tuple[TopologySpread, ...] = ()
    keyless: bool = False


NO_SPREAD = SpreadDefaults()
SYSTEM_SPREAD = SpreadDefaults(SYSTEM_DEFAULTS, keyless=True)


def spread_of(
    pod: Pod, defaults: SpreadDefaults = NO_SPREAD, owners: SelectorSources = NO_SELECTOR_SOURCES
) -> tuple[SpreadRule, ...]:
    own = pod.spec.topology_spread_constraints
    if own:
        return tuple(_spread_rule(one, selector(one.label_selector, _own_keys(one, pod)), keyless=False) for one in own)
    if not defaults.rules:
        return ()
    picked = selectors_of(pod, owners)
    return tuple(_spread_rule(one, picked, keyless=defaults.keyless) for one in defaults.rules) if picked else ()


def selectors_of(pod: Pod, owners: SelectorSources) -> tuple[Requirement, ...]:
    """The selectors of the pod's services and of its owner. An unreadable selector is ignored: the pod is not at fault."""
    meta = pod.metadata
    labels: dict[str, str] = {}
    for service in owners.services.get(meta.namespace, ()):
        selected = service.spec.selector
        if selected and all(meta.labels.get(key) == value for key, value in selected.items()):
            labels.update(selected)
    out = list(_readable(LabelSelector(labels)))
    for owner in meta.owner_references:
        workload = owners.workloads.get((meta.namespace, owner.kind, owner.name)) if owner.controller else None
        if workload is not None:
            own = _readable(workload.spec.selector)
            out += own if all_match(own, meta.labels) else ()
    return tuple(dict.fromkeys(out))


def _readable(given: LabelSelector | None) -> tuple[Requirement, ...]:
    try:
        return selector(given) or ()
    except (InvalidSelector, UnknownOperator):
        return ()


def _own_keys(given: TopologySpread, pod: Pod) -> Iterable[Requirement]:
    return own_label_requirements(given.match_label_keys, pod.metadata.labels)


def _spread_rule(given: TopologySpread, selected: tuple[Requirement, ...] | None, *, keyless: bool) -> SpreadRule:
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
        selected,
        bounded(given.min_domains or 1, 1, MAX_INT32),
        affinity == "Honor",
        taints == "Honor",
        keyless,
    )
