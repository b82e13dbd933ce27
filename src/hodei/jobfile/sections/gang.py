"""Rules about the members of a job together, from what was written to the model. Back again: `gang_render`."""

from __future__ import annotations

from functools import lru_cache

from hodei.jobfile import schema
from hodei.jobfile.names import did_you_mean, label_key, shown, word
from hodei.jobfile.sections import gang_schema as given
from hodei.jobfile.values import Problems, absolute_path, command, duration, program, take
from hodei.model.errors import InvalidInput
from hodei.model.job import Binding, Checkpoint, Distribution, GangRules, TaskSpec, TransferCost
from hodei.model.resources import CPU, Resources, human_amount

SIGNALS = ("ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")
_NOBODY_HEARS = ("KILL", "STOP")
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
        problems.append((f"{at}binding", f"needs a whole number of cpus, and it asks for {human_amount(CPU, cpu)}"))
    backends = tuple(
        take(problems, f"{at}backends[{i}]", word, name, name) for i, name in enumerate(form.backends or ())
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
            problems.append((f"{at}per_node", "is for one task with a count of 1: there is one run on each node"))
        for key in ("gang", "distribution", "array"):
            if getattr(keys, key) is not None:
                problems.append((f"{at}per_node", f"cannot be used together with {key}"))
    if keys.distribution is not None:
        distribution = _distribution(keys.distribution, tasks, f"{at}distribution", problems)
    if keys.checkpoint is not None:
        checkpoint = _checkpoint(keys.checkpoint, f"{at}checkpoint", problems)
    return gang, distribution, checkpoint


def _gang(form: given.GangForm, tasks: tuple[TaskSpec, ...], at: str, problems: Problems) -> GangRules:
    topology, required = "", True
    if isinstance(form.topology, given.TopologyForm):
        topology = take(problems, f"{at}.topology.key", label_key, form.topology.key, "")
        required = form.topology.required
    elif form.topology is not None:
        topology = take(problems, f"{at}.topology", label_key, form.topology, "")
    if form.elastic and not any(task.needed < task.count for task in tasks):
        problems.append((f"{at}.elastic", "needs a task whose min is below its count"))
    return GangRules(
        topology,
        required,
        form.on_failure or "restart",
        duration(form.assembly_timeout, f"{at}.assembly_timeout", problems) or 0,
        bool(form.elastic),
    )


# ------------------------------------------------------------------------------------------- over backends


def _distribution(
    form: given.DistributionForm, tasks: tuple[TaskSpec, ...], at: str, problems: Problems
) -> Distribution:
    names = [task.name for task in tasks]
    if form.model == "hub_and_spoke" and form.hub is None:
        problems.append((f"{at}.hub", f"missing: say which task is in the middle, one of {', '.join(names[:8])}"))
    elif form.hub is not None and form.model != "hub_and_spoke":
        problems.append((f"{at}.hub", "needs model: hub_and_spoke"))
    elif form.hub is not None and form.hub not in names:
        text = f"there is no task {shown(form.hub)}; one of {', '.join(names[:8])}{did_you_mean(form.hub, names)}"
        problems.append((f"{at}.hub", text))
    if form.transfer_costs and form.model == "colocated":
        problems.append((f"{at}.transfer_costs", "nothing is moved with model: colocated; leave them out"))
    if form.model == "colocated" and _together(tasks) == set():
        problems.append((f"{at}.model", "no backend is among those of every task"))
    costs = []
    seen = set()
    for i, cost in enumerate(form.transfer_costs or ()):
        path = f"{at}.transfer_costs[{i}].between"
        ends = [take(problems, f"{path}[{j}]", word, name, name) for j, name in enumerate(cost.between)]
        if len(ends) != 2 or ends[0] == ends[1]:
            problems.append((path, "name two different backends, as in [a, b]"))
            continue
        if frozenset(ends) in seen:
            problems.append((path, f"the cost between {ends[0]} and {ends[1]} is given twice; it holds either way"))
        seen.add(frozenset(ends))
        costs.append(TransferCost((ends[0], ends[1]), round(cost.cost * 1000)))
    return Distribution(form.model, form.hub or "", tuple(costs))


def _check_backends(
    keys: schema.FlatJob | schema.JobKeys, tasks: tuple[TaskSpec, ...], at: str, problems: Problems
) -> None:
    """A job that names its backend leaves its tasks no others."""
    allowed = [keys.backend] if isinstance(keys.backend, str) else keys.backend.specific if keys.backend else None
    if allowed is None:
        return
    for i, task in enumerate(tasks):
        if task.backends and not set(task.backends) & set(allowed):
            path = f"{at}tasks[{i}].backends" if isinstance(keys, schema.JobKeys) else f"{at}backends"
            problems.append((path, f"none of them is allowed by the job's backend, {', '.join(allowed)}"))


def _together(tasks: tuple[TaskSpec, ...]) -> set[str] | None:
    """The backends on which every task may run; None for any."""
    named = [set(task.backends) for task in tasks if task.backends]
    return set.intersection(*named) if named else None


# ------------------------------------------------------------------------------------------- saving work


def _checkpoint(form: given.CheckpointForm, at: str, problems: Problems) -> Checkpoint:
    hooked = form.signal is not None or form.command is not None
    if form.signal is not None and form.command is not None:
        problems.append((at, "give either a signal or a command, not both"))
    if not hooked and form.file is None:
        problems.append((at, "say how work is saved: signal or command, and perhaps file"))
    if form.command is not None and not program(form.command):
        problems.append((f"{at}.command", "missing: give the program and its arguments"))
    timeout = duration(form.timeout, f"{at}.timeout", problems)
    if timeout == 0:
        problems.append((f"{at}.timeout", "no time at all; give at least 1s, or leave the checkpoint out"))
    elif timeout and not hooked and form.file is not None:
        problems.append((f"{at}.timeout", "needs a signal or a command that it is for"))
    every = duration(form.every, f"{at}.every", problems)
    if every is not None and not hooked:
        problems.append((f"{at}.every", "needs a signal or a command with which work is saved"))
    elif every is not None and every < 1000:
        problems.append((f"{at}.every", "too short; give at least 1s"))
    return Checkpoint(
        "" if form.signal is None else take(problems, f"{at}.signal", signal_name, form.signal, ""),
        () if form.command is None else command(form.command, f"{at}.command", problems),
        30_000 if timeout is None else timeout,
        "" if form.file is None else take(problems, f"{at}.file", absolute_path, form.file, ""),
        every or 0,
    )


@lru_cache(maxsize=256)
def signal_name(text: str) -> str:
    """`usr1`, `USR1` and `SIGUSR1` are `USR1`."""
    name = text.strip().upper().removeprefix("SIG")
    if name in _NOBODY_HEARS:
        raise InvalidInput(f"{name} cannot be heard by a program, so nothing would be saved", hint="for example USR1")
    if name not in SIGNALS:
        raise InvalidInput(f"unknown signal {shown(text)}: {', '.join(SIGNALS)}{did_you_mean(name, SIGNALS)}")
    return name
