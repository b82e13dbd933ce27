"""Job affinity, spread and host ports: schema, parser and renderer, in Hodei's form and in that of Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, field

from hodei.jobfile.values import (
    Expressions,
    Form,
    Key,
    Labels,
    Line,
    Problems,
    Short,
    Weight,
    Word,
    Words,
    about,
    check_requirement_names,
    error_text,
    requirement_document,
    try_parse,
)
from hodei.model.affinity import (
    HostPort,
    JobAffinity,
    JobTerm,
    Requirement,
    SpreadRule,
    WeightedJobTerm,
    check_requirement,
    parse_selector,
)
from hodei.model.errors import InvalidInput
from hodei.model.job import TaskSpec
from hodei.model.names import label_key, plain_name, safe_repr

if TYPE_CHECKING:
    from hodei.jobfile import schema


Match = Annotated[Line, about("A selector of jobs by their labels; `*` for every job.", "app=web")]
Topology = Annotated[
    Key, about("A label of nodes, or region, zone, datacenter, rack, host: what counts as one place.", "zone")
]
Port = Annotated[int, Meta(ge=0, le=65535)]
Skew = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class JobTermForm(Form, frozen=True):
    """Jobs by their labels, in one topology domain."""

    match: Match
    topology: Topology
    projects: Annotated[Words, about("Projects of these jobs. Default: the job's own project.")] | None = None
    project_match: Annotated[Line, about("Projects by their labels; `*` for all.")] | None = None


class WeightedJobTermForm(JobTermForm, frozen=True):
    """A term that adds its weight when it holds."""

    weight: Annotated[Weight, about("1 to 100.")] = 1


class JobAffinityForm(Form, frozen=True):
    """All of `required` must hold; each of `preferred` adds its weight."""

    required: Annotated[list[JobTermForm], Meta(max_length=64)] | None = None
    preferred: Annotated[list[WeightedJobTermForm], Meta(max_length=64)] | None = None


class AffinityRuleForm(Form, frozen=True):
    """`with` and exactly one of the others."""

    match: Match = field(name="with")
    same: Annotated[Key, about("In the same domain as these jobs.", "region")] | None = None
    different: Annotated[Key, about("In a domain without these jobs.", "region")] | None = None
    regions: Annotated[int, Meta(ge=1, le=1000), about("Spread evenly over at least this many regions.")] | None = None


class SpreadForm(Form, frozen=True):
    """No domain may hold more than `max_skew` matching jobs above the emptiest one."""

    topology: Topology
    match: Annotated[Line, about("Which jobs are counted. Default: those with this job's labels.")] | None = None
    max_skew: Annotated[Skew, about("Default 1.")] = 1
    hard: Annotated[bool, about("Required, or (false) only preferred. Default true.")] = True
    min_domains: Annotated[Skew, about("With fewer domains the emptiest counts as empty. Default 1.")] = 1
    honour_affinity: Annotated[bool, about("Ignore domains that its node selector excludes. Default true.")] = True
    honour_taints: Annotated[bool, about("Ignore domains with taints that it does not tolerate. Default false.")] = (
        False
    )


LabelKeys = Annotated[list[Key], Meta(max_length=64)]


class LabelSelector(Form, frozen=True):
    """Conditions on labels; all must hold."""

    match_labels: Labels | None = field(name="matchLabels", default=None)
    match_expressions: Expressions | None = field(name="matchExpressions", default=None)


class PodTerm(Form, frozen=True):
    """Pods (members of jobs) by their labels, in one topology domain."""

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
    """Kubernetes' podAffinity or podAntiAffinity."""

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
    """A port of the node. Kubernetes' `hostPort` and `hostIP` are accepted; `containerPort` alone takes no port."""

    port: Annotated[Port, about("The port.")] | None = None
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"
    ip: Annotated[Short, about("One address of the node. Default: all.")] | None = None
    host_port: Port | None = field(name="hostPort", default=None)
    host_ip: Short | None = field(name="hostIP", default=None)
    container_port: Port | None = field(name="containerPort", default=None)
    name: Word | None = None


Selector = tuple[Requirement, ...]
Rules = tuple[JobAffinity, JobAffinity, tuple[SpreadRule, ...], tuple[HostPort, ...]]
ALL_JOBS = "*"
_NO_AFFINITY = JobAffinity()
_NO_RULES: Rules = (_NO_AFFINITY, _NO_AFFINITY, (), ())


