"""What may be written about company (other jobs, spreading, host ports), in our words and in Kubernetes' own."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from hodei.jobfile.types import Expressions, Form, Key, Labels, Line, Short, Weight, Word, Words, about

Match = Annotated[Line, about("A selector of jobs by their labels; `*` for every job.", "app=web")]
Topology = Annotated[
    Key, about("A label of nodes, or region, zone, datacenter, rack, host: what counts as one place.", "zone")
]
Port = Annotated[int, Meta(ge=0, le=65535)]
Skew = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class JobTermForm(Form, frozen=True):
    """Jobs by their labels, in one place."""

    match: Match
    topology: Topology
    projects: Annotated[Words, about("Where to look for them. Default: the job's own project.")] | None = None
    project_match: Annotated[Line, about("The same by the labels of projects; `*` for all.")] | None = None


class WeightedJobTermForm(JobTermForm, frozen=True):
    """The same, with a weight."""

    weight: Annotated[Weight, about("1 to 100.")] = 1


class JobAffinityForm(Form, frozen=True):
    """All of `required` must hold; each of `preferred` adds its weight."""

    required: Annotated[list[JobTermForm], Meta(max_length=64)] | None = None
    preferred: Annotated[list[WeightedJobTermForm], Meta(max_length=64)] | None = None


class CompanyForm(Form, frozen=True):
    """`with` and exactly one of the others."""

    match: Match = field(name="with")
    same: Annotated[Key, about("In the same one as these jobs.", "region")] | None = None
    different: Annotated[Key, about("Where none of these jobs is.", "region")] | None = None
    regions: Annotated[int, Meta(ge=1, le=1000), about("Evenly over at least so many regions.")] | None = None


class SpreadForm(Form, frozen=True):
    """No place may hold `max_skew` more of the matching jobs than the emptiest one."""

    topology: Topology
    match: Annotated[Line, about("Which jobs are counted. Default: those with this job's labels.")] | None = None
    max_skew: Annotated[Skew, about("Default 1.")] = 1
    hard: Annotated[bool, about("Refuse, or (false) only prefer. Default true.")] = True
    min_domains: Annotated[Skew, about("With fewer places the emptiest counts as empty. Default 1.")] = 1
    honour_affinity: Annotated[bool, about("Leave out places that its selector excludes. Default true.")] = True
    honour_taints: Annotated[bool, about("Leave out places that it does not tolerate. Default false.")] = False


# ------------------------------------------------------------------------------------------- Kubernetes' own

LabelKeys = Annotated[list[Key], Meta(max_length=64)]


class LabelSelector(Form, frozen=True):
    """Conditions on labels that all must hold."""

    match_labels: Labels | None = field(name="matchLabels", default=None)
    match_expressions: Expressions | None = field(name="matchExpressions", default=None)


class PodTerm(Form, frozen=True):
    """Pods (here: members of jobs) by their labels, in one topology domain."""

    topology_key: Key = field(name="topologyKey")
    label_selector: LabelSelector | None = field(name="labelSelector", default=None)
    namespaces: Annotated[list[Word], Meta(max_length=64)] | None = None
    namespace_selector: LabelSelector | None = field(name="namespaceSelector", default=None)
    match_label_keys: LabelKeys | None = field(name="matchLabelKeys", default=None)
    mismatch_label_keys: LabelKeys | None = field(name="mismatchLabelKeys", default=None)


class WeightedPodTerm(Form, frozen=True):
    """A term that adds its weight when it holds."""

    weight: Weight
    term: PodTerm = field(name="podAffinityTerm")


class PodAffinity(Form, frozen=True):
    """Kubernetes' own block."""

    required: Annotated[list[PodTerm], Meta(max_length=64)] | None = field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )
    preferred: Annotated[list[WeightedPodTerm], Meta(max_length=64)] | None = field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=None
    )


class Constraint(Form, frozen=True):
    """Kubernetes' topology spread constraint."""

    max_skew: Skew = field(name="maxSkew")
    topology_key: Key = field(name="topologyKey")
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = field(name="whenUnsatisfiable")
    label_selector: LabelSelector | None = field(name="labelSelector", default=None)
    min_domains: Skew | None = field(name="minDomains", default=None)
    affinity_policy: Literal["Honor", "Ignore"] | None = field(name="nodeAffinityPolicy", default=None)
    taints_policy: Literal["Honor", "Ignore"] | None = field(name="nodeTaintsPolicy", default=None)
    match_label_keys: LabelKeys | None = field(name="matchLabelKeys", default=None)


class PortForm(Form, frozen=True):
    """A port of the node; Kubernetes' `hostPort` and `hostIP` mean the same, `containerPort` alone means none."""

    port: Annotated[Port, about("The port.")] | None = None
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    ip: Annotated[Short, about("One address of the node. Default: all of them.")] | None = None
    host_port: Port | None = field(name="hostPort", default=None)
    host_ip: Short | None = field(name="hostIP", default=None)
    container_port: Port | None = field(name="containerPort", default=None)
    name: Word | None = None
