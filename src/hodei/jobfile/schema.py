"""The two forms of a job file as types, and their JSON Schema.

msgspec decodes the types (fast, stops at the first mistake) and `check` walks them (slow, finds every mistake). `parse`
converts them to the model. `None` means "not given" throughout.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from hodei.jobfile.check import spelling_variants
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
from hodei.jobfile.values import (
    Command,
    Duration,
    Expressions,
    Form,
    Integer,
    Key,
    Labels,
    Line,
    Long,
    Quantities,
    Quantity,
    Short,
    Weight,
    Word,
    Words,
    about,
    text,
)

MAX_TASKS = 64
MAX_COUNT = 100_000
MAX_JOBS = 10_000


class SelectorTerm(Form, frozen=True):
    """All conditions of a term must hold."""

    match_expressions: Expressions | None = field(name="matchExpressions", default=None)
    match_fields: Expressions | None = field(name="matchFields", default=None)


class NodeSelector(Form, frozen=True):
    """One of the terms must hold."""

    node_selector_terms: Annotated[list[SelectorTerm], Meta(min_length=1, max_length=64)] = field(
        name="nodeSelectorTerms"
    )


class PreferredTerm(Form, frozen=True):
    """A term that adds its weight when it holds."""

    weight: Weight
    preference: SelectorTerm


class NodeAffinity(Form, frozen=True):
    """Kubernetes' nodeAffinity."""

    required: NodeSelector | None = field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)
    preferred: Annotated[list[PreferredTerm], Meta(max_length=64)] | None = field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=None
    )


class Preference(Form, frozen=True):
    """A selector that adds its weight when it holds."""

    match: Annotated[Line, about("A selector.", "disk=ssd")]
    weight: Annotated[Weight, about("1 to 100.")] = 1


class AffinityForm(Form, frozen=True):
    """Either `required` and `preferred` with selectors, or Kubernetes' blocks as they are."""

    required: (
        Annotated[
            list[Line],
            Meta(max_length=64),
            about("Selectors; one of them must hold.", ["zone in (a, b)", "disk=ssd"]),
        ]
        | None
    ) = None
    preferred: Annotated[list[Preference], Meta(max_length=64), about("Preferences, by weight.")] | None = None
    node_affinity: NodeAffinity | None = field(name="nodeAffinity", default=None)
    pod_affinity: PodAffinity | None = field(name="podAffinity", default=None)
    pod_anti_affinity: PodAffinity | None = field(name="podAntiAffinity", default=None)


class TolerationForm(Form, frozen=True):
    """Kubernetes' toleration."""

    key: Key | None = None
    operator: Literal["Equal", "Exists"] | None = None
    value: Word | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] | None = None
    seconds: Annotated[int, Meta(ge=0, le=2**53)] | None = field(name="tolerationSeconds", default=None)


class BackendForm(Form, frozen=True):
    """At most one of `specific` and `preferred`."""

    specific: Annotated[Words, about("Only one of these.")] | None = None
    preferred: (
        Annotated[
            Words | dict[Word, Annotated[int, Meta(ge=1, le=100)]],
            about("These first, else any; with weights from 1 to 100 the heaviest first.", {"onprem": 80, "cloud": 20}),
        ]
        | None
    ) = None
    avoid: Annotated[Words, about("These only if no other backend has capacity.")] | None = None
    offline: (
        Annotated[Duration, about("May wait on a device that is offline, which must start it within this.", "2h")]
        | None
    ) = None


class NearForm(Form, frozen=True):
    """The preferred location; closer nodes score higher."""

    region: Word | None = None
    zone: Word | None = None
    datacenter: Word | None = None
    rack: Word | None = None
    lat: Annotated[float, Meta(ge=-90, le=90), about("Degrees north.")] | None = None
    lng: Annotated[float, Meta(ge=-180, le=180), about("Degrees east.")] | None = None


Restart = Annotated[
    Short,
    about(
        "When an ended run is restarted.",
        enum=["never", "on_failure", "always", "Never", "OnFailure", "Always"],
    ),
]


class LongRunningForm(Form, frozen=True, tag="long-running", tag_field="type"):
    """A service that is not expected to end."""

    max_duration: Annotated[Duration, about("Stop it after this long; fills `timeout`.", "30d")] | None = None
    restart_policy: Annotated[Restart, about("Fills `restart`.")] | None = None


class BatchForm(Form, frozen=True, tag="batch", tag_field="type"):
    """A job that runs to completion."""

    estimated_duration: Annotated[Duration, about("Fills `estimate`.", "1h30m")] | None = None
    max_retries: Annotated[int, Meta(ge=0, le=1000), about("Fills `retries`.")] | None = None


class ServerlessForm(Form, frozen=True, tag="serverless", tag_field="type"):
    """A short call."""

    timeout: Annotated[Duration, about("Fills `timeout`.", "30s")] | None = None
    cold_start_acceptable: bool | None = None