def rules(form: schema.FlatJob | schema.TaskForm, labels: dict[str, str], at: str, problems: Problems) -> Rules:
    """`job_affinity`, `job_anti_affinity`, `spread` and `ports` of a `TaskSpec`. `labels` are the job's own."""
    pods = form.affinity
    blocks = pods is not None and (pods.pod_affinity is not None or pods.pod_anti_affinity is not None)
    if not (
        blocks or form.job_affinity or form.job_anti_affinity or form.affinity_rules or form.spread or form.constraints
        or form.ports
    ):  # fmt: skip
        return _NO_RULES
    parser = _RuleParser(labels, problems)
    near = parser.affinity(form.job_affinity, pods.pod_affinity if pods else None, at, "job_affinity", "podAffinity")
    away = parser.affinity(
        form.job_anti_affinity, pods.pod_anti_affinity if pods else None, at, "job_anti_affinity", "podAntiAffinity"
    )
    spread = [parser.spread(one, f"{at}spread[{i}]") for i, one in enumerate(form.spread or ())]
    path = f"{at}topologySpreadConstraints"
    spread += [parser.constraint(one, f"{path}[{i}]") for i, one in enumerate(form.constraints or ())]
    for i, rule in enumerate(form.affinity_rules or ()):
        near, away = parser.affinity_rule(rule, f"{at}affinity_rules[{i}]", near, away, spread)
    parsed = [parser.port(one, f"{at}ports[{i}]") for i, one in enumerate(form.ports or ())]
    ports = tuple(port for port in parsed if port is not None)
    if any(one.clashes(other) for i, one in enumerate(ports) for other in ports[:i]):
        problems.append((f"{at}ports", "the same port twice"))
    return near, away, tuple(spread), ports


