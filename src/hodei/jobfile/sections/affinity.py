"""Rules about other jobs, from either spelling to the model: other jobs, spreading, host ports. Back again: `affinity_render`."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, field

from hodei.jobfile.names import label_key, label_value, plain_name, shown
from hodei.jobfile.types import Expression, Expressions, Form, Key, Labels, Line, Short, Weight, Word, Words, about
from hodei.jobfile.values import said
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

if TYPE_CHECKING:
    from hodei.jobfile import schema


# ------------------------------------------------------------------------------------- affinity schema
# What may be written about company (other jobs, spreading, host ports), in our words and in Kubernetes' own.


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


class AffinityRuleForm(Form, frozen=True):
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


# ----------------------------------------------------------------------------------------------------

Problems = list[tuple[str, str]]
Selector = tuple[Requirement, ...]
JobLabels = dict[str, str]
Rules = tuple[JobAffinity, JobAffinity, tuple[SpreadRule, ...], tuple[HostPort, ...]]
EVERY = "*"
_NOBODY = JobAffinity()
_NO_RULES: Rules = (_NOBODY, _NOBODY, (), ())


def rules(form: schema.FlatJob | schema.TaskForm, labels: JobLabels, at: str, problems: Problems) -> Rules:
    """The rules of a `TaskSpec` about other jobs, in order. `labels` are the job's own."""
    pods = form.affinity
    blocks = pods is not None and (pods.pod_affinity is not None or pods.pod_anti_affinity is not None)
    if not (
        blocks or form.job_affinity or form.job_anti_affinity or form.affinity_rules or form.spread or form.constraints
        or form.ports
    ):  # fmt: skip
        return _NO_RULES
    reading = _Reading(labels, problems)
    near = reading.both(form.job_affinity, pods.pod_affinity if pods else None, at, "job_affinity", "podAffinity")
    away = reading.both(
        form.job_anti_affinity, pods.pod_anti_affinity if pods else None, at, "job_anti_affinity", "podAntiAffinity"
    )
    spread = [reading.spread(one, f"{at}spread[{i}]") for i, one in enumerate(form.spread or ())]
    path = f"{at}topologySpreadConstraints"
    spread += [reading.constraint(one, f"{path}[{i}]") for i, one in enumerate(form.constraints or ())]
    for i, wish in enumerate(form.affinity_rules or ()):
        near, away = reading.shorthand(wish, f"{at}affinity_rules[{i}]", near, away, spread)
    ports = [reading.port(one, f"{at}ports[{i}]") for i, one in enumerate(form.ports or ())]
    held = tuple(port for port in ports if port is not None)
    if any(one.clashes(other) for i, one in enumerate(held) for other in held[:i]):
        problems.append((f"{at}ports", "the same port twice"))
    return near, away, tuple(spread), held


