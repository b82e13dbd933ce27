"""The two forms of a job file as types: what a user may write, key by key. Nothing here has a meaning yet.

The types are read three times: by msgspec (fast, stops at the first mistake), by `check` (slow, finds every mistake) and
by `schema` (for editors). What the values mean is decided in `meaning`. `None` is "not given" throughout.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from hodei.jobfile.check import twins
from hodei.jobfile.sections.affinity import (
    AffinityRuleForm,
    Constraint,
    JobAffinityForm,
    PodAffinity,
    PortForm,
    SpreadForm,
)
from hodei.jobfile.sections.after import AfterKey
from hodei.jobfile.sections.array import ArrayKey
from hodei.jobfile.sections.escalation import EscalationKey
from hodei.jobfile.sections.gang import CheckpointForm, DistributionForm, GangForm
from hodei.jobfile.sections.health import HealthKey, RetryOnKey
from hodei.jobfile.types import (
    Command,
    Duration,
    Expressions,
    Key,
    Labels,
    Line,
    Long,
    Quantities,
    Quantity,
    Short,
    Weight,
    Whole,
    Word,
    Words,
)
from hodei.jobfile.types import Expression as Expression
from hodei.jobfile.types import Form as _Form
from hodei.jobfile.types import about as _about
from hodei.jobfile.types import text as _text

MAX_TASKS = 64
MAX_COUNT = 100_000
MAX_JOBS = 10_000

# ------------------------------------------------------------------------------------------- where it may run


class SelectorTerm(_Form, frozen=True):
    """All conditions of a term must hold."""

    match_expressions: Expressions | None = field(name="matchExpressions", default=None)
    match_fields: Expressions | None = field(name="matchFields", default=None)


class NodeSelector(_Form, frozen=True):
    """One of the terms must hold."""

    node_selector_terms: Annotated[list[SelectorTerm], Meta(min_length=1, max_length=64)] = field(
        name="nodeSelectorTerms"
    )


class PreferredTerm(_Form, frozen=True):
    """A term that adds its weight when it holds."""

    weight: Weight
    preference: SelectorTerm


class NodeAffinity(_Form, frozen=True):
    """Kubernetes' own block."""

    required: NodeSelector | None = field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)
    preferred: Annotated[list[PreferredTerm], Meta(max_length=64)] | None = field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=None
    )


class Preference(_Form, frozen=True):
    """A selector that adds its weight when it holds."""

    match: Annotated[Line, _about("A selector.", "disk=ssd")]
    weight: Annotated[Weight, _about("1 to 100.")] = 1


class AffinityForm(_Form, frozen=True):
    """Either `required` and `preferred` with selectors, or Kubernetes' blocks as they are."""

    required: (
        Annotated[
            list[Line],
            Meta(max_length=64),
            _about("Selectors; one of them must hold.", ["zone in (a, b)", "disk=ssd"]),
        ]
        | None
    ) = None
    preferred: Annotated[list[Preference], Meta(max_length=64), _about("What would be nice, by weight.")] | None = None
    node_affinity: NodeAffinity | None = field(name="nodeAffinity", default=None)
    pod_affinity: PodAffinity | None = field(name="podAffinity", default=None)
    pod_anti_affinity: PodAffinity | None = field(name="podAntiAffinity", default=None)


class TolerationForm(_Form, frozen=True):
    """Kubernetes' own shape."""

    key: Key | None = None
    operator: Literal["Equal", "Exists"] | None = None
    value: Word | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] | None = None
    seconds: Annotated[int, Meta(ge=0, le=2**53)] | None = field(name="tolerationSeconds", default=None)


