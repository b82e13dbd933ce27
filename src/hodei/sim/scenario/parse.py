"""Parses scenario files. Every problem is reported with file, line and path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec import structs

from hodei.configuration import node_offer, parse_taint
from hodei.control.admission.dependency_names import (
    ResolvedReferences,
    UnresolvedDependency,
    has_dependencies,
    reject_cycles,
    resolve_names,
)
from hodei.jobfile.check import convert
from hodei.jobfile.parse import parse_job
from hodei.jobfile.values import Problems, did_you_mean, error_text, try_parse
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.config import NodeConfig, SchedulingConfig
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.errors import HodeiError, InvalidInput
from hodei.model.names import safe_repr
from hodei.model.node import Node
from hodei.model.resources import parse_duration_ms
from hodei.sim.policies import POLICIES, policy
from hodei.sim.scenario import schema
from hodei.sim.scenario.schema import ScenarioJob
from hodei.wiring import instant_node, make_controller

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class Piece(NamedTuple):
    """A value in the text: its line from 1, and its offsets. `is_flow`: written in brackets."""

    line: int
    start: int
    end: int
    is_flow: bool = False


def piece_at(text: str, path: str) -> Piece | None:
    """The value at a path such as `jobs[2].cpu`, or its nearest parent; None for an empty file."""
    node = _composed(text)
    if node is None:
        return None
    line = node.start_mark.line
    for number, key in _STEP.findall(path):
        inner = None
        if number and isinstance(node, yaml.SequenceNode) and int(number) < len(node.value):
            inner = node.value[int(number)]
            line = inner.start_mark.line
        elif key and isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if getattr(name, "value", None) == key:
                    inner, line = value, name.start_mark.line
        if inner is None:
            break
        node = inner
    is_flow = bool(getattr(node, "flow_style", False))
    return Piece(line + 1, node.start_mark.index, node.end_mark.index, is_flow)


@lru_cache(maxsize=2)
def _composed(text: str) -> Any:
    return yaml.compose(text, Loader=_Loader)


def line_of(text: str, path: str) -> int:
    found = piece_at(text, path)
    return found.line if found else 1


def resolve_dependencies(jobs: Sequence[ScenarioJob], report: Callable[[str, str], object]) -> list[ScenarioJob]:
    """Names in `after` become job ids, as on a server at submission. An id that no job of the file has stands for an earlier
    job that met the dependency. A job cannot depend on one that is submitted later."""
    specs = [job.spec for job in jobs]
    if not has_dependencies(specs):
        return list(jobs)
    by_id = {job.id: job for job in jobs}
    by_name = {(job.spec.project, job.spec.name): [job.id] for job in jobs}
    known = [structs.replace(spec, after=_known_only(spec.after, by_id)) for spec in specs]
    found = ResolvedReferences(by_name, {job.id: job.name for job in jobs})
    try:
        reject_cycles(known)
    except InvalidInput as error:
        report("jobs", error.message)
        return list(jobs)
    out = []
    for place, (job, spec) in enumerate(zip(jobs, known, strict=True)):
        try:
            # One by one, so that a name becomes the id in the file and not the next free one.
            (spec,) = resolve_names([structs.replace(spec, name=f"{spec.name}.")], job.id, found)
        except UnresolvedDependency as error:
            report(f"jobs[{place}].after", error.problem)
            continue
        late = [one.name for one in spec.after.of if one.job and by_id[one.job].at_ms > job.at_ms]
        if late:
            report(f"jobs[{place}].after", f"{late[0]} is submitted later than this job; submit it earlier")
        out.append(structs.replace(job, spec=structs.replace(spec, name=job.spec.name)))
    return out


def _known_only(after: Dependencies, by_id: dict[int, ScenarioJob]) -> Dependencies:
    # In a scenario every element is a job of its own, so an id means exactly that job.
    of: list[Dependency] = [
        structs.replace(one, elements="") if one.job else one for one in after.of if not one.job or one.job in by_id
    ]
    need = max(after.needed - (len(after.of) - len(of)), 0)
    return Dependencies(tuple(of) if need else (), 0 if need == len(of) else need, after.timeout_ms)


# Start of simulated time: far enough from the epoch for times before the scenario.
BEGIN_MS = 1_000_000_000_000
ENDINGS = (".scenario.yaml", ".scenario.yml")
_MAX_BYTES = 8 * 2**20
_MAX_NODES = 10_000
_KEYS = ("scenario", "policy", "config", "cluster", "jobs", "facts", "expect", "until")
_NODE_KEYS = ("count", "there", "backend")
_JOB_KEYS = ("at", "run", "exit", "stopping", "running", "id", "user")
_FULL_FORM = frozenset({"apiVersion", "api_version", "kind", "metadata", "spec"})


def read_scenario(path: Path) -> schema.Scenario:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
    return parse_scenario(raw, str(path))


def parse_scenario(raw: bytes, name: str) -> schema.Scenario:
    documents = load_yaml(raw, name=name, max_bytes=_MAX_BYTES)
    if len(documents) != 1 or not isinstance(documents[0], dict):
        hint = "see docs/reference/scenario-file.md"
        raise InvalidInput(f"{name}: expected one mapping with the keys {', '.join(_KEYS)}", hint=hint)
    text = raw.decode("utf-8-sig")
    problems: Problems = []
    scenario = _Parser(documents[0], problems).scenario(name, text)
    if problems:
        listed = tuple(
            (f"{name}:{line_of(text, path)}", f"{path}: {what}" if path else what) for path, what in problems
        )
        message = f"{listed[0][0]}: {listed[0][1]}"
        more = f" (and {len(listed) - 1} more)" if len(listed) > 1 else ""
        raise InvalidInput(message + more, hint="see docs/reference/scenario-file.md", problems=listed)
    return scenario


class _Parser:
    def __init__(self, data: dict[str, Any], problems: Problems) -> None:
        self.data, self.problems = data, problems
        self.nodes: dict[str, Node] = {}
        self.absent: set[str] = set()
        self.invalid: list[str] = []

    def scenario(self, name: str, text: str) -> schema.Scenario:
        for key in self.data:
            if key not in _KEYS:
                self.report(str(key), f"unknown key {safe_repr(key)}{did_you_mean(str(key), _KEYS)}")
        title = self.data.get("scenario")
        if not isinstance(title, str) or not title.strip():
            self.report("scenario", "missing: describe in a sentence what it shows")
        chosen, config = self.policy()
        self.cluster()
        jobs = self.jobs()
        known = [job.name for job in jobs] + self.invalid  # an invalid job is not also reported as missing
        facts = [fact for place, one in self.entries("facts") for fact in self.fact(one, place, known)]
        expect = [self.expectation(one, place, known) for place, one in self.entries("expect", needed=False)]
        until = self.data.get("until")
        return schema.Scenario(
            title=str(title).strip(),
            policy=chosen,
            config=config,
            nodes=tuple(self.nodes.values()),
            absent=frozenset(self.absent),
            jobs=tuple(jobs),
            facts=tuple(facts),
            expect=tuple(one for one in expect if one is not None),
            until_ms=None if until is None else self.moment(until, "until"),
            source=name,
            text=text,
        )

    def report(self, path: str, text: str) -> None:
        self.problems.append((path, text))

    def entries(self, key: str, *, needed: bool = False) -> Iterable[tuple[int, Any]]:
        given = self.data.get(key)
        if given is None:
            if needed:
                self.report(key, "missing: give at least one")
            return ()
        if not isinstance(given, list):
            self.report(key, "expected a list")
            return ()
        return enumerate(given)

    def policy(self) -> tuple[str, SchedulingConfig]:
        name, config = self.data.get("policy"), self.data.get("config")
        if name is not None and config is not None:
            self.report("config", "policy and config are both given; keep one of them")
        if name is not None:
            if isinstance(name, str) and name in POLICIES:
                return name, policy(name)
            guess = did_you_mean(str(name), POLICIES)
            self.report("policy", f"there is no policy {safe_repr(name)}{guess}; one of {', '.join(POLICIES)}")
            return "", SchedulingConfig()
        if config is None:
            return "the server's default", SchedulingConfig()
        read = self.struct(config, SchedulingConfig, "config")
        if read is None:
            return "", SchedulingConfig()
        try_parse(self.problems, "config", make_controller, read, None)
        return "config", read

    def struct(self, data: Any, kind: type[Any], path: str) -> Any:
        wrong: Problems = []
        read = convert(data, kind, path, wrong)
        self.problems += wrong
        return None if wrong else read

    def cluster(self) -> None:
        for place, entry in self.entries("cluster", needed=True):
            path = f"cluster[{place}]"
            if not isinstance(entry, dict):
                self.report(path, "expected a mapping: {name: n, count: 2, cpu: 4, memory: 8Gi}")
                continue
            known = (*NodeConfig.__struct_fields__, *_NODE_KEYS)
            for key in entry:
                if key not in known:
                    self.report(f"{path}.{key}", f"unknown key {safe_repr(key)}{did_you_mean(str(key), known)}")
            own = {key: value for key, value in entry.items() if key in NodeConfig.__struct_fields__}
            config = self.struct(own, NodeConfig, path)
            count = entry.get("count")
            if count is not None and (not isinstance(count, int) or not 1 <= count <= _MAX_NODES):
                self.report(f"{path}.count", f"expected a whole number from 1 to {_MAX_NODES}")
                count = None
            if config is not None:
                offer = try_parse(self.problems, path, node_offer, config, None)
                if offer is not None:
                    node = structs.replace(
                        instant_node(offer), backend=str(entry.get("backend", "local")), kind="local"
                    )
                    self.add_nodes(node, count, path, there=entry.get("there", True))
        if not self.nodes and not self.problems:
            self.report("cluster", "no nodes: add at least one")

    def add_nodes(self, node: Node, count: int | None, path: str, *, there: bool) -> None:
        for name in [node.name] if count is None else [f"{node.name}{number}" for number in range(1, count + 1)]:
            if name in self.nodes:
                self.report(f"{path}.name", f"there are two nodes called {name!r}")
            self.nodes[name] = structs.replace(node, name=name)
            if not there:
                self.absent.add(name)

    def jobs(self) -> list[schema.ScenarioJob]:
        out: list[schema.ScenarioJob] = []
        for place, entry in self.entries("jobs", needed=True):
            path = f"jobs[{place}]"
            if not isinstance(entry, dict):
                self.report(path, "expected a mapping: {name: a, cpu: 2, at: 0s, run: 10m}")
                continue
            job = self.job(entry, path, max((job.id for job in out), default=0) + 1)
            if job is None:
                self.invalid.append(str(entry.get("name", "")))
                continue
            if any(job.name == other.name for other in out):
                self.report(f"{path}.name", f"there are two jobs called {job.name!r}")
            if any(job.id == other.id for other in out):
                self.report(f"{path}.id", f"there are two jobs with the id {job.id}")
            out.append(job)
        return resolve_dependencies(out, self.report)

    def job(self, entry: dict[str, Any], path: str, id: int) -> schema.ScenarioJob | None:
        own = {key: value for key, value in entry.items() if key in _JOB_KEYS}
        at_ms = self.moment(own.get("at", 0), f"{path}.at", negative=True)
        document = with_commands({key: value for key, value in entry.items() if key not in _JOB_KEYS})
        if not _FULL_FORM & document.keys() and "name" not in document:
            self.report(f"{path}.name", "missing key")
            return None
        try:
            spec = parse_job(document, now_ms=BEGIN_MS + at_ms)
        except InvalidInput as error:
            found = error.problems or (("", error_text(error)),)
            self.problems += [(f"{path}.{inner}" if inner else path, text) for inner, text in found]
            return None
        given = own.get("id", id)
        if not isinstance(given, int) or given < 1:
            self.report(f"{path}.id", "expected a whole number from 1")
            given = id
        runs = self.as_list(own["run"]) if "run" in own else [spec.estimate_ms / 1000] if spec.estimate_ms else []
        running = self.names(own.get("running"), f"{path}.running", list(self.nodes), "node")
        if running and len(running) not in (1, spec.size):
            self.report(f"{path}.running", f"{len(running)} nodes for {spec.size} members; name one, or one for each")
        if running and at_ms > 0:
            self.report(
                f"{path}.at", "the job already runs when the scenario starts: write 0s or an earlier time such as -5m"
            )
        codes = self.as_list(own.get("exit", 0))
        if not all(isinstance(code, int) and 0 <= code <= 255 for code in codes):
            self.report(f"{path}.exit", "expected exit codes from 0 to 255")
            codes = [0]
        return schema.ScenarioJob(
            id=given,
            name=spec.name,
            spec=structs.replace(spec, user=str(own.get("user", ""))),
            at_ms=at_ms,
            run_ms=tuple(schema.FOREVER_MS if run == "forever" else self.moment(run, f"{path}.run") for run in runs),
            exit_codes=tuple(codes),
            stopping_ms=self.moment(own.get("stopping", 0), f"{path}.stopping"),
            running=tuple(running) * (spec.size if len(running) == 1 else 1),
        )

    def fact(self, entry: Any, place: int, jobs: list[str]) -> list[schema.ScenarioFact]:
        path = f"facts[{place}]"
        read: schema.FactForm | None = convert(entry, schema.FactForm, path, self.problems)
        if read is None:
            return []
        verbs = (*schema.NODE_VERBS, *schema.JOB_VERBS, *schema.DATA_VERBS)
        verbs_given = [verb for verb in verbs if getattr(read, verb) is not None]
        if len(verbs_given) != 1:
            problem = f"{' and '.join(verbs_given)} together" if verbs_given else "no verb"
            self.report(path, f"{problem}; give one of {', '.join(verbs)}")
            return []
        verb: Any = verbs_given[0]
        on_nodes = verb in schema.NODE_VERBS
        known, kind = (list(self.nodes), "node") if on_nodes else (jobs, "job")
        taint = None
        if verb in ("taint", "untaint"):
            taint = try_parse(self.problems, f"{path}.as", parse_taint, read.taint_as or "", None)
        elif read.taint_as is not None:
            self.report(f"{path}.as", "only for taint and untaint")
        at_ms = self.moment(read.at, f"{path}.at")
        if read.appear is not None:
            what = [read.appear] if isinstance(read.appear, str) else read.appear
            return [schema.ScenarioFact(place, at_ms, verb, each) for each in what]
        return [
            schema.ScenarioFact(place, at_ms, verb, who, taint, read.member, read.exit or 1)
            for who in self.names(getattr(read, verb), f"{path}.{verb}", known, kind)
        ]

    def expectation(self, entry: Any, place: int, jobs: list[str]) -> schema.Expectation | None:
        path = f"expect[{place}]"
        read: schema.ExpectForm | None = convert(entry, schema.ExpectForm, path, self.problems)
        if read is None:
            return None
        subjects = [
            key for key in ("job", "preempted", "never", "start_reservations_broken") if getattr(read, key) is not None
        ]
        if len(subjects) != 1:
            self.report(path, "an expectation is about one of job, preempted, never or start_reservations_broken")
        about_job = (read.state, read.reason, read.starts, read.on, read.not_on, read.ends)
        if read.job is not None and all(one is None for one in about_job):
            self.report(path, f"no expectation for {read.job}; add starts, on, not_on, ends, or state with at")
        if read.job is None and any(one is not None for one in about_job):
            self.report(path, "which job? add job: NAME")
        if read.state is not None and read.at is None:
            self.report(f"{path}.state", "when? add at: 1m")
        if read.at is not None and (read.starts is not None or read.ends is not None):
            self.report(f"{path}.at", "not together with starts or ends, which have their own time")
        if read.reason is not None and read.at is None and read.ends is None:
            self.report(f"{path}.reason", "when? add at: 1m, or ends")
        if read.within is not None and read.ends is None:
            self.report(f"{path}.within", "only together with ends")
        for key in ("job", "preempted", "by"):
            self.names(getattr(read, key), f"{path}.{key}", jobs, "job")
        return schema.Expectation(
            place=place,
            job=read.job or "",
            at_ms=None if read.at is None else self.moment(read.at, f"{path}.at"),
            attempt=read.attempt or 1,
            state=read.state or "",
            reason=read.reason or "",
            starts=None if read.starts is None else self.times(read.starts, f"{path}.starts"),
            on=tuple(self.names(read.on, f"{path}.on", list(self.nodes), "node")),
            not_on=tuple(self.names(read.not_on, f"{path}.not_on", list(self.nodes), "node")),
            ends=read.ends or "",
            within_ms=None if read.within is None else self.moment(read.within, f"{path}.within"),
            preempted=read.preempted or "",
            by=read.by or "",
            never=read.never or "",
            start_reservations_broken=read.start_reservations_broken,
        )

    def times(self, given: Any, path: str) -> schema.Times:
        if isinstance(given, schema.TimesForm):
            if given.before is None and given.after is None and given.about is None:
                self.report(path, "expected a time, or before, after or about with one")
            before, after, about = (
                None if it is None else self.moment(it, f"{path}.{key}")
                for key, it in (("before", given.before), ("after", given.after), ("about", given.about))
            )
            return schema.Times(before_ms=before, after_ms=after, about_ms=about)
        if given == "never":
            return schema.Times(never=True)
        return schema.Times(exactly_ms=self.moment(given, path))

    def moment(self, given: Any, path: str, *, negative: bool = False) -> int:
        """Milliseconds since the start of the scenario, or of a duration."""
        before = negative and isinstance(given, str) and given.strip().startswith("-")
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            self.report(path, "expected a time such as 90s, 15m or 1h30m")
            return 0
        try:
            ms = parse_duration_ms(given.strip()[1:] if before and isinstance(given, str) else given)
        except HodeiError as error:
            self.report(path, f"{error.message}; {error.hint}")
            return 0
        return -ms if before else ms

    def names(self, given: Any, path: str, known: list[str], kind: str) -> list[str]:
        wanted = [] if given is None else self.as_list(given)
        for name in wanted:
            if name not in known:
                self.report(path, f"there is no {kind} {safe_repr(name)}{did_you_mean(str(name), known)}")
        return [str(name) for name in wanted]

    def as_list(self, given: Any) -> list[Any]:
        return given if isinstance(given, list) else [given]


def with_commands(document: dict[str, Any]) -> dict[str, Any]:
    """The command of a job has no effect in a scenario, so it is optional."""
    spec = document.get("spec")
    if isinstance(spec, dict) and isinstance(spec.get("tasks"), list):
        tasks = [_with_command(task) if isinstance(task, dict) else task for task in spec["tasks"]]
        return document | {"spec": spec | {"tasks": tasks}}
    return document if _FULL_FORM & document.keys() else _with_command(document)


def _with_command(task: dict[str, Any]) -> dict[str, Any]:
    return task if {"command", "image"} & task.keys() else task | {"command": ["true"]}
