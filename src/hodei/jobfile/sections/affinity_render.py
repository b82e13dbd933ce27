"""Rules about company as people read them: in our words where these say it all, else in Kubernetes' own."""

from __future__ import annotations

from typing import Any

from hodei.jobfile.sections.affinity import EVERY
from hodei.model.errors import InvalidInput
from hodei.model.job import TaskSpec
from hodei.model.job_affinity import HostPort, JobAffinity, JobTerm, SpreadRule
from hodei.model.selector import Requirement, parse_selector

_LINE = 1024


def rules(task: TaskSpec) -> dict[str, Any]:
    """The keys of a task; empty ones mean that there is nothing to say."""
    in_short = all(map(_short_spread, task.spread))
    return {
        "job_affinity": _short(task.job_affinity),
        "job_anti_affinity": _short(task.job_anti_affinity),
        "spread": [_short_spread(rule) for rule in task.spread] if in_short else [],
        "topology_spread_constraints": [] if in_short else [_constraint(rule) for rule in task.spread],
        "ports": [_port(port) for port in task.ports],
    }


def blocks(task: TaskSpec) -> dict[str, Any]:
    """What goes into `affinity` because our words would not say it."""
    pairs = (("podAffinity", task.job_affinity), ("podAntiAffinity", task.job_anti_affinity))
    return {key: _block(affinity) for key, affinity in pairs if affinity != JobAffinity() and not _short(affinity)}


def _short(affinity: JobAffinity) -> dict[str, Any]:
    required = [_short_term(term) for term in affinity.required]
    preferred = [(wish.weight, _short_term(wish.term)) for wish in affinity.preferred]
    if not all(required) or not all(term for _, term in preferred):
        return {}
    wishes = [{"weight": weight} | term for weight, term in preferred]
    return ({"required": required} if required else {}) | ({"preferred": wishes} if wishes else {})


def _short_term(term: JobTerm) -> dict[str, Any]:
    """Empty if it cannot be said in short."""
    match = _line(term.selector)
    picked = _line(term.project_selector) if term.project_selector is not None else ""
    if match is None or picked is None:
        return {}
    out: dict[str, Any] = {"match": match, "topology": term.topology}
    if term.projects:
        out["projects"] = list(term.projects)
    return out | ({"project_match": picked} if term.project_selector is not None else {})


def _short_spread(rule: SpreadRule) -> dict[str, Any]:
    match = _line(rule.selector)
    if match is None or match == EVERY:
        return {}
    defaults = SpreadRule(rule.topology)
    out: dict[str, Any] = {"topology": rule.topology, "match": match}
    for key in ("max_skew", "hard", "min_domains", "honour_affinity", "honour_taints"):
        if getattr(rule, key) != getattr(defaults, key):
            out[key] = getattr(rule, key)
    return out


def _line(selector: tuple[Requirement, ...] | None) -> str | None:
    """A selector in one line; None if it cannot be one."""
    if selector is None:
        return None
    text = ", ".join(map(str, selector))
    try:
        if len(text) > _LINE or parse_selector(text) != selector:
            return None
    except InvalidInput:
        return None
    return text or EVERY


# ------------------------------------------------------------------------------------------- Kubernetes' own


def _block(affinity: JobAffinity) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if affinity.required:
        out["requiredDuringSchedulingIgnoredDuringExecution"] = [_pod_term(term) for term in affinity.required]
    if affinity.preferred:
        out["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": wish.weight, "podAffinityTerm": _pod_term(wish.term)} for wish in affinity.preferred
        ]
    return out


def _pod_term(term: JobTerm) -> dict[str, Any]:
    out: dict[str, Any] = {"topologyKey": term.topology}
    if term.selector is not None:
        out["labelSelector"] = _selector(term.selector)
    if term.projects:
        out["namespaces"] = list(term.projects)
    if term.project_selector is not None:
        out["namespaceSelector"] = _selector(term.project_selector)
    return out


def _constraint(rule: SpreadRule) -> dict[str, Any]:
    out: dict[str, Any] = {
        "maxSkew": rule.max_skew,
        "topologyKey": rule.topology,
        "whenUnsatisfiable": "DoNotSchedule" if rule.hard else "ScheduleAnyway",
    }
    if rule.selector is not None:
        out["labelSelector"] = _selector(rule.selector)
    if rule.min_domains != 1:
        out["minDomains"] = rule.min_domains
    if not rule.honour_affinity:
        out["nodeAffinityPolicy"] = "Ignore"
    if rule.honour_taints:
        out["nodeTaintsPolicy"] = "Honor"
    return out


def _selector(selector: tuple[Requirement, ...]) -> dict[str, Any]:
    if not selector:
        return {}
    return {
        "matchExpressions": [
            {"key": one.key, "operator": one.operator} | ({"values": list(one.values)} if one.values else {})
            for one in selector
        ]
    }


def _port(port: HostPort) -> int | dict[str, Any]:
    if port == HostPort(port.port):
        return port.port
    out: dict[str, Any] = {"port": port.port, "protocol": port.protocol}
    return out | ({} if port.ip == "0.0.0.0" else {"ip": port.ip})
