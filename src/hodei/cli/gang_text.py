"""The rules of a gang in words, from the document of a job; and how many of its members run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hodei.jobfile.number_lists import format_numbers

if TYPE_CHECKING:
    from hodei.api.views import JobDetail, RunView


def members(detail: JobDetail) -> str:
    """`8 in 1 task, 4 are enough; 5 of 8 run`: the last only while some of the members do not."""
    view = detail.job
    running = len({run.member for run in detail.runs if run.attempt >= view.first_attempt and run.state == "running"})
    if _keys(detail).get("per_node"):
        return "one on each node that suits it" + (f"; {running} run" if view.state == "running" else "")
    text = f"{view.members} in {view.tasks} task{'s' if view.tasks != 1 else ''}"
    tasks: list[dict[str, Any]] = _keys(detail).get("tasks") or []
    if any(task.get("min") for task in tasks):
        enough = sum(task.get("min") or task.get("count") or 1 for task in tasks)
        text += f", {enough} {'is' if enough == 1 else 'are'} enough"
    if view.state == "running" and running < view.members:
        text += f"; {running} of {view.members} run"
    return text


def gang(detail: JobDetail) -> str:
    rules: dict[str, Any] = _keys(detail).get("gang") or {}
    said = []
    if topology := rules.get("topology"):
        wish = isinstance(topology, dict)
        said.append(f"all in one {topology['key']} if possible" if wish else f"all in one {topology}")
    if rules.get("on_failure") == "repair":
        said.append("a lost member is replaced alone")
    elif rules:
        said.append("a lost member starts all again")
    if rules.get("assembly_timeout"):
        said.append(f"all must run within {rules['assembly_timeout']}")
    if rules.get("elastic"):
        said.append("grows and shrinks with the room there is")
    return "; ".join(said)


def waits(detail: JobDetail) -> str:
    """How long it may wait, with the defaults of its profile or of the server."""
    keys = _keys(detail)
    said = [f"{keys['scheduling_timeout']} each time"] if keys.get("scheduling_timeout") else []
    said += [f"{keys['max_queue_time']} for its first start"] if keys.get("max_queue_time") else []
    return ", ".join(said)


def distribution(detail: JobDetail) -> str:
    rules: dict[str, Any] = _keys(detail).get("distribution") or {}
    match rules.get("model"):
        case "colocated":
            return "all tasks on one backend"
        case "distributed":
            return "tasks over backends, by transfer costs"
        case "hub_and_spoke":
            return f"tasks over backends, by transfer costs to {rules.get('hub')}"
    return ""


def checkpoint(detail: JobDetail) -> str:
    rules: dict[str, Any] = _keys(detail).get("checkpoint") or {}
    said = []
    if rules.get("signal"):
        said.append(f"signal {rules['signal']}")
    if rules.get("command"):
        said.append("command " + " ".join(rules["command"]))
    if said:
        said.append(f"up to {rules.get('timeout', '30s')} before it is stopped")
    if rules.get("file"):
        said.append(f"seen by {rules['file']}")
    return ", ".join(said)


def parts(run: RunView) -> str:
    """`cpu 0-3, gpu 0, gpu 1 x0.5`: what of the node is the run's own."""
    said = [f"cpu {format_numbers(run.cpus)}"] if run.cpus else []
    said += _gpus(run.gpus.items())
    return ", ".join(said)


def _gpus(shares: Iterable[tuple[str, float]]) -> list[str]:
    return [f"gpu {number}" + (f" x{share:g}" if share != 1 else "") for number, share in shares]


def _keys(detail: JobDetail) -> dict[str, Any]:
    keys = detail.spec.get("spec")
    return keys if isinstance(keys, dict) else {}
