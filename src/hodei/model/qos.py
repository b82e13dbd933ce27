"""How firmly a member's resources are promised: Kubernetes' classes, from its requests and limits of cpu and memory.

The requests are those that count for placement. When a job file says nothing, its defaults have been filled in before
(as a LimitRange does in Kubernetes) and the task is burstable; best-effort is said with requests of 0 and no limits.
"""

from __future__ import annotations

from typing import Literal

from hodei.model.job import JobSpec, TaskSpec
from hodei.model.resources import CPU, MEMORY

QoS = Literal["guaranteed", "burstable", "best-effort"]


def qos(task: TaskSpec) -> QoS:
    """Guaranteed: cpu and memory both have a limit, equal to the request. Best-effort: neither has request or limit.
    An amount of 0 is as good as none; a limit without a request is a request of the same amount."""
    request, limits = task.request, task.limits
    cpu, memory = limits.get(CPU, 0), limits.get(MEMORY, 0)
    if cpu and memory and request.get(CPU, cpu) == cpu and request.get(MEMORY, memory) == memory:
        return "guaranteed"
    return "burstable" if cpu or memory or request.get(CPU) or request.get(MEMORY) else "best-effort"


def job_qos(spec: JobSpec) -> QoS:
    """The weakest of its tasks'."""
    classes = [qos(task) for task in spec.tasks]
    if "best-effort" in classes:
        return "best-effort"
    return "burstable" if "burstable" in classes else "guaranteed"