class DataProcessingForm(Form, frozen=True, tag="data-processing", tag_field="type"):
    """A job that is placed close to its data."""

    input_size: Annotated[Quantity, about("Bytes read.", "500Gi")] | None = None
    output_size: Annotated[Quantity, about("Bytes written.", "10Gi")] | None = None


class InteractiveForm(Form, frozen=True, tag="interactive", tag_field="type"):
    """A session that a person uses."""

    max_execution_time: Annotated[Duration, about("Fills `timeout`.", "8h")] | None = None
    idle_timeout: Annotated[Duration, about("Stop it after being idle this long.", "20m")] | None = None


WorkloadForm = LongRunningForm | BatchForm | ServerlessForm | DataProcessingForm | InteractiveForm
WORKLOADS: dict[str, type[WorkloadForm]] = {
    "batch": BatchForm, "long-running": LongRunningForm, "serverless": ServerlessForm,
    "data-processing": DataProcessingForm, "interactive": InteractiveForm,
}  # fmt: skip

Env = Annotated[
    dict[Annotated[str, text(256)], Long | Integer],
    Meta(max_length=1024),
    about("Environment variables.", {"LEVEL": "debug"}),
]
Workdir = Annotated[str, text(4096), about("Absolute path of the working directory.", "/srv/data")]
Image = Annotated[str, text(512), about("Container image, where the backend runs containers.", "python:3.12")]
Count = Annotated[
    int, Meta(ge=1, le=MAX_COUNT), about("Number of equal members; all are placed together or none is. Default 1.")
]
Min = Annotated[int, Meta(ge=1, le=MAX_COUNT), about("How many of `count` are enough to start. Default: all.")]
Backends = Annotated[Words, about("Backends that it may run on. Default: any.", ["cluster-a", "cluster-b"])]
Binding = Annotated[
    Literal["cores", "numa"],
    about("`cores`: its own whole cores. `numa`: its own whole cores and its GPUs on one socket."),
]
ResourceForm = Annotated[
    dict[Key, Quantity | Quantities],
    Meta(max_length=64),
    about(
        "`{requests: {...}, limits: {...}}` as in Kubernetes, or the requests themselves by name.",
        {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        {"example.com/fpga": 1},
    ),
]
Limits = Annotated[Quantities, about("Upper limits; not below the request.", {"memory": "2Gi"})]
Arch = Annotated[Word, about("Processor architecture.", "amd64", "arm64")]
GpuType = Annotated[Word, about("Kind of GPU; needs `gpu`.", "a100")]
Selector = Annotated[Labels, about("Labels that a node must have.", {"disk": "ssd"})]
AffinityKey = Annotated[AffinityForm, about("Required and preferred nodes.")]
Tolerations = Annotated[
    list[Line | TolerationForm],
    Meta(max_length=64),
    about("Tolerated taints: `key`, `key:Effect`, `key=value:Effect`, or Kubernetes' form.", ["gpu"]),
]
JobAffinityKey = Annotated[JobAffinityForm, about("Jobs that are required or preferred in the same domain.")]
JobAntiAffinityKey = Annotated[JobAffinityForm, about("Jobs that are excluded or avoided in the same domain.")]
AffinityRules = Annotated[
    list[AffinityRuleForm],
    Meta(max_length=64),
    about("A short form of job affinity and spread.", [{"with": "app=db", "same": "region"}]),
]
Spread = Annotated[
    list[SpreadForm],
    Meta(max_length=64),
    about("How members are spread over domains.", [{"topology": "zone", "match": "app=web"}]),
]
Constraints = Annotated[list[Constraint], Meta(max_length=64), about("Kubernetes' form of `spread`.")]
Ports = Annotated[
    list[Annotated[int, Meta(ge=1, le=65535)] | PortForm],
    Meta(max_length=256),
    about("Ports of the node that it uses.", [8080]),
]


class _TaskKeys(Form, frozen=True):
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
        Annotated[Word, about("Unique within the job. Default `main`, with several tasks `task-1`, `task-2`...")] | None
    ) = None