class _Reading:
    """Reads the parts; every mistake becomes a problem at its path."""

    def __init__(self, labels: JobLabels, problems: Problems) -> None:
        self.labels = labels
        self.problems = problems

    # --------------------------------------------------------------------------------------- other jobs

    def both(
        self, ours: JobAffinityForm | None, theirs: PodAffinity | None, at: str, key: str, block: str
    ) -> JobAffinity:
        if ours is not None and theirs is not None:
            self.problems.append((f"{at}{key}", f"give either {key} or affinity.{block}, not both"))
        if ours is not None:
            path = f"{at}{key}"
            return JobAffinity(
                tuple(self.term(term, f"{path}.required[{i}]") for i, term in enumerate(ours.required or ())),
                tuple(
                    WeightedJobTerm(wish.weight, self.term(wish, f"{path}.preferred[{i}]"))
                    for i, wish in enumerate(ours.preferred or ())
                ),
            )
        if theirs is None:
            return _NOBODY
        required = f"{at}affinity.{block}.requiredDuringSchedulingIgnoredDuringExecution"
        preferred = f"{at}affinity.{block}.preferredDuringSchedulingIgnoredDuringExecution"
        return JobAffinity(
            tuple(self.pod_term(term, f"{required}[{i}]") for i, term in enumerate(theirs.required or ())),
            tuple(
                WeightedJobTerm(wish.weight, self.pod_term(wish.term, f"{preferred}[{i}].podAffinityTerm"))
                for i, wish in enumerate(theirs.preferred or ())
            ),
        )

    def term(self, form: JobTermForm, at: str) -> JobTerm:
        projects = self._projects(form.projects or (), f"{at}.projects")
        picked = None if form.project_match is None else self.selector(form.project_match, f"{at}.project_match")
        topology = self._topology(form.topology, f"{at}.topology")
        return JobTerm(topology, self.selector(form.match, f"{at}.match"), projects, picked)

    def pod_term(self, form: PodTerm, at: str) -> JobTerm:
        chosen = self._labels(form.label_selector, f"{at}.labelSelector")
        if chosen is not None:
            chosen += self._own(form.match_label_keys or (), "In")
            chosen += self._own(form.mismatch_label_keys or (), "NotIn")
        elif form.match_label_keys or form.mismatch_label_keys:
            self.problems.append((at, "matchLabelKeys and mismatchLabelKeys need a labelSelector"))
        return JobTerm(
            self._topology(form.topology_key, f"{at}.topologyKey"),
            chosen,
            self._projects(form.namespaces or (), f"{at}.namespaces"),
            self._labels(form.namespace_selector, f"{at}.namespaceSelector"),
        )

    def shorthand(
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
                self.problems.append((f"{at}.with", "say which jobs are counted, for example app=web"))
            spread.append(SpreadRule("region", selector=chosen, min_domains=form.regions))
        return near, away

    # ------------------------------------------------------------------------------------------ spreading

    def spread(self, form: SpreadForm, at: str) -> SpreadRule:
        if form.match is not None:
            chosen = self.selector(form.match, f"{at}.match")
        else:
            chosen = tuple(Requirement(key, "In", (value,)) for key, value in sorted(self.labels.items()))
        if not chosen:
            self.problems.append((f"{at}.match", "say which jobs are counted: match: app=web, or give the job labels"))
        if not form.hard and form.min_domains != 1:
            self.problems.append((f"{at}.min_domains", "needs hard: true"))
        topology = self._topology(form.topology, f"{at}.topology")
        return SpreadRule(
            topology, form.max_skew, form.hard, chosen, form.min_domains, form.honour_affinity, form.honour_taints
        )

    def constraint(self, form: Constraint, at: str) -> SpreadRule:
        chosen = self._labels(form.label_selector, f"{at}.labelSelector")
        if chosen is not None:
            chosen += self._own(form.match_label_keys or (), "In")
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

    # ---------------------------------------------------------------------------------------------- ports

    def port(self, form: int | PortForm, at: str) -> HostPort | None:
        if isinstance(form, int):
            return HostPort(form)
        if form.port is not None and form.host_port is not None and form.port != form.host_port:
            self.problems.append((at, "port and hostPort differ; give one of them"))
        number = form.port or form.host_port
        if number is None and form.container_port is None:
            self.problems.append((f"{at}.port", "missing key"))
        if not number:
            return None  # a port of a container alone takes nothing from the node
        ip = form.ip or form.host_ip or "0.0.0.0"
        try:
            ip = str(ip_address(ip))
        except ValueError:
            self.problems.append((f"{at}.ip", f"{shown(ip)} is not an address"))
        return HostPort(number, form.protocol, ip)

    # --------------------------------------------------------------------------------------------- pieces

    def selector(self, text: str, at: str) -> Selector:
        """`*` means every job."""
        if text.strip() == EVERY:
            return ()
        try:
            found = tuple(_checked(requirement) for requirement in parse_selector(text))
            if not found:
                raise InvalidInput("an empty selector", hint="for example app=web, or * for every job")
            return found
        except InvalidInput as error:
            self.problems.append((at, said(error)))
            return ()

    def _labels(self, form: LabelSelector | None, at: str) -> Selector | None:
        if form is None:
            return None
        pairs = [Requirement(key, "In", (value,)) for key, value in sorted((form.match_labels or {}).items())]
        pairs += [self._requirement(one) for one in form.match_expressions or ()]
        try:
            return tuple(check_requirement(_checked(one)) for one in pairs)
        except InvalidInput as error:
            self.problems.append((at, said(error)))
            return ()

    def _requirement(self, form: Expression) -> Requirement:
        return Requirement(form.key, form.operator, tuple(form.values or ()))

    def _own(self, keys: Sequence[str], operator: str) -> Selector:
        """Conditions on the job's own values of these labels."""
        return tuple(
            Requirement(key, "In" if operator == "In" else "NotIn", (self.labels[key],))
            for key in keys
            if key in self.labels
        )

    def _topology(self, key: str, at: str) -> str:
        try:
            return label_key(key)
        except InvalidInput as error:
            self.problems.append((at, said(error)))
            return key

    def _projects(self, names: Sequence[str], at: str) -> tuple[str, ...]:
        try:
            return tuple(plain_name(name) for name in names)
        except InvalidInput as error:
            self.problems.append((at, said(error)))
            return ()


def _checked(requirement: Requirement) -> Requirement:
    label_key(requirement.key)
    for value in requirement.values if requirement.operator in ("In", "NotIn") else ():
        label_value(value)
    return requirement


# ------------------------------------------------------------------------------------- affinity render
# Rules about company as people read them: in our words where these say it all, else in Kubernetes' own.


_LINE = 1024


def render_rules(task: TaskSpec) -> dict[str, Any]:
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
