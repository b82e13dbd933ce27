"""Rules about company: which other jobs a task wants near, wants away, or wants to be spread among; and host ports.

Semantics are Kubernetes' own, with projects in the place of namespaces and members of jobs in the place of pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from hodei.model.selector import Requirement, all_match

Labels = Mapping[str, str]


class JobTerm(Struct, frozen=True, omit_defaults=True, gc=False):
    """Members of other jobs, by their labels, in the same topology domain (nodes with the same value of `topology`).

    `selector`: None matches no job, () every job. They are looked for in `projects` and in those that
    `project_selector` picks by their labels (() picks all); with neither, in the project of the job that has the rule.
    """

    topology: str
    selector: tuple[Requirement, ...] | None = None
    projects: tuple[str, ...] = ()
    project_selector: tuple[Requirement, ...] | None = None

    def matches(self, owner: str, labels: Labels, project: str, projects: Mapping[str, Labels]) -> bool:
        """Whether a member with `labels` in `project` is one of those meant by a rule of a job in project `owner`."""
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
    """All of `required` must hold; each of `preferred` adds its weight."""

    required: tuple[JobTerm, ...] = ()
    preferred: tuple[WeightedJobTerm, ...] = ()


class SpreadRule(Struct, frozen=True, omit_defaults=True, gc=False):
    """No domain of `topology` may hold `max_skew` more matching members than the emptiest one.

    `hard` refuses, otherwise it is a wish. `min_domains`: while there are fewer, the emptiest counts as holding none.
    Domains of nodes that the task's own selector and affinity exclude do not count (`honour_affinity`), nor, if so
    wished, those of nodes whose taints it does not tolerate (`honour_taints`). `keyless`: a wish alone; nodes without the
    key take part in the other wishes all the same.
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
    """A port of the node itself; `ip` 0.0.0.0 means every address of it."""

    port: int
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    ip: str = "0.0.0.0"

    def clashes(self, other: HostPort) -> bool:
        return (
            self.port == other.port
            and self.protocol == other.protocol
            and (self.ip == other.ip or "0.0.0.0" in (self.ip, other.ip))
        )