class _RuleParser:
    """Reports every mistake as a problem at its path."""

    def __init__(self, labels: dict[str, str], problems: Problems) -> None:
        self.labels = labels
        self.problems = problems

    def affinity(
        self, form: JobAffinityForm | None, pod_form: PodAffinity | None, at: str, key: str, block: str
    ) -> JobAffinity:
        if form is not None and pod_form is not None:
            self.problems.append((f"{at}{key}", f"give either {key} or affinity.{block}, not both"))
        if form is not None:
            path = f"{at}{key}"
            return JobAffinity(
                tuple(self.term(term, f"{path}.required[{i}]") for i, term in enumerate(form.required or ())),
                tuple(
                    WeightedJobTerm(term.weight, self.term(term, f"{path}.preferred[{i}]"))
                    for i, term in enumerate(form.preferred or ())
                ),
            )
        if pod_form is None:
            return _NO_AFFINITY
        required = f"{at}affinity.{block}.requiredDuringSchedulingIgnoredDuringExecution"
        preferred = f"{at}affinity.{block}.preferredDuringSchedulingIgnoredDuringExecution"
        return JobAffinity(
            tuple(self.pod_term(term, f"{required}[{i}]") for i, term in enumerate(pod_form.required or ())),
            tuple(
                WeightedJobTerm(weighted.weight, self.pod_term(weighted.term, f"{preferred}[{i}].podAffinityTerm"))
                for i, weighted in enumerate(pod_form.preferred or ())
            ),
        )

    def term(self, form: JobTermForm, at: str) -> JobTerm:
        projects = self._projects(form.projects or (), f"{at}.projects")
        by_label = None if form.project_match is None else self.selector(form.project_match, f"{at}.project_match")
        topology = self._topology(form.topology, f"{at}.topology")
        return JobTerm(topology, self.selector(form.match, f"{at}.match"), projects, by_label)

    def pod_term(self, form: PodTerm, at: str) -> JobTerm:
        chosen = self._labels(form.label_selector, f"{at}.labelSelector")
        if chosen is not None:
            chosen += self._own_labels(form.match_label_keys or (), "In")
            chosen += self._own_labels(form.mismatch_label_keys or (), "NotIn")
        elif form.match_label_keys or form.mismatch_label_keys:
            self.problems.append((at, "matchLabelKeys and mismatchLabelKeys need a labelSelector"))
        return JobTerm(
            self._topology(form.topology_key, f"{at}.topologyKey"),
            chosen,
            self._projects(form.namespaces or (), f"{at}.namespaces"),
            self._labels(form.namespace_selector, f"{at}.namespaceSelector"),
        )

    def affinity_rule(
        self, form: AffinityRuleForm, at: str, near: JobAffinity, away: JobAffinity, spread: list[SpreadRule]
    ) -> tuple[JobAffinity, JobAffinity]:
        """`same` is a required affinity, `different` a required anti-affinity, `regions` a hard spread rule."""
        if sum(one is not None for one in (form.same, form.different, form.regions)) != 1:
            self.problems.append((at, "give exactly one of same, different and regions"))
        chosen = self.selector(form.match, f"{at}.with")
        if form.same is not None:
            term = JobTerm(self._topology(form.same, f"{at}.same"), chosen)
            near = JobAffinity((*near.required, term), near.preferred)
        elif form.different is not None:
            term = JobTerm(self._topology(form.different, f"{at}.different"), chosen)
            away = JobAffinity((*away.required, term), away.preferred)
        elif form.regions is not None:
            if not chosen:
                self.problems.append((f"{at}.with", "select the jobs to count, for example app=web"))
            spread.append(SpreadRule("region", selector=chosen, min_domains=form.regions))
        return near, away

    def spread(self, form: SpreadForm, at: str) -> SpreadRule:
        if form.match is not None:
            chosen = self.selector(form.match, f"{at}.match")
        else:
            chosen = tuple(Requirement(key, "In", (value,)) for key, value in sorted(self.labels.items()))
        if not chosen:
            self.problems.append((f"{at}.match", "select the jobs to count: match: app=web, or give the job labels"))
        if not form.hard and form.min_domains != 1:
            self.problems.append((f"{at}.min_domains", "needs hard: true"))
        topology = self._topology(form.topology, f"{at}.topology")
        return SpreadRule(
            topology, form.max_skew, form.hard, chosen, form.min_domains, form.honour_affinity, form.honour_taints
        )

    def constraint(self, form: Constraint, at: str) -> SpreadRule:
        chosen = self._labels(form.label_selector, f"{at}.labelSelector")
        if chosen is not None:
            chosen += self._own_labels(form.match_label_keys or (), "In")
        elif form.match_label_keys:
            self.problems.append((f"{at}.matchLabelKeys", "needs a labelSelector"))
        hard = form.when_unsatisfiable == "DoNotSchedule"
        if not hard and form.min_domains is not None and form.min_domains != 1:
            self.problems.append((f"{at}.minDomains", "needs whenUnsatisfiable: DoNotSchedule"))
        topology = self._topology(form.topology_key, f"{at}.topologyKey")
        return SpreadRule(
            topology, form.max_skew, hard, chosen, form.min_domains or 1,
            form.affinity_policy != "Ignore", form.taints_policy == "Honor",
        )  # fmt: skip

    def port(self, form: int | PortForm, at: str) -> HostPort | None:
        if isinstance(form, int):
            return HostPort(form)
        if form.port is not None and form.host_port is not None and form.port != form.host_port:
            self.problems.append((at, "port and hostPort differ; give one of them"))
        number = form.port or form.host_port
        if number is None and form.container_port is None:
            self.problems.append((f"{at}.port", "missing key"))
        if not number:
            return None  # a container port alone takes no port of the node
        ip = form.ip or form.host_ip or "0.0.0.0"
        try:
            ip = str(ip_address(ip))
        except ValueError:
            self.problems.append((f"{at}.ip", f"{safe_repr(ip)} is not an address"))
        return HostPort(number, form.protocol, ip)

    def selector(self, text: str, at: str) -> Selector:
        """`*` selects every job."""
        if text.strip() == ALL_JOBS:
            return ()
        try:
            found = tuple(check_requirement_names(requirement) for requirement in parse_selector(text))
            if not found:
                raise InvalidInput("an empty selector", hint="for example app=web, or * for every job")
            return found
        except InvalidInput as error:
            self.problems.append((at, error_text(error)))
            return ()

    def _labels(self, form: LabelSelector | None, at: str) -> Selector | None:
        if form is None:
            return None
        pairs = [Requirement(key, "In", (value,)) for key, value in sorted((form.match_labels or {}).items())]
        pairs += [Requirement(one.key, one.operator, tuple(one.values or ())) for one in form.match_expressions or ()]
        try:
            return tuple(check_requirement(check_requirement_names(one)) for one in pairs)
        except InvalidInput as error:
            self.problems.append((at, error_text(error)))
            return ()

    def _own_labels(self, keys: Sequence[str], operator: str) -> Selector:
        """Conditions on the job's own values of these labels."""
        return tuple(
            Requirement(key, "In" if operator == "In" else "NotIn", (self.labels[key],))
            for key in keys
            if key in self.labels
        )

    def _topology(self, key: str, at: str) -> str:
        return try_parse(self.problems, at, label_key, key, key)

    def _projects(self, names: Sequence[str], at: str) -> tuple[str, ...]:
        return try_parse(self.problems, at, lambda given: tuple(map(plain_name, given)), names, ())