Project = Annotated[Word, about("The project that it counts for. Default `default`.")]
LabelsKey = Annotated[Labels, about("Labels for selecting and grouping jobs.", {"team": "a"})]
Annotations = Annotated[dict[Key, Long], Meta(max_length=256), about("Notes without effect on scheduling.")]
Priority = Annotated[
    Annotated[int, Meta(ge=-(2**31), le=2**31)] | Short,
    about("A class (critical, high, medium, low, batch, scavenger) or a whole number. Default `medium` (500).", "high"),
]
Profile = Annotated[Word, about("The scheduling profile. Default `default`.")]
Backend = Annotated[Word | BackendForm, about("A backend's name, `any`, or `{specific: [...]}`, `{preferred: [...]}`.")]
Near = Annotated[NearForm, about("The preferred location; closer nodes score higher.")]
Workload = Annotated[
    Short | WorkloadForm, about("The type of the job. Default `batch`.", "batch", {"type": "serverless"})
]
Inputs = Annotated[
    list[Word], Meta(max_length=64), about("Data sets that it reads; nodes that hold them score higher.", ["imagenet"])
]
Estimate = Annotated[Duration, about("Expected run time.", "1h30m")]
Timeout = Annotated[Duration, about("Stop a run after this long.", "15m", "01:30:00")]
SchedulingTimeout = Annotated[Duration, about("Fail the job if it waits longer than this.", "2h")]
MaxQueueTime = Annotated[Duration, about("Fail the job if it has not started for the first time within this.", "6h")]
Deadline = Annotated[
    Duration, about("When it should be done: a time, or a duration after submission.", "2030-01-31T18:00:00Z", "4h")
]
Grace = Annotated[Duration, about("Time between TERM and KILL when it is stopped. Default `10s`.", "30s")]
Retries = Annotated[int, Meta(ge=0, le=1000), about("Number of retries of a failed job. Default 0.")]
Gang = Annotated[GangForm, about("How the members belong together.", {"topology": "rack", "on_failure": "repair"})]
PerNode = Annotated[bool, about("Run once on every matching node, also on nodes that join later.", True)]
Distribution = Annotated[
    DistributionForm, about("How the tasks are distributed over backends.", {"model": "colocated"})
]
Checkpoint = Annotated[
    CheckpointForm, about("How a run takes a checkpoint before it is stopped.", {"signal": "USR1", "timeout": "30s"})
]

# FlatJob and JobKeys repeat the keys of a job: a Struct can have only one base with fields, and FlatJob's is _TaskKeys.


class FlatJob(_TaskKeys, frozen=True):
    """The short form: one task, all keys on one level."""

    name: Annotated[Word, about("Lower case letters, digits, `-` and `.`. Default: the command's own name.")] | None = (
        None
    )
    project: Project | None = None
    labels: LabelsKey | None = None
    annotations: Annotations | None = None
    cpu: Annotated[Quantity, about("Cores. Default 1.", 2, "500m")] | None = None
    memory: Annotated[Quantity, about("Bytes of memory. Default `256Mi`.", "512Mi", "8Gi")] | None = None
    storage: Annotated[Quantity, about("Bytes of scratch space on the node.", "20Gi")] | None = None
    gpu: Annotated[Quantity, about("GPUs: a part of one, or whole ones.", 1, 0.5)] | None = None
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


class Metadata(Form, frozen=True):
    """Name, project, labels and annotations."""

    name: Annotated[Word, about("Lower case letters, digits, `-` and `.`.")]
    project: Project | None = None
    labels: LabelsKey | None = None
    annotations: Annotations | None = None


class JobKeys(Form, frozen=True):
    """The specification of a job."""

    tasks: Annotated[list[TaskForm], Meta(min_length=1, max_length=MAX_TASKS), about("The parts of the job.")]
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


class FullJob(Form, frozen=True):
    """The full form: one or more tasks, in the shape of a Kubernetes object."""

    api_version: Literal["hodei/v1"] = field(name="apiVersion")
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobKeys


class FlatJobs(Form, frozen=True):
    """Many jobs in one request."""

    jobs: Annotated[list[FlatJob], Meta(max_length=MAX_JOBS)]


class FullJobs(Form, frozen=True):
    """Many jobs in one request."""

    jobs: Annotated[list[FullJob], Meta(max_length=MAX_JOBS)]


SCHEMA_ID = "urn:hodei:schema:job:v1"


@cache
def job_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of both forms, with both spellings of each key. Cached: callers must not change it."""
    _, components = msgspec.json.schema_components([FlatJob, FullJob], ref_template="#/$defs/{name}")
    definitions = {name: _with_variants(_tidy(definition, components)) for name, definition in components.items()}
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
    """Move descriptions and examples out of `anyOf [..., null]`, where editors do not find them."""
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


def _with_variants(definition: dict[str, Any]) -> dict[str, Any]:
    """Add the other spelling of each key; a required key is then required in one of the two."""
    properties = definition.get("properties")
    if not properties:
        return definition
    out = dict(definition, properties=dict(properties), additionalProperties=False)
    either = []
    for name in properties:
        for variant in spelling_variants(name):
            out["properties"][variant] = dict(properties[name], description=f"Another spelling of `{name}`.")
            if name in definition.get("required", ()):
                either.append({"anyOf": [{"required": [name]}, {"required": [variant]}]})
                out["required"] = [key for key in out["required"] if key != name]
    if either:
        out["allOf"] = either
    return out