class BackendForm(_Form, frozen=True):
    """At most one of `specific` and `preferred`."""

    specific: Annotated[Words, _about("One of these or nowhere.")] | None = None
    preferred: (
        Annotated[
            Words | dict[Word, Annotated[int, Meta(ge=1, le=100)]],
            _about(
                "These first, else any; with weights from 1 to 100 the heaviest first.", {"onprem": 80, "cloud": 20}
            ),
        ]
        | None
    ) = None
    avoid: Annotated[Words, _about("These only if no other has room.")] | None = None


class NearForm(_Form, frozen=True):
    """Where the work is wanted; nodes nearer to it score higher."""

    region: Word | None = None
    zone: Word | None = None
    datacenter: Word | None = None
    rack: Word | None = None
    lat: Annotated[float, Meta(ge=-90, le=90), _about("Degrees north.")] | None = None
    lng: Annotated[float, Meta(ge=-180, le=180), _about("Degrees east.")] | None = None


# ------------------------------------------------------------------------------------------- kinds of work

Restart = Annotated[
    Short,
    _about(
        "When an ended run is followed by another.",
        enum=["never", "on_failure", "always", "Never", "OnFailure", "Always"],
    ),
]


class LongRunningForm(_Form, frozen=True, tag="long-running", tag_field="type"):
    """A service that is not expected to end."""

    max_duration: Annotated[Duration, _about("Stop it after this long; fills `timeout`.", "30d")] | None = None
    restart_policy: Annotated[Restart, _about("Fills `restart`.")] | None = None


class BatchForm(_Form, frozen=True, tag="batch", tag_field="type"):
    """Work that runs to its end."""

    estimated_duration: Annotated[Duration, _about("Fills `estimate`.", "1h30m")] | None = None
    max_retries: Annotated[int, Meta(ge=0, le=1000), _about("Fills `retries`.")] | None = None


class ServerlessForm(_Form, frozen=True, tag="serverless", tag_field="type"):
    """A short call."""

    timeout: Annotated[Duration, _about("Fills `timeout`.", "30s")] | None = None
    cold_start_acceptable: bool | None = None


class DataProcessingForm(_Form, frozen=True, tag="data-processing", tag_field="type"):
    """Work whose place is decided by its data."""

    input_size: Annotated[Quantity, _about("Bytes read.", "500Gi")] | None = None
    output_size: Annotated[Quantity, _about("Bytes written.", "10Gi")] | None = None


class InteractiveForm(_Form, frozen=True, tag="interactive", tag_field="type"):
    """Someone is sitting in front of it."""

    max_execution_time: Annotated[Duration, _about("Fills `timeout`.", "8h")] | None = None
    idle_timeout: Annotated[Duration, _about("Stop it after being idle this long.", "20m")] | None = None


WorkloadForm = LongRunningForm | BatchForm | ServerlessForm | DataProcessingForm | InteractiveForm
WORKLOADS: dict[str, type[WorkloadForm]] = {
    "batch": BatchForm, "long-running": LongRunningForm, "serverless": ServerlessForm,
    "data-processing": DataProcessingForm, "interactive": InteractiveForm,
}  # fmt: skip

# ------------------------------------------------------------------------------------------- keys of a task

