"""Facts and acts on one line each, for whoever has to understand a failing seed."""

from __future__ import annotations

from hodei.model.effects import Forget, Start, Stop, WithdrawStop
from hodei.model.facts import JobRestored, JobSubmitted, NodeJoined, RunObserved
from hodei.model.job import JobSpec
from hodei.model.node import Node


def in_words(what: object) -> str:
    match what:
        case JobSubmitted(job=job):
            return f"submitted job {job.id}: {_spec(job.spec)}"
        case JobRestored(job=job, runs=runs):
            states = " ".join(f"{run.id}:{run.state}" for run in runs)
            return f"restored job {job.id} {job.state} {states}: {_spec(job.spec)}"
        case NodeJoined(node=node):
            return f"node {_node(node)}"
        case RunObserved():
            why = " ".join(part for part in (what.reason_code, what.reason) if part)
            return f"observed {what.run} {what.state} {why}"
        case Start(run=run):
            return f"START {run.id} on {run.node} ({run.backend})"
        case Stop():
            return f"STOP {what.run} ({what.backend}): {what.reason.text}"
        case WithdrawStop():
            return f"SPARE {what.run} ({what.backend})"
        case Forget():
            return f"FORGET {what.run} ({what.backend})"
    return str(what)


def _spec(spec: JobSpec) -> str:
    tasks = ", ".join(f"{task.needed}-{task.count} x {task.request} {task.binding}".strip() for task in spec.tasks)
    words = [f"{spec.profile} {spec.priority}", tasks, f"estimate {spec.estimate_ms}", spec.restart, str(spec.retries)]
    gang = spec.gang
    words += [gang.on_failure, "elastic" * gang.elastic, f"assembly {gang.assembly_timeout_ms}", gang.topology]
    return "; ".join(word for word in words if word)


def _node(node: Node) -> str:
    words = [f"{node.name} ({node.backend})", str(node.capacity), *map(str, node.taints)]
    return " ".join([*words, "" if node.ready else "NOT READY", "sockets" if node.sockets else ""]).strip()
