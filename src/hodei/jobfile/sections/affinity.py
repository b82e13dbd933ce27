"""Rules about company, from either spelling to the model: other jobs, spreading, host ports. Back again: `company_render`."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from hodei.jobfile import schema
from hodei.jobfile.amounts import said
from hodei.jobfile.names import label_key, label_value, plain_name, shown
from hodei.jobfile.sections import affinity_schema as given
from hodei.jobfile.types import Expression
from hodei.model.errors import InvalidInput
from hodei.model.job_affinity import HostPort, JobAffinity, JobTerm, SpreadRule, WeightedJobTerm
from hodei.model.selector import Requirement, check_requirement, parse_selector

Problems = list[tuple[str, str]]
Selector = tuple[Requirement, ...]
Labels = dict[str, str]
Rules = tuple[JobAffinity, JobAffinity, tuple[SpreadRule, ...], tuple[HostPort, ...]]
EVERY = "*"
_NOBODY = JobAffinity()
_NO_RULES: Rules = (_NOBODY, _NOBODY, (), ())


def rules(form: schema.FlatJob | schema.TaskForm, labels: Labels, at: str, problems: Problems) -> Rules:
    """The rules of a `TaskSpec` about company, in order. `labels` are the job's own."""
    pods = form.affinity
    blocks = pods is not None and (pods.pod_affinity is not None or pods.pod_anti_affinity is not None)
    if not (
        blocks or form.job_affinity or form.job_anti_affinity or form.company or form.spread or form.constraints
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
    for i, wish in enumerate(form.company or ()):
        near, away = reading.company(wish, f"{at}company[{i}]", near, away, spread)
    ports = [reading.port(one, f"{at}ports[{i}]") for i, one in enumerate(form.ports or ())]
    held = tuple(port for port in ports if port is not None)
    if any(one.clashes(other) for i, one in enumerate(held) for other in held[:i]):
        problems.append((f"{at}ports", "the same port twice"))
    return near, away, tuple(spread), held


class _Reading:
    """Reads the parts; every mistake becomes a problem at its path."""

    def __init__(self, labels: Labels, problems: Problems) -> None:
        self.labels = labels
        self.problems = problems

    # --------------------------------------------------------------------------------------- other jobs

    def both(
        self, ours: given.JobAffinityForm | None, theirs: given.PodAffinity | None, at: str, key: str, block: str
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

    def term(self, form: given.JobTermForm, at: str) -> JobTerm:
        projects = self._projects(form.projects or (), f"{at}.projects")
        picked = None if form.project_match is None else self.selector(form.project_match, f"{at}.project_match")
        topology = self._topology(form.topology, f"{at}.topology")
        return JobTerm(topology, self.selector(form.match, f"{at}.match"), projects, picked)

    def pod_term(self, form: given.PodTerm, at: str) -> JobTerm:
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

    def company(
        self, form: given.CompanyForm, at: str, near: JobAffinity, away: JobAffinity, spread: list[SpreadRule]
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

    def spread(self, form: given.SpreadForm, at: str) -> SpreadRule:
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

    def constraint(self, form: given.Constraint, at: str) -> SpreadRule:
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

    def port(self, form: int | given.PortForm, at: str) -> HostPort | None:
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

    def _labels(self, form: given.LabelSelector | None, at: str) -> Selector | None:
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
