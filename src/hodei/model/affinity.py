"""Placement rules with the semantics of Kubernetes: labels, node terms, job affinity, spread and host ports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from hodei.model.errors import InvalidInput

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]

_SET = re.compile(r"(?P<key>[^\s,()=!<>]+)\s+(?P<op>in|notin)\s*\((?P<values>[^()]*)\)")
_PAIR = re.compile(r"(?P<key>[^\s,()=!<>]+)\s*(?P<op>==|=|!=|>|<)\s*(?P<value>[^\s,()=!<>]*)")
_BARE = re.compile(r"(?P<not>!?)\s*(?P<key>[^\s,()=!<>]+)")


class Requirement(Struct, frozen=True, omit_defaults=True):
    """A condition on one label. `In`/`NotIn` take values, `Gt`/`Lt` one integer, the others none."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt":
                return _is_whole(value) and int(value or "0") > int(self.values[0])
            case "Lt":
                return _is_whole(value) and int(value or "0") < int(self.values[0])

    def __str__(self) -> str:
        match self.operator:
            case "In" if len(self.values) == 1:
                return f"{self.key}={self.values[0]}"
            case "In" | "NotIn":
                return f"{self.key} {self.operator.lower()} ({', '.join(self.values)})"
            case "Exists":
                return self.key
            case "DoesNotExist":
                return f"!{self.key}"
            case "Gt" | "Lt":
                return f"{self.key}{'>' if self.operator == 'Gt' else '<'}{self.values[0]}"


def check_requirement(requirement: Requirement) -> Requirement:
    """InvalidInput if the values do not fit the operator."""
    values, operator = requirement.values, requirement.operator
    if operator in ("Exists", "DoesNotExist") and values:
        raise InvalidInput(f"{requirement.key}: {operator} takes no values")
    if operator in ("In", "NotIn") and not values:
        raise InvalidInput(f"{requirement.key}: {operator} needs at least one value")
    if operator in ("Gt", "Lt") and (len(values) != 1 or not _is_whole(values[0])):
        raise InvalidInput(f"{requirement.key}: {operator} needs exactly one whole number")
    return requirement


def all_match(requirements: Sequence[Requirement], labels: Mapping[str, str]) -> bool:
    return all(requirement.matches(labels) for requirement in requirements)


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """`zone in (a, b), disk=ssd, !spot, cores>8`: every part must hold."""
    out, rest = [], text.strip()
    while rest:
        if found := _SET.match(rest):
            values = tuple(value.strip() for value in found["values"].split(",") if value.strip())
            out.append(Requirement(found["key"], "In" if found["op"] == "in" else "NotIn", values))
        elif found := _PAIR.match(rest):
            operator: dict[str, Operator] = {"=": "In", "==": "In", "!=": "NotIn", ">": "Gt", "<": "Lt"}
            out.append(Requirement(found["key"], operator[found["op"]], (found["value"],)))
        elif found := _BARE.match(rest):
            out.append(Requirement(found["key"], "DoesNotExist" if found["not"] else "Exists"))
        else:
            raise InvalidInput(
                f"cannot read the selector at {rest[:30]!r}", hint="for example: zone in (a, b), disk=ssd, !spot"
            )
        check_requirement(out[-1])
        rest = rest[found.end() :].lstrip()
        if rest:
            if not rest.startswith(","):
                raise InvalidInput(f"expected a comma before {rest[:30]!r} in the selector")
            rest = rest[1:].lstrip()
    return tuple(out)


def _is_whole(value: str | None) -> bool:
    return value is not None and re.fullmatch(r"[+-]?\d{1,18}", value) is not None


class NodeTerm(Struct, frozen=True, omit_defaults=True):
    """Conditions on a node's labels and fields (`metadata.name`); all of them must hold."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def __str__(self) -> str:
        return ", ".join(str(requirement) for requirement in (*self.labels, *self.fields))


# Rules about other jobs (affinity, anti-affinity, spread), and host ports.


Labels = Mapping[str, str]


class JobTerm(Struct, frozen=True, omit_defaults=True, gc=False):
    """Members of other jobs, selected by labels, in the same topology domain (nodes with the same value of `topology`).

    `selector`: None matches no job, () every job. `projects` and `project_selector` (by labels of projects; () selects
    all) choose the projects; with neither, only the project of the job that has the rule.
    """

    topology: str
    selector: tuple[Requirement, ...] | None = None
    projects: tuple[str, ...] = ()
    project_selector: tuple[Requirement, ...] | None = None

    def matches(self, owner: str, labels: Labels, project: str, projects: Mapping[str, Labels]) -> bool:
        """Whether a rule of a job in project `owner` selects a member with `labels` in `project`."""
        if self.selector is None:
            return False
        if self.projects or self.project_selector is not None:
            named = project in self.projects
            picked = self.project_selector is not None and all_match(self.project_selector, projects.get(project, {}))
            if not named and not picked:
                return False
        elif project != owner:
            return False
        return all_match(self.selector, labels)

    def __str__(self) -> str:
        who = ", ".join(str(part) for part in self.selector or ()) or "any job"
        return f"[{who}] by {self.topology}"


class WeightedJobTerm(Struct, frozen=True, gc=False):
    weight: int
    term: JobTerm


class JobAffinity(Struct, frozen=True, omit_defaults=True, gc=False):
    """All of `required` must hold; each of `preferred` that holds adds its weight."""

    required: tuple[JobTerm, ...] = ()
    preferred: tuple[WeightedJobTerm, ...] = ()


class SpreadRule(Struct, frozen=True, omit_defaults=True, gc=False):
    """No domain of `topology` may hold more than `max_skew` matching members above the emptiest domain.

    `hard` refuses; otherwise the rule is a preference. `min_domains`: while there are fewer domains, the minimum counts
    as 0. Domains of nodes that the task's selector and affinity exclude do not count (`honour_affinity`); with
    `honour_taints` neither do nodes with untolerated taints. `keyless`: for preferences only, nodes without the key
    still take part in the other preferences.
    """

    topology: str
    max_skew: int = 1
    hard: bool = True
    selector: tuple[Requirement, ...] | None = None
    min_domains: int = 1
    honour_affinity: bool = True
    honour_taints: bool = False
    keyless: bool = False


class HostPort(Struct, frozen=True, omit_defaults=True, gc=False):
    """A port of the node itself; `ip` 0.0.0.0 means all its addresses."""

    port: int
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    ip: str = "0.0.0.0"

    def clashes(self, other: HostPort) -> bool:
        return (
            self.port == other.port
            and self.protocol == other.protocol
            and (self.ip == other.ip or "0.0.0.0" in (self.ip, other.ip))
        )