Env = Annotated[
    dict[Annotated[str, _text(256)], Long | Whole],
    Meta(max_length=1024),
    _about("Environment variables.", {"LEVEL": "debug"}),
]
Workdir = Annotated[str, _text(4096), _about("Absolute path of the working directory.", "/srv/data")]
Image = Annotated[str, _text(512), _about("Container image, where the backend runs containers.", "python:3.12")]
Count = Annotated[
    int, Meta(ge=1, le=MAX_COUNT), _about("How many equal members; all are placed together or none is. Default 1.")
]
Min = Annotated[int, Meta(ge=1, le=MAX_COUNT), _about("So many of `count` are enough to start. Default: all of them.")]
Backends = Annotated[Words, _about("Backends that it may run on. Default: any.", ["cluster-a", "cluster-b"])]
Binding = Annotated[
    Literal["cores", "numa"],
    _about("`cores`: whole cores of its own. `numa`: such cores, and its GPUs, all of one socket."),
]
ResourceForm = Annotated[
    dict[Key, Quantity | Quantities],
    Meta(max_length=64),
    _about(
        "`{requests: {...}, limits: {...}}` as in Kubernetes, or the requests themselves by name.",
        {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        {"example.com/fpga": 1},
    ),
]
Limits = Annotated[Quantities, _about("The most that may be used; not below the request.", {"memory": "2Gi"})]
Arch = Annotated[Word, _about("Processor architecture.", "amd64", "arm64")]
GpuType = Annotated[Word, _about("Kind of GPU; needs `gpu`.", "a100")]
Selector = Annotated[Labels, _about("Labels that a node must have.", {"disk": "ssd"})]
AffinityKey = Annotated[AffinityForm, _about("Which nodes are demanded or preferred.")]
Tolerations = Annotated[
    list[Line | TolerationForm],
    Meta(max_length=64),
    _about("Taints that do not matter: `key`, `key:Effect`, `key=value:Effect`, or Kubernetes' shape.", ["gpu"]),
]
JobAffinityKey = Annotated[JobAffinityForm, _about("Jobs that are demanded or preferred in the same place.")]
JobAntiAffinityKey = Annotated[JobAffinityForm, _about("Jobs that are refused or disliked in the same place.")]
AffinityRules = Annotated[
    list[AffinityRuleForm],
    Meta(max_length=64),
    _about("Where other jobs are, in short.", [{"with": "app=db", "same": "region"}]),
]
Spread = Annotated[
    list[SpreadForm],
    Meta(max_length=64),
    _about("How members are spread over places.", [{"topology": "zone", "match": "app=web"}]),
]
Constraints = Annotated[list[Constraint], Meta(max_length=64), _about("Kubernetes' way to write `spread`.")]
Ports = Annotated[
    list[Annotated[int, Meta(ge=1, le=65535)] | PortForm],
    Meta(max_length=256),
    _about("Ports of the node itself that it holds.", [8080]),
]


class _TaskKeys(_Form, frozen=True):
    command: Command | None = None
    env: Env | None = None
    workdir: Workdir | None = None
    image: Image | None = None
    count: Count | None = None
    resources: ResourceForm | None = None
    arch: Arch | None = None
    gpu_type: GpuType | None = None
    node_selector: Selector | None = None
    affinity: AffinityKey | None = None
    tolerations: Tolerations | None = None
    job_affinity: JobAffinityKey | None = None
    job_anti_affinity: JobAntiAffinityKey | None = None
    affinity_rules: AffinityRules | None = None
    spread: Spread | None = None
    constraints: Constraints | None = field(name="topology_spread_constraints", default=None)
    ports: Ports | None = None
    min_count: Min | None = field(name="min", default=None)
    backends: Backends | None = None
    binding: Binding | None = None


class TaskForm(_TaskKeys, frozen=True):
    """A part of a job: `count` equal members with the same command and resources."""

    name: (
        Annotated[Word, _about("Unique within the job. Default `main`, with several tasks `task-1`, `task-2`...")]
        | None
    ) = None


# ------------------------------------------------------------------------------------------- keys of a job

Project = Annotated[Word, _about("The project that it counts for. Default `default`.")]
LabelsKey = Annotated[Labels, _about("For finding and grouping jobs.", {"team": "a"})]
Annotations = Annotated[dict[Key, Long], Meta(max_length=256), _about("Notes that nothing is decided by.")]
Priority = Annotated[
    Annotated[int, Meta(ge=-(2**31), le=2**31)] | Short,
    _about(
        "A class (critical, high, medium, low, batch, scavenger) or a whole number. Default `medium` (500).", "high"
    ),
]
Profile = Annotated[Word, _about("The scheduling profile. Default `default`.")]
Backend = Annotated[
    Word | BackendForm, _about("A backend's name, `any`, or `{specific: [...]}`, `{preferred: [...]}`.")
]
Near = Annotated[NearForm, _about("Where the work is wanted; nodes nearer to it score higher.")]
Workload = Annotated[
    Short | WorkloadForm, _about("The kind of work. Default `batch`.", "batch", {"type": "serverless"})
]
Inputs = Annotated[
    list[Word], Meta(max_length=64), _about("Data sets that it reads; nodes that hold them score higher.", ["imagenet"])
]
Estimate = Annotated[Duration, _about("How long it will probably run.", "1h30m")]
Timeout = Annotated[Duration, _about("Stop a run after this long.", "15m", "01:30:00")]
SchedulingTimeout = Annotated[Duration, _about("Fail the job if it waits longer than this.", "2h")]
MaxQueueTime = Annotated[Duration, _about("Fail the job if it has not started for the first time within this.", "6h")]
Deadline = Annotated[
    Duration, _about("When it should be done: a time, or so long after submission.", "2030-01-31T18:00:00Z", "4h")
]
Grace = Annotated[Duration, _about("Time between TERM and KILL when it is stopped. Default `10s`.", "30s")]
Retries = Annotated[int, Meta(ge=0, le=1000), _about("How often a failed job is tried again. Default 0.")]
Gang = Annotated[GangForm, _about("How the members belong together.", {"topology": "rack", "on_failure": "repair"})]
PerNode = Annotated[bool, _about("Run once on every node that suits it, also on those that join later.", True)]
Distribution = Annotated[DistributionForm, _about("How the tasks lie over backends.", {"model": "colocated"})]
Checkpoint = Annotated[
    CheckpointForm, _about("How a run saves its work before it is stopped.", {"signal": "USR1", "timeout": "30s"})
]

# FlatJob and JobKeys name the same keys of a job: a Struct can have one base with fields, and FlatJob's is _TaskKeys.


class FlatJob(_TaskKeys, frozen=True):
    """The short form: one task, all keys on one level."""

    name: (
        Annotated[Word, _about("Lower case letters, digits, `-` and `.`. Default: the command's own name.")] | None
    ) = None
    project: Project | None = None
    labels: LabelsKey | None = None
    annotations: Annotations | None = None
    cpu: Annotated[Quantity, _about("Cores. Default 1.", 2, "500m")] | None = None
    memory: Annotated[Quantity, _about("Bytes of memory. Default `256Mi`.", "512Mi", "8Gi")] | None = None
    storage: Annotated[Quantity, _about("Bytes of scratch space on the node.", "20Gi")] | None = None
    gpu: Annotated[Quantity, _about("GPUs: a part of one, or whole ones.", 1, 0.5)] | None = None
    limits: Limits | None = None
    priority: Priority | None = None
    profile: Profile | None = None
    backend: Backend | None = None
    near: Near | None = None
    inputs: Inputs | None = None
    workload: Workload | None = None
    estimate: Estimate | None = None
    timeout: Timeout | None = None
    scheduling_timeout: SchedulingTimeout | None = None
    max_queue_time: MaxQueueTime | None = None
    deadline: Deadline | None = None
    grace: Grace | None = None
    retries: Retries | None = None
    restart: Restart | None = None
    gang: Gang | None = None
    per_node: PerNode | None = None
    distribution: Distribution | None = None
    checkpoint: Checkpoint | None = None
    health: HealthKey | None = None
    retry_on: RetryOnKey | None = None
    after: AfterKey | None = None
    array: ArrayKey | None = None
    escalation: EscalationKey | None = None


class Metadata(_Form, frozen=True):
    """Who it is."""

    name: Annotated[Word, _about("Lower case letters, digits, `-` and `.`.")]
    project: Project | None = None
    labels: LabelsKey | None = None
    annotations: Annotations | None = None


class JobKeys(_Form, frozen=True):
    """What is wanted."""

    tasks: Annotated[list[TaskForm], Meta(min_length=1, max_length=MAX_TASKS), _about("The parts of the job.")]
    priority: Priority | None = None
    profile: Profile | None = None
    backend: Backend | None = None
    near: Near | None = None
    inputs: Inputs | None = None
    workload: Workload | None = None
    estimate: Estimate | None = None
    timeout: Timeout | None = None
    scheduling_timeout: SchedulingTimeout | None = None
    max_queue_time: MaxQueueTime | None = None
    deadline: Deadline | None = None
    grace: Grace | None = None
    retries: Retries | None = None
    restart: Restart | None = None
    gang: Gang | None = None
    per_node: PerNode | None = None
    distribution: Distribution | None = None
    checkpoint: Checkpoint | None = None
    health: HealthKey | None = None
    retry_on: RetryOnKey | None = None
    after: AfterKey | None = None
    array: ArrayKey | None = None
    escalation: EscalationKey | None = None


class FullJob(_Form, frozen=True):
    """The full form: one or more tasks, in the shape of a Kubernetes object."""

    api_version: Literal["hodei/v1"] = field(name="apiVersion")
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobKeys


class FlatJobs(_Form, frozen=True):
    """Many jobs in one request."""

    jobs: Annotated[list[FlatJob], Meta(max_length=MAX_JOBS)]


class FullJobs(_Form, frozen=True):
    """Many jobs in one request."""

    jobs: Annotated[list[FullJob], Meta(max_length=MAX_JOBS)]


# ----------------------------------------------------------------------------------------- json schema
# The JSON Schema of job files, made from the same types that read them, for editors and other programs.


SCHEMA_ID = "urn:hodei:schema:job:v1"


@cache
def job_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of both forms. Kubernetes' spelling of a key stands beside ours. Not to be changed by callers."""
    _, components = msgspec.json.schema_components([FlatJob, FullJob], ref_template="#/$defs/{name}")
    definitions = {name: _with_twins(_tidy(definition, components)) for name, definition in components.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "Hodei job",
        "description": "A job in its short form (one task, all keys on one level) or its full form (one or more tasks).",
        "if": {"anyOf": [{"required": [key]} for key in ("apiVersion", "api_version", "kind", "metadata", "spec")]},
        "then": {"$ref": "#/$defs/FullJob"},
        "else": {"$ref": "#/$defs/FlatJob"},
        "$defs": definitions,
    }


def _tidy(part: Any, definitions: dict[str, Any]) -> Any:
    """Descriptions and examples out of `anyOf [..., null]`, where editors do not look for them."""
    if isinstance(part, list):
        return [_tidy(inner, definitions) for inner in part]
    if not isinstance(part, dict):
        return part
    part = {key: _tidy(inner, definitions) for key, inner in part.items() if not (key == "default" and inner is None)}
    options = part.get("anyOf")
    if isinstance(options, list) and len(options) == 2 and options[1] == {"type": "null"}:
        option = options[0]
        for key in ("description", "examples"):
            if key in option:
                part.setdefault(key, option.pop(key))
    if "description" not in part and (reference := part.get("$ref") or (options and options[0].get("$ref"))):
        part["description"] = definitions[reference.rpartition("/")[2]]["description"]
    return part


def _with_twins(definition: dict[str, Any]) -> dict[str, Any]:
    """Each key in its other spelling too; a required key is then required in one of the two."""
    properties = definition.get("properties")
    if not properties:
        return definition
    out = dict(definition, properties=dict(properties), additionalProperties=False)
    either = []
    for name in properties:
        for twin in twins(name):
            out["properties"][twin] = dict(properties[name], description=f"Another spelling of `{name}`.")
            if name in definition.get("required", ()):
                either.append({"anyOf": [{"required": [name]}, {"required": [twin]}]})
                out["required"] = [key for key in out["required"] if key != name]
    if either:
        out["allOf"] = either
    return out
