"""The keys `gang`, `distribution`, `checkpoint`, and `min`, `backends`, `binding` of a task."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from hodei.jobfile.values import (
    Command,
    Duration,
    Form,
    Key,
    Problems,
    Short,
    Word,
    about,
    absolute_path,
    command,
    did_you_mean,
    duration,
    duration_value,
    non_empty,
    program,
    try_parse,
)
from hodei.model.errors import InvalidInput
from hodei.model.job import Binding, Checkpoint, Distribution, GangRules, JobSpec, TaskSpec, TransferCost
from hodei.model.names import label_key, safe_repr, word
from hodei.model.resources import CPU, Resources, format_duration, human_amount

if TYPE_CHECKING:
    from hodei.jobfile import schema


class TopologyForm(Form, frozen=True):
    """A label of nodes with the same value for all members, required or preferred."""

    key: Annotated[Key, about("A label of nodes, or region, zone, datacenter, rack, host, backend.", "rack", "backend")]
    required: Annotated[bool, about("Required, or (false) only preferred. Default true.")] = True


class GangForm(Form, frozen=True):
    """How the members of a job belong together."""

    topology: (
        Annotated[
            Key | TopologyForm,
            about("All members in one domain: rack, zone, ...", "rack", {"key": "rack", "required": False}),
        ]
        | None
    ) = None
    on_failure: (
        Annotated[
            Literal["restart", "repair"],
            about("When one member fails or is lost: restart all, or only that one. Default `restart`."),
        ]
        | None
    ) = None
    assembly_timeout: (
        Annotated[Duration, about("Stop all members unless all run within this time after placement.", "5m")] | None
    ) = None
    elastic: (
        Annotated[bool, about("Add members while it runs if there is capacity, and give them up first. Default false.")]
        | None
    ) = None


class TransferCostForm(Form, frozen=True):
    """The cost of moving the data of one member between two backends, in either direction."""

    between: Annotated[list[Word], Meta(max_length=64), about("Two backends.", ["cluster-a", "cluster-b"])]
    cost: Annotated[float, Meta(ge=0, le=1_000_000), about("In any unit, to a thousandth.", 0.09)]


class DistributionForm(Form, frozen=True):
    """How the tasks of a job are distributed over backends."""

    model: Annotated[
        Literal["colocated", "distributed", "hub_and_spoke"],
        about(
            "All on one backend; each on any of its backends at the lowest cost; or the same with costs to a hub only."
        ),
    ]
    hub: Annotated[Word, about("The task at the hub; required for `hub_and_spoke`.")] | None = None
    transfer_costs: (
        Annotated[
            list[TransferCostForm],
            Meta(max_length=1024),
            about("Costs of moving data; 0 between backends that are not listed."),
        ]
        | None
    ) = None


class CheckpointForm(Form, frozen=True):
    """How a run takes a checkpoint before it is stopped."""

    signal: Annotated[Short, about("A signal to the run; not together with `command`.", "USR1")] | None = None
    command: Command | None = None
    timeout: Annotated[Duration, about("How long a checkpoint may take. Default `30s`.", "2m")] | None = None
    file: (
        Annotated[
            Annotated[str, Meta(max_length=4096)],
            about("A file whose modification time is that of the last checkpoint.", "/srv/model/checkpoint.json"),
        ]
        | None
    ) = None
    every: (
        Annotated[Duration, about("Take checkpoints this often while it runs; needs `signal` or `command`.", "10m")]
        | None
    ) = None


SIGNALS = ("ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")
_UNCATCHABLE = ("KILL", "STOP")
TaskRules = tuple[int, tuple[str, ...], Binding]
JobRules = tuple[GangRules, Distribution, Checkpoint]
_NO_TASK_RULES: TaskRules = (0, (), "")
_NO_JOB_RULES: JobRules = (GangRules(), Distribution(), Checkpoint())


def task_rules(form: schema.FlatJob | schema.TaskForm, request: Resources, at: str, problems: Problems) -> TaskRules:
    """`min_count`, `backends` and `binding` of a `TaskSpec`, in this order."""
    if form.min_count is None and form.backends is None and form.binding is None:
        return _NO_TASK_RULES
    count = form.count or 1
    if form.min_count is not None and form.min_count > count:
        problems.append((f"{at}min", f"{form.min_count} is more than the count, {count}"))
    cpu = request.get(CPU, 0)
    if form.binding is not None and (not cpu or cpu % 1000):
        problems.append((f"{at}binding", f"needs a whole number of cores, but the request is {human_amount(CPU, cpu)}"))
    backends = tuple(
        try_parse(problems, f"{at}backends[{i}]", word, name, name) for i, name in enumerate(form.backends or ())
    )
    return form.min_count or 0, tuple(dict.fromkeys(backends)), form.binding or ""


def job_rules(
    keys: schema.FlatJob | schema.JobKeys, tasks: tuple[TaskSpec, ...], at: str, problems: Problems
) -> JobRules:
    """`gang`, `distribution` and `checkpoint` of a `JobSpec`, in this order."""
    if keys.backend is not None and keys.backend != "any":
        _check_backends(keys, tasks, at, problems)
    if keys.gang is None and keys.distribution is None and keys.checkpoint is None and not keys.per_node:
        return _NO_JOB_RULES
    gang, distribution, checkpoint = _NO_JOB_RULES
    if keys.gang is not None:
        gang = _gang(keys.gang, tasks, f"{at}gang", problems)
    if keys.per_node:
        gang = GangRules(per_node=True)
        if len(tasks) > 1 or tasks[0].count > 1:
            problems.append((f"{at}per_node", "needs one task with a count of 1: there is one run on each node"))
        for key in ("gang", "distribution", "array"):
            if getattr(keys, key) is not None:
                problems.append((f"{at}per_node", f"cannot be used together with {key}"))
    if keys.distribution is not None:
        distribution = _distribution(keys.distribution, tasks, f"{at}distribution", problems)
    if keys.checkpoint is not None:
        checkpoint = _checkpoint(keys.checkpoint, f"{at}checkpoint", problems)
    return gang, distribution, checkpoint


def _gang(form: GangForm, tasks: tuple[TaskSpec, ...], at: str, problems: Problems) -> GangRules:
    topology, required = "", True
    if isinstance(form.topology, TopologyForm):
        topology = try_parse(problems, f"{at}.topology.key", label_key, form.topology.key, "")
        required = form.topology.required
    elif form.topology is not None:
        topology = try_parse(problems, f"{at}.topology", label_key, form.topology, "")
    if form.elastic and not any(task.needed < task.count for task in tasks):
        problems.append((f"{at}.elastic", "needs a task whose min is below its count"))
    return GangRules(
        topology,
        required,
        form.on_failure or "restart",
        duration(form.assembly_timeout, f"{at}.assembly_timeout", problems) or 0,
        bool(form.elastic),
    )


def _distribution(form: DistributionForm, tasks: tuple[TaskSpec, ...], at: str, problems: Problems) -> Distribution:
    names = [task.name for task in tasks]
    if form.model == "hub_and_spoke" and form.hub is None:
        problems.append((f"{at}.hub", f"missing: name the task at the hub, one of {', '.join(names[:8])}"))
    elif form.hub is not None and form.model != "hub_and_spoke":
        problems.append((f"{at}.hub", "needs model: hub_and_spoke"))
    elif form.hub is not None and form.hub not in names:
        text = f"there is no task {safe_repr(form.hub)}; one of {', '.join(names[:8])}{did_you_mean(form.hub, names)}"
        problems.append((f"{at}.hub", text))
    if form.transfer_costs and form.model == "colocated":
        problems.append((f"{at}.transfer_costs", "no data is moved with model: colocated; remove them"))
    if form.model == "colocated" and _common_backends(tasks) == set():
        problems.append((f"{at}.model", "the tasks have no backend in common"))
    costs = []
    seen = set()
    for i, cost in enumerate(form.transfer_costs or ()):
        path = f"{at}.transfer_costs[{i}].between"
        ends = [try_parse(problems, f"{path}[{j}]", word, name, name) for j, name in enumerate(cost.between)]
        if len(ends) != 2 or ends[0] == ends[1]:
            problems.append((path, "name two different backends, as in [a, b]"))
            continue
        if frozenset(ends) in seen:
            problems.append(
                (path, f"the cost between {ends[0]} and {ends[1]} is given twice; it applies in both directions")
            )
        seen.add(frozenset(ends))
        costs.append(TransferCost((ends[0], ends[1]), round(cost.cost * 1000)))
    return Distribution(form.model, form.hub or "", tuple(costs))


def _check_backends(
    keys: schema.FlatJob | schema.JobKeys, tasks: tuple[TaskSpec, ...], at: str, problems: Problems
) -> None:
    """The backend of the job restricts the backends of its tasks."""
    allowed = [keys.backend] if isinstance(keys.backend, str) else keys.backend.specific if keys.backend else None
    if allowed is None:
        return
    for i, task in enumerate(tasks):
        if task.backends and not set(task.backends) & set(allowed):
            path = f"{at}tasks[{i}].backends" if hasattr(keys, "tasks") else f"{at}backends"
            problems.append((path, f"none of them is allowed by the job's backend, {', '.join(allowed)}"))


def _common_backends(tasks: tuple[TaskSpec, ...]) -> set[str] | None:
    """The backends on which every task may run; None for any."""
    named = [set(task.backends) for task in tasks if task.backends]
    return set.intersection(*named) if named else None


def _checkpoint(form: CheckpointForm, at: str, problems: Problems) -> Checkpoint:
    has_trigger = form.signal is not None or form.command is not None
    if form.signal is not None and form.command is not None:
        problems.append((at, "give either a signal or a command, not both"))
    if not has_trigger and form.file is None:
        problems.append((at, "give a signal or a command that takes the checkpoint, or a file"))
    if form.command is not None and not program(form.command):
        problems.append((f"{at}.command", "missing: give the program and its arguments"))
    timeout = duration(form.timeout, f"{at}.timeout", problems)
    if timeout == 0:
        problems.append((f"{at}.timeout", "too short; give at least 1s, or remove the checkpoint"))
    elif timeout and not has_trigger and form.file is not None:
        problems.append((f"{at}.timeout", "needs a signal or a command"))
    every = duration(form.every, f"{at}.every", problems)
    if every is not None and not has_trigger:
        problems.append((f"{at}.every", "needs a signal or a command"))
    elif every is not None and every < 1000:
        problems.append((f"{at}.every", "too short; give at least 1s"))
    return Checkpoint(
        "" if form.signal is None else try_parse(problems, f"{at}.signal", signal_name, form.signal, ""),
        () if form.command is None else command(form.command, f"{at}.command", problems),
        30_000 if timeout is None else timeout,
        "" if form.file is None else try_parse(problems, f"{at}.file", absolute_path, form.file, ""),
        every or 0,
    )


@lru_cache(maxsize=256)
def signal_name(text: str) -> str:
    """`usr1`, `USR1` and `SIGUSR1` are `USR1`."""
    name = text.strip().upper().removeprefix("SIG")
    if name in _UNCATCHABLE:
        raise InvalidInput(f"a program cannot catch {name}, so it would take no checkpoint", hint="for example USR1")
    if name not in SIGNALS:
        raise InvalidInput(f"unknown signal {safe_repr(text)}: {', '.join(SIGNALS)}{did_you_mean(name, SIGNALS)}")
    return name


# Empty values are omitted by the caller.


def render_task_rules(task: TaskSpec) -> dict[str, Any]:
    return {"min": task.min_count, "backends": list(task.backends), "binding": task.binding}


def render_job_rules(spec: JobSpec) -> dict[str, Any]:
    return {
        "gang": _render_gang(spec.gang),
        "per_node": spec.gang.per_node,
        "distribution": _render_distribution(spec.distribution),
        "checkpoint": _render_checkpoint(spec.checkpoint),
    }


def _render_gang(gang: GangRules) -> dict[str, Any]:
    preferred = {"key": gang.topology, "required": False} if gang.topology else ""
    return non_empty(
        {
            "topology": gang.topology if gang.topology_required else preferred,
            "on_failure": gang.on_failure if gang.on_failure != "restart" else "",
            "assembly_timeout": duration_value(gang.assembly_timeout_ms),
            "elastic": gang.elastic,
        }
    )


def _render_distribution(distribution: Distribution) -> dict[str, Any]:
    costs = [{"between": list(cost.between), "cost": cost.cost_milli / 1000} for cost in distribution.transfer_costs]
    return non_empty({"model": distribution.model, "hub": distribution.hub, "transfer_costs": costs})


def _render_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    default = checkpoint.timeout_ms == Checkpoint().timeout_ms
    return non_empty(
        {
            "signal": checkpoint.signal,
            "command": list(checkpoint.command),
            "timeout": "" if default else format_duration(checkpoint.timeout_ms),
            "file": checkpoint.file,
            "every": duration_value(checkpoint.every_ms),
        }
    )