# In Hodei's form if it can express the rules, else in that of Kubernetes.

_MAX_SELECTOR = 1024


def render_rules(task: TaskSpec) -> dict[str, Any]:
    """The keys of a task; empty values are omitted by the caller."""
    in_short = all(map(_short_spread, task.spread))
    return {
        "job_affinity": _short(task.job_affinity),
        "job_anti_affinity": _short(task.job_anti_affinity),
        "spread": [_short_spread(rule) for rule in task.spread] if in_short else [],
        "topology_spread_constraints": [] if in_short else [_constraint(rule) for rule in task.spread],
        "ports": [_port(port) for port in task.ports],
    }


def render_pod_blocks(task: TaskSpec) -> dict[str, Any]:
    """The Kubernetes blocks of `affinity`, for rules that Hodei's form cannot express."""
    pairs = (("podAffinity", task.job_affinity), ("podAntiAffinity", task.job_anti_affinity))
    return {key: _block(affinity) for key, affinity in pairs if affinity != JobAffinity() and not _short(affinity)}


def _short(affinity: JobAffinity) -> dict[str, Any]:
    required = [_short_term(term) for term in affinity.required]
    preferred = [(weighted.weight, _short_term(weighted.term)) for weighted in affinity.preferred]
    if not all(required) or not all(term for _, term in preferred):
        return {}
    terms = [{"weight": weight} | term for weight, term in preferred]
    return ({"required": required} if required else {}) | ({"preferred": terms} if terms else {})


def _short_term(term: JobTerm) -> dict[str, Any]:
    """Empty if Hodei's form cannot express it."""
    match = _selector_text(term.selector)
    project_match = _selector_text(term.project_selector) if term.project_selector is not None else ""
    if match is None or project_match is None:
        return {}
    out: dict[str, Any] = {"match": match, "topology": term.topology}
    if term.projects:
        out["projects"] = list(term.projects)
    return out | ({"project_match": project_match} if term.project_selector is not None else {})


def _short_spread(rule: SpreadRule) -> dict[str, Any]:
    match = _selector_text(rule.selector)
    if match is None or match == ALL_JOBS:
        return {}
    defaults = SpreadRule(rule.topology)
    out: dict[str, Any] = {"topology": rule.topology, "match": match}
    for key in ("max_skew", "hard", "min_domains", "honour_affinity", "honour_taints"):
        if getattr(rule, key) != getattr(defaults, key):
            out[key] = getattr(rule, key)
    return out


def _selector_text(selector: tuple[Requirement, ...] | None) -> str | None:
    """None if the selector cannot be written as text."""
    if selector is None:
        return None
    text = ", ".join(map(str, selector))
    try:
        if len(text) > _MAX_SELECTOR or parse_selector(text) != selector:
            return None
    except InvalidInput:
        return None
    return text or ALL_JOBS


def _block(affinity: JobAffinity) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if affinity.required:
        out["requiredDuringSchedulingIgnoredDuringExecution"] = [_pod_term(term) for term in affinity.required]
    if affinity.preferred:
        out["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": term.weight, "podAffinityTerm": _pod_term(term.term)} for term in affinity.preferred
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
    return {"matchExpressions": list(map(requirement_document, selector))} if selector else {}


def _port(port: HostPort) -> int | dict[str, Any]:
    if port == HostPort(port.port):
        return port.port
    out: dict[str, Any] = {"port": port.port, "protocol": port.protocol}
    return out | ({} if port.ip == "0.0.0.0" else {"ip": port.ip})
