"""From the JSON of Kubernetes' pods and nodes to the model, for the golden vectors."""

from __future__ import annotations

from typing import Any

from hodei.engine.nodes import Table
from hodei.engine.view import Member
from hodei.model.job import Affinity, JobSpec, NodeTerm, PreferredTerm, TaskSpec, Toleration
from hodei.model.node import Node, Taint
from hodei.model.rules import HostPort, JobAffinity, JobTerm, SpreadRule, WeightedJobTerm
from hodei.model.selector import Requirement

REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


def selector(given: dict[str, Any] | None) -> tuple[Requirement, ...] | None:
    """A label selector; None where there is none."""
    if given is None:
        return None
    return (
        *(Requirement(key, "In", (value,)) for key, value in sorted((given.get("matchLabels") or {}).items())),
        *requirements(given.get("matchExpressions")),
    )


def requirements(given: list[dict[str, Any]] | None) -> tuple[Requirement, ...]:
    return tuple(Requirement(one["key"], one["operator"], tuple(one.get("values") or ())) for one in given or ())


def _job_term(given: dict[str, Any]) -> JobTerm:
    return JobTerm(
        given["topologyKey"],
        selector(given.get("labelSelector")),
        tuple(given.get("namespaces") or ()),
        selector(given.get("namespaceSelector")),
    )


def _job_affinity(given: dict[str, Any] | None) -> JobAffinity:
    given = given or {}
    return JobAffinity(
        tuple(_job_term(term) for term in given.get(REQUIRED) or ()),
        tuple(WeightedJobTerm(w["weight"], _job_term(w["podAffinityTerm"])) for w in given.get(PREFERRED) or ()),
    )


def _node_term(given: dict[str, Any]) -> NodeTerm:
    return NodeTerm(requirements(given.get("matchExpressions")), requirements(given.get("matchFields")))


def _spread(given: dict[str, Any], labels: dict[str, str]) -> SpreadRule:
    chosen = selector(given.get("labelSelector"))
    if chosen is not None:
        chosen += tuple(
            Requirement(key, "In", (labels[key],)) for key in given.get("matchLabelKeys") or () if key in labels
        )
    return SpreadRule(
        given["topologyKey"],
        given["maxSkew"],
        given["whenUnsatisfiable"] == "DoNotSchedule",
        chosen,
        given.get("minDomains") or 1,
        given.get("nodeAffinityPolicy", "Honor") == "Honor",
        given.get("nodeTaintsPolicy", "Ignore") == "Honor",
    )


def _ports(spec: dict[str, Any]) -> tuple[HostPort, ...]:
    side_cars = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
    return tuple(
        HostPort(port["hostPort"], port.get("protocol") or "TCP", port.get("hostIP") or "0.0.0.0")
        for container in [*(spec.get("containers") or ()), *side_cars]
        for port in container.get("ports") or ()
        if port.get("hostPort")
    )


def member(pod: dict[str, Any]) -> Member:
    meta, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    affinity = spec.get("affinity") or {}
    of_nodes = affinity.get("nodeAffinity") or {}
    labels = meta.get("labels") or {}
    terms = (of_nodes.get(REQUIRED) or {}).get("nodeSelectorTerms") or ()
    task = TaskSpec(
        node_selector=spec.get("nodeSelector") or {},
        affinity=Affinity(
            tuple(_node_term(term) for term in terms),
            tuple(PreferredTerm(w["weight"], _node_term(w["preference"])) for w in of_nodes.get(PREFERRED) or ()),
        ),
        tolerations=tuple(
            Toleration(
                one.get("key", ""),
                one.get("operator") or "Equal",
                one.get("value", ""),
                one.get("effect", ""),
                one.get("tolerationSeconds"),
            )
            for one in spec.get("tolerations") or ()
        ),
        job_affinity=_job_affinity(affinity.get("podAffinity")),
        job_anti_affinity=_job_affinity(affinity.get("podAntiAffinity")),
        spread=tuple(_spread(one, labels) for one in spec.get("topologySpreadConstraints") or ()),
        ports=_ports(spec),
    )
    return Member(JobSpec(meta.get("name") or "pod", (task,), meta.get("namespace", ""), labels=labels), task)


def node(given: dict[str, Any]) -> Node:
    meta, spec = given.get("metadata") or {}, given.get("spec") or {}
    return Node(
        meta.get("name", ""),
        "kubernetes",
        labels=meta.get("labels") or {},
        taints=tuple(
            Taint(one["key"], one.get("value", ""), one.get("effect") or "NoSchedule")
            for one in spec.get("taints") or ()
        ),
        cordoned=bool(spec.get("unschedulable")),
    )


def table(case: dict[str, Any]) -> Table:
    """All the nodes of a case, with the pods that are on them."""
    given = case.get("all_nodes") or case.get("nodes") or case.get("candidate_nodes") or []
    nodes = [(node(one.get("node") or {}), one.get("pods") or ()) for one in given]
    made = Table(known for known, _ in nodes)
    made.settle()
    made.residents.projects = case.get("namespaces") or {}
    for known, pods in nodes:
        for pod in pods:
            made.place(made.row[known.name], {}, member(pod))
    return made
